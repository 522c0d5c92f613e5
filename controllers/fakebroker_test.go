package controllers

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// fakeServer is a broker that remembers what was asked of it and fails on demand. It stands for RabbitMQ with a
// management API: it shows everything unless it is told not to.
type fakeServer struct {
	mu      sync.Mutex
	id      string
	queues  map[string]*fakeQueue
	opened  []broker.Credentials
	open    int
	most    int // connections at once
	calls   map[string]int
	written []string // what was declared and deleted, in order
	// failures by call: Open, Server, Observe, Declare, Depths, Delete.
	fail     map[string]error
	latency  time.Duration
	blind    bool // shows neither arguments nor unsettled counts
	warnings []string
	risks    []string
	details  error
	// exchanges that exist; a binding to another one fails.
	exchanges map[string]bool
	bindings  map[string]bool
}

type fakeQueue struct {
	arguments              string
	ready, inFlight, stuck int64
}

func newFakeServer(id string) *fakeServer {
	return &fakeServer{id: id, queues: map[string]*fakeQueue{}, calls: map[string]int{}, fail: map[string]error{}, exchanges: map[string]bool{}, bindings: map[string]bool{}}
}

// driver is the fake as the driver for RabbitMQ.
func (f *fakeServer) driver() broker.Driver {
	return broker.Driver{
		Kind:         topology.RabbitMQ,
		OpenAdmin:    f.openAdmin,
		Objects:      fakeObjects,
		Capabilities: func(json.RawMessage) broker.Capabilities { return broker.Capabilities{} },
		LeaseLimit:   func(json.RawMessage) (time.Duration, error) { return 30 * time.Minute, nil },
	}
}

func fakeObjects(d broker.Declaration) ([]broker.Object, error) {
	if d.Topology.Sequenced != nil {
		return nil, fmt.Errorf("sequenced topologies: %w yet", broker.ErrUnsupported)
	}
	var out []broker.Object
	for _, q := range d.Topology.Queues() {
		if d.Topology.External && q.Role != topology.RoleMain && q.Role != topology.RoleDeadLetter {
			continue
		}
		args := map[string]any{"role": string(q.Role), "delay": q.Delay.String()}
		out = append(out, broker.Object{Kind: "queue", Name: q.Name, Role: q.Role, Properties: args})
	}
	for _, b := range optionsOf(d).Bindings {
		out = append(out, broker.Object{Kind: "binding", Name: b.name(d)})
	}
	return out, nil
}

type fakeBinding struct{ Exchange, RoutingKey string }

func (b fakeBinding) name(d broker.Declaration) string {
	return b.Exchange + " -> " + d.Topology.Queue + " (" + b.RoutingKey + ")"
}

type fakeOptions struct{ Bindings, RetiredBindings []fakeBinding }

func optionsOf(d broker.Declaration) (o fakeOptions) {
	if len(d.Options) > 0 {
		if err := json.Unmarshal(d.Options, &o); err != nil {
			panic(err)
		}
	}
	return o
}

// argumentsOf is what a queue is declared with, as one comparable text.
func argumentsOf(o broker.Object) string { return fmt.Sprint(o.Properties) }

func (f *fakeServer) openAdmin(ctx context.Context, cfg broker.Config) (broker.Admin, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.call("Open"); err != nil {
		return nil, err
	}
	var creds broker.Credentials
	if cfg.Credentials != nil {
		var err error
		if creds, err = cfg.Credentials(ctx); err != nil {
			return nil, err
		}
	}
	f.opened = append(f.opened, creds)
	f.open++
	f.most = max(f.most, f.open)
	return &fakeAdmin{f: f}, nil
}

// call counts a call and says how it is to fail.
func (f *fakeServer) call(name string) error {
	f.calls[name]++
	if err := f.fail[name]; err != nil {
		return err
	}
	return f.fail["*"]
}

// breaks makes calls of that name fail; "*" is all of them, a nil error ends it.
func (f *fakeServer) breaks(name string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail[name] = err
}

func (f *fakeServer) change(c func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c()
}

// count is how often a call was made.
func (f *fakeServer) count(name string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[name]
}

// total is how many calls were made but for Server, which is the probe.
func (f *fakeServer) total() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for name, c := range f.calls {
		if name != "Server" {
			n += c
		}
	}
	return n
}

func (f *fakeServer) names() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Sorted(maps.Keys(f.queues))
}

func (f *fakeServer) connections() (open, most int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.open, f.most
}

type fakeAdmin struct {
	f      *fakeServer
	closed bool
}

func (a *fakeAdmin) lock(ctx context.Context, name string) error {
	if a.f.latency > 0 {
		time.Sleep(a.f.latency)
	}
	a.f.mu.Lock()
	err := a.f.call(name)
	if a.closed {
		err = fmt.Errorf("%s on a closed connection: %w", name, broker.ErrClosed)
	}
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		a.f.mu.Unlock()
	}
	return err
}

func (a *fakeAdmin) Server(ctx context.Context) (broker.Server, error) {
	if err := a.lock(ctx, "Server"); err != nil {
		return broker.Server{}, err
	}
	defer a.f.mu.Unlock()
	return broker.Server{ID: a.f.id, Version: "3.10.8", Warnings: a.f.warnings, DetailsErr: a.f.details}, nil
}

