package brokertest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/codec"
	"github.com/shove-dev/shove/runtime/config"
)

// call is one call of a handler.
type call struct {
	Body    string
	Retries uint32
	Defers  uint32

	ID            string
	DeliveryID    string
	Redelivered   bool
	DeliveryCount uint32
	Began, Ended  time.Time
	Headers       header.Map
	Meta          *runtime.Metadata
}

// due is when the copy that was handed to this call was to come back, by its x-shove-due; zero: it was none.
func (c call) due() time.Time {
	ms, ok := header.Int(c.Headers[header.Due])
	if !ok {
		return time.Time{}
	}
	return time.UnixMilli(ms)
}

// recorder is a handler that keeps its calls.
type recorder struct {
	decide func(ctx context.Context, c call) runtime.Outcome

	mu    sync.Mutex
	calls []*call
	deads []deadCall
}

// deadCall is one call of a dead handler.
type deadCall struct {
	call
	Death       header.Death
	DecodeError error
}

// Handle records and decides.
func (r *recorder) Handle(ctx context.Context, body []byte, m *runtime.Metadata) runtime.Outcome {
	c := callOf(body, m)
	r.mu.Lock()
	r.calls = append(r.calls, c)
	snapshot := *c
	r.mu.Unlock()
	o := r.decide(ctx, snapshot)
	r.mu.Lock()
	c.Ended = time.Now()
	r.mu.Unlock()
	return o
}

func callOf(body []byte, m *runtime.Metadata) *call {
	n, _ := m.DeliveryCount()
	return &call{
		Body: string(body), Retries: m.RetryCount, Defers: m.DeferCount, ID: m.MessageID(), DeliveryID: m.DeliveryID(),
		Redelivered: m.Redelivered, DeliveryCount: n, Began: time.Now(), Headers: rawHeaders(m), Meta: m,
	}
}

// rawHeaders are the headers with their types; the metadata show them as text only.
func rawHeaders(m *runtime.Metadata) header.Map {
	h := header.Map{}
	for name, text := range m.Headers() {
		h[name] = text
	}
	return h
}

// all returns the calls so far.
func (r *recorder) all() []call {
	r.mu.Lock()
	defer r.mu.Unlock()
	cs := make([]call, len(r.calls))
	for i, c := range r.calls {
		cs[i] = *c
	}
	return cs
}

func (r *recorder) allDead() []deadCall {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]deadCall(nil), r.deads...)
}

// of returns the calls for one body.
func (r *recorder) of(body string) []call {
	var cs []call
	for _, c := range r.all() {
		if c.Body == body {
			cs = append(cs, c)
		}
	}
	return cs
}

// always is a handler with one outcome.
func always(o runtime.Outcome) func(context.Context, call) runtime.Outcome {
	return func(context.Context, call) runtime.Outcome { return o }
}

// inTurn is a handler that gives one outcome after the other to each body, and Ack when they are used up.
func inTurn(outcomes ...runtime.Outcome) func(context.Context, call) runtime.Outcome {
	var mu sync.Mutex
	next := map[string]int{}
	return func(_ context.Context, c call) runtime.Outcome {
		mu.Lock()
		defer mu.Unlock()
		i := next[c.Body]
		next[c.Body]++
		if i < len(outcomes) {
			return outcomes[i]
		}
		return runtime.Ack
	}
}

// consumer is a running runtime: what a pod is.
type consumer struct {
	*recorder
	rig    *rig
	cancel context.CancelFunc
	done   chan struct{}
	err    error
}

// options of a consumer.
type options struct {
	handle  []runtime.HandleOption
	runtime []runtime.Option
	group   config.Options
	dead    bool
	json    any // nil: raw bytes; else JSON of this value's type
	pod     string
}

// option changes how a consumer runs.
type option func(*options)

func with(hs ...runtime.HandleOption) option {
	return func(o *options) { o.handle = append(o.handle, hs...) }
}

// drainDead also handles dead letters.
func drainDead(o *options) { o.dead = true }

// decodeJSON makes the consumer expect JSON objects, decodeText JSON strings.
func decodeJSON(o *options) { o.json = map[string]any{} }
func decodeText(o *options) { o.json = "" }

// consume starts a runtime on the rig's topology.
func (r *rig) consume(decide func(context.Context, call) runtime.Outcome, opts ...option) *consumer {
	r.t.Helper()
	c, rt, err := r.newConsumer(decide, opts...)
	if err != nil {
		r.t.Fatalf("make a runtime: %v", err)
	}
	c.start(rt)
	return c
}

