package runtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/google/uuid"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/runtime/codec"
	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/runtime/metrics"
	"github.com/shove-dev/shove/topology"
)

// Defaults of publishing (T).
const (
	DefaultPublishAttempts = 3
	publishBackoff         = 100 * time.Millisecond
	publishMaxBackoff      = 2 * time.Second
)

// PublisherConfig says how a Publisher encodes and repeats. The zero value is meaningful.
type PublisherConfig struct {
	// Codec encodes the values. Defaults to codec.JSON.
	Codec codec.Codec
	// Attempts bounds how often a message that is known not to be stored is sent, the first time included. One whose
	// fate is unknown is never sent again. Defaults to 3, with 100 ms between them, doubling to 2 s.
	Attempts int
	// Type is sent as x-shove-type with every message that brings no other. Defaults to none.
	Type string
}

func (c PublisherConfig) withDefaults() (PublisherConfig, error) {
	if c.Codec == nil {
		c.Codec = codec.JSON
	}
	if c.Attempts == 0 {
		c.Attempts = DefaultPublishAttempts
	}
	if c.Attempts < 0 {
		return c, fmt.Errorf("attempts: %d: use 1 or more, or 0 for the default of %d", c.Attempts, DefaultPublishAttempts)
	}
	return c, nil
}

// publishTarget is where a topology's messages go at this moment.
type publishTarget struct {
	publisher broker.Publisher
	kind      topology.Kind
	topology  topology.Topology
	limit     int64  // bytes; 0: the default
	release   func() // called when the target is not used any more
}

// publishing is what a publisher needs of a Runtime. The target is asked for at every attempt, so that a reload or a
// new connection is used at once.
type publishing interface {
	// publishes is nil where the configuration lets this workload publish to the topology.
	publishes(topology string) error
	// publishTarget fails with broker.ErrUnavailable (wrapped) where another attempt may help.
	publishTarget(ctx context.Context, topology string) (publishTarget, error)
	// publishMetrics may return nil.
	publishMetrics() *metrics.Metrics
	publishLogger() *slog.Logger
}

// Publisher publishes values of one type to one topology. It is safe for concurrent use and holds nothing to close.
type Publisher[T any] struct {
	sender *sender
}

// Item is one value of a batch.
type Item[T any] struct {
	Value   T
	Options []PublishOption
}

// NewPublisher makes a publisher to a topology by its name. It fails where the configuration does not let this workload
// publish there, or where the codec does not take T. It works before and during Run, until Run returns.
func NewPublisher[T any](r *Runtime, topology string, cfg PublisherConfig) (*Publisher[T], error) {
	return newPublisher[T](r, topology, cfg)
}

func newPublisher[T any](from publishing, name string, cfg PublisherConfig) (*Publisher[T], error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("publisher %q: %w", name, err)
	}
	if err := codec.Check[T](cfg.Codec); err != nil {
		return nil, fmt.Errorf("publisher %q: %w", name, err)
	}
	if err := from.publishes(name); err != nil {
		return nil, fmt.Errorf("publisher %q: %w", name, err)
	}
	return &Publisher[T]{newSender(from, name, cfg)}, nil
}

// Publish returns nil after the broker confirmed the message and, where it routes, routed it (Q2). Else the error is
// a *PublishError: where its Unknown is not empty the message may be stored all the same, and publishing it again with
// WithMessageID and the same id lets consumers tell. A context that ends makes a message that is on its way unknown.
func (p *Publisher[T]) Publish(ctx context.Context, value T, opts ...PublishOption) error {
	return p.sender.send(ctx, []draft{p.draft(ctx, value, opts)})
}

// PublishBatch publishes many values at once; the broker confirms them together. Nil means that all are confirmed.
// Else the error is a *PublishError that says for every index what became of it (Q3). A value that cannot be sent
// (too large, a reserved header) fails alone.
func (p *Publisher[T]) PublishBatch(ctx context.Context, items []Item[T]) error {
	drafts := make([]draft, len(items))
	for i, it := range items {
		drafts[i] = p.draft(ctx, it.Value, it.Options)
	}
	return p.sender.send(ctx, drafts)
}