func (a *fakeAdmin) Observe(ctx context.Context, ds []broker.Declaration) ([]broker.Observation, error) {
	if err := a.lock(ctx, "Observe"); err != nil {
		return nil, err
	}
	defer a.f.mu.Unlock()
	out := make([]broker.Observation, len(ds))
	for i, d := range ds {
		objs, err := fakeObjects(d)
		if err != nil {
			return nil, err
		}
		o := broker.Observation{DriftKnown: !a.f.blind, Warnings: a.f.risks}
		for _, obj := range objs {
			o.Objects = append(o.Objects, a.observe(d, obj))
		}
		for _, b := range optionsOf(d).RetiredBindings {
			if a.f.bindings[b.name(d)] && !a.f.blind {
				o.Objects = append(o.Objects, broker.ObservedObject{Object: broker.Object{Kind: "binding", Name: b.name(d)}, Diffs: []broker.Diff{{Property: "existence", Want: "none", Have: "bound", Repairable: true}}})
			}
		}
		for _, r := range d.Retired {
			if a.f.queues[r.Name] != nil {
				o.Objects = append(o.Objects, broker.ObservedObject{Object: broker.Object{Kind: "queue", Name: r.Name, Role: topology.RoleRetired}})
			}
		}
		out[i] = o
	}
	return out, nil
}

func (a *fakeAdmin) observe(d broker.Declaration, obj broker.Object) broker.ObservedObject {
	o := broker.ObservedObject{Object: obj}
	if obj.Kind == "binding" {
		o.Missing = !a.f.blind && !a.f.bindings[obj.Name]
		return o
	}
	q := a.f.queues[obj.Name]
	switch {
	case q == nil:
		o.Missing = true
	case d.Topology.External && obj.Role == topology.RoleMain:
	case q.arguments != argumentsOf(obj):
		o.Diffs = []broker.Diff{{Property: "arguments", Want: argumentsOf(obj), Have: q.arguments}}
	}
	return o
}

func (a *fakeAdmin) Declare(ctx context.Context, d broker.Declaration) error {
	if err := a.lock(ctx, "Declare"); err != nil {
		return err
	}
	defer a.f.mu.Unlock()
	objs, err := fakeObjects(d)
	if err != nil {
		return err
	}
	for _, obj := range objs {
		if obj.Kind == "binding" {
			continue
		}
		q := a.f.queues[obj.Name]
		switch {
		case d.Topology.External && obj.Role == topology.RoleMain:
			if q == nil {
				return fmt.Errorf("external queue %q: %w", obj.Name, broker.ErrNotFound)
			}
		case q == nil:
			a.f.queues[obj.Name] = &fakeQueue{arguments: argumentsOf(obj)}
			a.f.written = append(a.f.written, "declare "+obj.Name)
		case q.arguments != argumentsOf(obj):
			return &broker.ConflictError{Object: fmt.Sprintf("queue %q", obj.Name), Diff: broker.Diff{Property: "arguments", Want: argumentsOf(obj), Have: q.arguments}}
		}
	}
	for _, b := range optionsOf(d).Bindings {
		if !a.f.exchanges[b.Exchange] {
			return fmt.Errorf("bind queue %q to exchange %q: %w", d.Topology.Queue, b.Exchange, broker.ErrNotFound)
		}
		a.f.bindings[b.name(d)] = true
	}
	for _, b := range optionsOf(d).RetiredBindings {
		delete(a.f.bindings, b.name(d))
	}
	return nil
}

func (a *fakeAdmin) Depths(ctx context.Context, names []string) ([]broker.Depth, error) {
	if err := a.lock(ctx, "Depths"); err != nil {
		return nil, err
	}
	defer a.f.mu.Unlock()
	out := make([]broker.Depth, len(names))
	for i, n := range names {
		q := a.f.queues[n]
		if q == nil {
			out[i] = broker.Depth{Queue: n, Missing: true}
			continue
		}
		out[i] = broker.Depth{Queue: n, Ready: broker.Known(q.ready)}
		if !a.f.blind {
			out[i].InFlight, out[i].Stuck = broker.Known(q.inFlight), broker.Known(q.stuck)
		}
	}
	return out, nil
}

func (a *fakeAdmin) Delete(ctx context.Context, names []string) ([]broker.Deleted, error) {
	if err := a.lock(ctx, "Delete"); err != nil {
		return nil, err
	}
	defer a.f.mu.Unlock()
	out := make([]broker.Deleted, len(names))
	for i, n := range names {
		out[i] = broker.Deleted{Queue: n, Messages: broker.Known(0)}
		if q := a.f.queues[n]; q != nil {
			out[i].Messages = broker.Known(q.ready)
			delete(a.f.queues, n)
			a.f.written = append(a.f.written, "delete "+n)
		}
	}
	return out, nil
}

func (a *fakeAdmin) Close(context.Context) error {
	a.f.mu.Lock()
	defer a.f.mu.Unlock()
	if !a.closed {
		a.closed = true
		a.f.open--
	}
	return nil
}