func (r *rig) newConsumer(decide func(context.Context, call) runtime.Outcome, opts ...option) (*consumer, *runtime.Runtime, error) {
	o := options{pod: "pod-0"}
	for _, change := range opts {
		change(&o)
	}
	c := &consumer{recorder: &recorder{decide: decide}, rig: r, done: make(chan struct{})}
	all := []runtime.Option{
		runtime.Drivers(r.driver()), runtime.Config(r.config(o)), runtime.HTTPAddr(""), runtime.Pod(o.pod),
		runtime.Registerer(prometheus.NewRegistry()), runtime.Logger(slog.New(r.logHandler())),
	}
	switch o.json.(type) {
	case nil:
		all = append(all, handlers[[]byte](c, o, runtime.Codec(codec.Raw))...)
	case string:
		all = append(all, handlers[string](c, o, runtime.Codec(codec.JSON))...)
	default:
		all = append(all, handlers[map[string]any](c, o, runtime.Codec(codec.JSON))...)
	}
	rt, err := runtime.New(append(all, o.runtime...)...)
	return c, rt, err
}

// handlers binds the recorder as a handler of one type, and as the dead handler where that is asked for.
func handlers[T any](c *consumer, o options, how runtime.HandleOption) []runtime.Option {
	all := []runtime.Option{runtime.Handle("t", runtime.HandlerFunc[T](func(ctx context.Context, _ T, m *runtime.Metadata) runtime.Outcome {
		return c.Handle(ctx, m.Body(), m)
	}), append([]runtime.HandleOption{how}, o.handle...)...)}
	if o.dead {
		all = append(all, runtime.HandleDead("t", runtime.DeadHandlerFunc[T](func(_ context.Context, _ T, m *runtime.DeadMetadata) {
			c.handleDead(m)
		}), how))
	}
	return all
}

func (c *consumer) handleDead(m *runtime.DeadMetadata) {
	d := deadCall{call: *callOf(m.Body(), m.Metadata), Death: m.Death, DecodeError: m.DecodeError}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deads = append(c.deads, d)
}

// start runs the runtime; it ends with the test at the latest.
func (c *consumer) start(rt *runtime.Runtime) {
	ctx, cancel := context.WithCancel(context.Background())
	c.cancel = cancel
	go func() {
		defer close(c.done)
		c.err = rt.Run(ctx)
	}()
	c.rig.defers(func() { _ = c.stop() })
}

// stop drains the consumer, as SIGTERM does, and returns what Run returned.
func (c *consumer) stop() error {
	c.cancel()
	return c.wait()
}

// wait returns what Run returned.
func (c *consumer) wait() error {
	select {
	case <-c.done:
		return c.err
	case <-time.After(c.rig.b.Patience):
		return errors.New("the runtime did not end")
	}
}

// clean stops the consumer and fails the test unless it drained cleanly.
func (c *consumer) clean() {
	c.rig.t.Helper()
	if err := c.stop(); err != nil {
		c.rig.t.Errorf("the drain ended with %v", err)
	}
}

// called waits for n calls in all and returns them.
func (c *consumer) called(n int) []call {
	c.rig.t.Helper()
	c.rig.eventually(fmt.Sprintf("%d calls", n), func() error {
		if got := len(c.all()); got < n {
			return fmt.Errorf("%d calls", got)
		}
		return nil
	})
	return c.all()
}

// calledDead waits for n calls of the dead handler in all and returns them.
func (c *consumer) calledDead(n int) []deadCall {
	c.rig.t.Helper()
	c.rig.eventually(fmt.Sprintf("%d calls of the dead handler", n), func() error {
		if got := len(c.allDead()); got < n {
			return fmt.Errorf("%d calls", got)
		}
		return nil
	})
	return c.allDead()
}

// config is the RuntimeConfig of a consumer.
func (r *rig) config(o options) *config.RuntimeConfig {
	return &config.RuntimeConfig{
		APIVersion: config.APIVersion, Kind: config.Kind,
		Brokers:    []config.Broker{{Name: "b", Kind: r.inst.Driver.Kind, Endpoint: r.inst.Client.Endpoint}},
		Topologies: []config.Topology{config.FromDeclaration("t", "", "b", r.decl)},
		Consumers:  []config.Consumer{{Group: "g", Topology: "t", Options: o.group}},
		Publish:    []config.Publish{{Topology: "t"}},
	}
}

// driver is the backend's driver, with what the instance says of reaching it.
func (r *rig) driver() broker.Driver {
	d := r.inst.Driver
	open := d.OpenClient
	d.OpenClient = func(ctx context.Context, cfg broker.Config) (broker.Client, error) {
		with := r.inst.Client
		with.Name, with.Logger = cfg.Name, cfg.Logger
		return open(ctx, with)
	}
	return d
}

func (r *rig) logHandler() slog.Handler {
	return bookHandler{book: r.log, out: slog.NewTextHandler(r.t.Output(), &slog.HandlerOptions{Level: slog.LevelInfo})}
}
