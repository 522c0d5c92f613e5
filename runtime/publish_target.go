package runtime

import (
	"context"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/runtime/codec"
	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/runtime/metrics"
)

// publishTargets holds the open publishing side of every topology that was published to.
type publishTargets struct {
	mu     sync.Mutex
	byName map[string]*publishSlot
}

// publishSlot is the publishing side of one topology. A reload that changes the topology replaces what is in it.
type publishSlot struct {
	busy   chan struct{} // held while it is looked at or opened; a channel, so that waiting ends with a context
	cfg    *config.RuntimeConfig
	decl   broker.Declaration
	broker config.Broker
	limit  int64
	open   *openPublisher
}

// openPublisher is closed when it was replaced and nobody publishes through it any more.
type openPublisher struct {
	broker.Publisher
	users         sync.WaitGroup
	releaseClient func()
}

func (t *publishTargets) slot(name string) *publishSlot {
	t.mu.Lock()
	defer t.mu.Unlock()
	s, ok := t.byName[name]
	if !ok {
		if t.byName == nil {
			t.byName = map[string]*publishSlot{}
		}
		s = &publishSlot{busy: make(chan struct{}, 1)}
		t.byName[name] = s
	}
	return s
}

// publishing interface of a Runtime.

func (r *Runtime) publishMetrics() *metrics.Metrics { return r.metrics }

func (r *Runtime) publishLogger() *slog.Logger { return r.log }

func (r *Runtime) currentConfig() *config.RuntimeConfig {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.config
}

func (r *Runtime) publishes(name string) error {
	_, err := publishEntry(r.currentConfig(), name)
	return err
}

func publishEntry(c *config.RuntimeConfig, name string) (config.Publish, error) {
	i := slices.IndexFunc(c.Publish, func(p config.Publish) bool { return p.Topology == name })
	if i < 0 {
		return config.Publish{}, fmt.Errorf("publish to topology %q: %w in the configuration: name this workload in the Topology's publishers, or add it to publish", name, broker.ErrNotFound)
	}
	return c.Publish[i], nil
}

// publishTarget finds or opens the publishing side of a topology, as the configuration in use has it.
func (r *Runtime) publishTarget(ctx context.Context, name string) (publishTarget, error) {
	cfg := r.currentConfig()
	entry, err := publishEntry(cfg, name)
	if err != nil {
		return publishTarget{}, err
	}
	s := r.targets.slot(name)
	select {
	case s.busy <- struct{}{}:
		defer func() { <-s.busy }()
	case <-ctx.Done():
		return publishTarget{}, fmt.Errorf("not sent: wait for a connection: %w", ctx.Err())
	}
	if s.open == nil || s.cfg != cfg {
		if err := r.refill(ctx, s, cfg, name, entry); err != nil {
			return publishTarget{}, err
		}
	}
	open := s.open
	open.users.Add(1)
	return publishTarget{publisher: open, kind: s.broker.Kind, topology: s.decl.Topology, limit: s.limit, release: open.users.Done}, nil
}

// refill brings a slot to a configuration. The slot is held.
func (r *Runtime) refill(ctx context.Context, s *publishSlot, cfg *config.RuntimeConfig, name string, entry config.Publish) error {
	t, ok := cfg.Topology(name)
	if !ok {
		return fmt.Errorf("publish to topology %q: %w in the configuration", name, broker.ErrNotFound)
	}
	b, ok := cfg.Broker(t.Broker)
	if !ok {
		return fmt.Errorf("publish to topology %q: broker %q: %w in the configuration", name, t.Broker, broker.ErrNotFound)
	}
	decl, err := t.Declaration()
	if err != nil {
		return err
	}
	if s.open == nil || !reflect.DeepEqual(s.decl, decl) || !s.broker.SameConnection(b) {
		client, release, err := r.client(ctx, b)
		if err != nil {
			return fmt.Errorf("publish to topology %q: %w", name, err)
		}
		if r.declare { // Run may not have come to it yet
			if err := r.declareTopology(ctx, b, decl); err != nil {
				release()
				return fmt.Errorf("publish to topology %q: %w", name, err)
			}
		}
		p, err := client.Publisher(ctx, decl)
		if err != nil {
			release()
			return fmt.Errorf("publish to topology %q: %w", name, err)
		}
		if s.open != nil {
			r.retire(s.open)
		}
		s.open = &openPublisher{Publisher: p, releaseClient: release}
	}
	s.cfg, s.decl, s.broker, s.limit = cfg, decl, b, entry.MaxMessageSize
	return nil
}

// declareTopology creates what one topology names, for use without the operator.
func (r *Runtime) declareTopology(ctx context.Context, b config.Broker, decl broker.Declaration) error {
	cfg, err := r.connection(b)
	if err != nil {
		return err
	}
	admin, err := r.drivers[b.Kind].OpenAdmin(ctx, cfg)
	if err != nil {
		return fmt.Errorf("connect to broker %q: %w", b.Name, err)
	}
	defer func() { _ = admin.Close(context.WithoutCancel(ctx)) }() // nothing is left to do with it
	return admin.Declare(ctx, decl)
}

// retire closes a publisher that was replaced, once everybody who still publishes through it is done.
func (r *Runtime) retire(p *openPublisher) {
	r.spawn(nil, func() {
		p.users.Wait()
		defer p.releaseClient()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := p.Close(ctx); err != nil {
			r.log.Warn("could not close a replaced publisher", "error", err)
		}
	})
}

// RawPublisher publishes encoded messages to any topology that the configuration lets this workload publish to, by
// its name: for programs that pass messages on. It is safe for concurrent use.
type RawPublisher struct {
	from    publishing
	cfg     PublisherConfig
	mu      sync.Mutex
	senders map[string]*sender
}

// NewRawPublisher makes a RawPublisher. The codec of the configuration is used for its content type only, and defaults
// to codec.Raw.
func NewRawPublisher(r *Runtime, cfg PublisherConfig) (*RawPublisher, error) {
	return newRawPublisher(r, cfg)
}

func newRawPublisher(from publishing, cfg PublisherConfig) (*RawPublisher, error) {
	if cfg.Codec == nil {
		cfg.Codec = codec.Raw
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("raw publisher: %w", err)
	}
	return &RawPublisher{from: from, cfg: cfg, senders: map[string]*sender{}}, nil
}

// Publish publishes a body as it is; see Publisher.Publish. A topology that is not there to publish to is an error
// that wraps broker.ErrNotFound.
func (p *RawPublisher) Publish(ctx context.Context, topology string, body []byte, opts ...PublishOption) error {
	if err := p.from.publishes(topology); err != nil {
		return err
	}
	d := newDraft(ctx, p.cfg, opts, func(codec.Codec) ([]byte, error) { return body, nil })
	return p.sender(topology).send(ctx, []draft{d})
}

func (p *RawPublisher) sender(topology string) *sender {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, ok := p.senders[topology]
	if !ok {
		s = newSender(p.from, topology, p.cfg)
		p.senders[topology] = s
	}
	return s
}