func (p *Publisher[T]) draft(ctx context.Context, value T, opts []PublishOption) draft {
	return newDraft(ctx, p.sender.cfg, opts, func(c codec.Codec) ([]byte, error) { return codec.Encode(c, value) })
}

// sender is the untyped part of a Publisher.
type sender struct {
	from  publishing
	name  string
	cfg   PublisherConfig
	meter *metrics.Publisher
	log   *slog.Logger
}

func newSender(from publishing, name string, cfg PublisherConfig) *sender {
	return &sender{from: from, name: name, cfg: cfg, meter: from.publishMetrics().Publisher(name), log: from.publishLogger()}
}

// send publishes drafts with every attempt they are worth.
func (s *sender) send(ctx context.Context, drafts []draft) error {
	if len(drafts) == 0 {
		return nil
	}
	b := &batch{drafts: drafts, errs: make([]error, len(drafts)), state: make([]sendState, len(drafts))}
	started := time.Now()
	pause := backoff.ExponentialBackOff{InitialInterval: publishBackoff, Multiplier: 2, MaxInterval: publishMaxBackoff}
	pause.Reset()
	for attempt := 1; ; attempt++ {
		s.attempt(ctx, b)
		if attempt >= s.cfg.Attempts || !b.repeatable() {
			break
		}
		if !sleep(ctx, pause.NextBackOff()) {
			break
		}
	}
	err := b.result(s.name)
	s.count(b, time.Since(started))
	return err
}

// attempt sends every draft that still has to be sent, once.
func (s *sender) attempt(ctx context.Context, b *batch) {
	target, err := s.from.publishTarget(ctx, s.name)
	if err != nil {
		b.each(func(i int) { b.fail(i, err) })
		return
	}
	defer target.release()
	limit := target.limit
	if limit == 0 {
		limit = config.DefaultMaxMessageSize
	}
	var msgs []broker.Message
	var index []int
	b.each(func(i int) {
		d := &b.drafts[i]
		if err := d.prepare(s.cfg, target.topology, limit); err != nil {
			b.refuse(i, err)
			return
		}
		msgs, index = append(msgs, d.msg), append(index, i)
	})
	if len(msgs) == 0 {
		return
	}
	if err := ctx.Err(); err != nil { // sent nothing: that is a failure, not an unknown outcome
		for _, i := range index {
			b.fail(i, fmt.Errorf("not sent: %w", err))
		}
		return
	}
	err = target.publisher.Publish(ctx, msgs)
	b.take(index, err)
	if err != nil {
		s.from.publishMetrics().BackendError(target.kind, metrics.Publish)
	}
}

func (s *sender) count(b *batch, took time.Duration) {
	worst := metrics.PublishSuccess
	var n [3]int
	for _, st := range b.state {
		o := st.outcome()
		n[o]++
		worst = max(worst, o)
	}
	for o, n := range n {
		s.meter.Published(metrics.PublishOutcome(o), n)
	}
	s.meter.Duration(worst, took)
	if n[metrics.PublishUnknown] > 0 {
		s.log.Warn("it is unknown whether messages were stored; they are not sent again", "topology", s.name, "messages", n[metrics.PublishUnknown])
	}
}

// newMessageID is a UUIDv7: unique, and ordered by time (Q2).
func newMessageID() (string, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return "", fmt.Errorf("make a message id: %w", err)
	}
	return id.String(), nil
}

// repeatable says whether sending again may help a message that is known not to be stored.
func repeatable(err error) bool {
	return errors.Is(err, broker.ErrUnavailable) || errors.Is(err, broker.ErrRejected)
}

// notStored says whether an error means that the broker has not got the message. Everything else may have happened
// after it was sent.
func notStored(err error) bool {
	if errors.Is(err, broker.ErrUnknown) {
		return false
	}
	for _, known := range [...]error{broker.ErrUnavailable, broker.ErrRejected, broker.ErrUnroutable, broker.ErrTooLarge, broker.ErrClosed,
		broker.ErrNotFound, broker.ErrUnauthorized, broker.ErrUnsupported} {
		if errors.Is(err, known) {
			return true
		}
	}
	return false
}
