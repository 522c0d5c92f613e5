package memory

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

type admin struct{ server *Server }

func (s *Server) openAdmin() (*admin, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.errDown(); err != nil {
		return nil, err
	}
	return &admin{server: s}, nil
}

func (a *admin) Close(context.Context) error { return nil }

// lock takes the server's mutex unless the call is over or the broker is down.
func (a *admin) lock(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	a.server.mu.Lock()
	if err := a.server.errDown(); err != nil {
		a.server.mu.Unlock()
		return err
	}
	return nil
}

func (a *admin) Server(ctx context.Context) (broker.Server, error) {
	if err := a.lock(ctx); err != nil {
		return broker.Server{}, err
	}
	defer a.server.mu.Unlock()
	return broker.Server{ID: a.server.opts.ID, Version: "in-memory"}, nil
}

func (a *admin) Observe(ctx context.Context, ds []broker.Declaration) ([]broker.Observation, error) {
	if err := a.lock(ctx); err != nil {
		return nil, err
	}
	defer a.server.mu.Unlock()
	out := make([]broker.Observation, len(ds))
	for i, d := range ds {
		parts, err := parts(d)
		if err != nil {
			return nil, err
		}
		out[i].DriftKnown = true
		for _, p := range parts {
			out[i].Objects = append(out[i].Objects, a.observe(p))
		}
		for _, r := range d.Retired {
			o := broker.ObservedObject{Object: broker.Object{Kind: "queue", Name: r.Name, Role: topology.RoleRetired}}
			o.Missing = a.server.queues[r.Name] == nil
			out[i].Objects = append(out[i].Objects, o)
		}
	}
	return out, nil
}

func (a *admin) observe(p part) broker.ObservedObject {
	o := broker.ObservedObject{Object: p.object()}
	q := a.server.queues[p.name]
	switch {
	case q == nil:
		o.Missing = true
	case !p.foreign:
		o.Diffs = p.props.diffs(q.props)
	}
	return o
}

// diffs lists what differs; all of it is fixed.
func (want properties) diffs(have properties) []broker.Diff {
	var ds []broker.Diff
	add := func(property, w, h string) {
		if w != h {
			ds = append(ds, broker.Diff{Property: property, Want: w, Have: h})
		}
	}
	add("role", string(want.role), string(have.role))
	add("delay", want.delay.String(), have.delay.String())
	add("target", strconv.Quote(want.target), strconv.Quote(have.target))
	add("sequenced", strconv.FormatBool(want.sequenced), strconv.FormatBool(have.sequenced))
	add("maxLength", strconv.Itoa(want.maxLength), strconv.Itoa(have.maxLength))
	return ds
}

func (a *admin) Declare(ctx context.Context, d broker.Declaration) error {
	parts, err := parts(d)
	if err != nil {
		return err
	}
	if err := a.lock(ctx); err != nil {
		return err
	}
	defer a.server.mu.Unlock()
	for _, p := range parts {
		q := a.server.queues[p.name]
		switch {
		case q == nil && p.foreign:
			return fmt.Errorf("external queue %q: %w", p.name, broker.ErrNotFound)
		case q != nil && !p.foreign:
			if diffs := p.props.diffs(q.props); len(diffs) > 0 {
				return &broker.ConflictError{Object: fmt.Sprintf("queue %q", p.name), Diff: diffs[0]}
			}
		}
	}
	for _, p := range parts {
		if a.server.queues[p.name] == nil {
			a.server.declare(p)
		}
	}
	return nil
}

// declare makes a queue, and lets hold queues that waited for it as their target go on.
func (s *Server) declare(p part) {
	s.queues[p.name] = &queue{server: s, name: p.name, props: p.props}
	now := time.Now()
	for _, q := range s.queues {
		if q.props.target == p.name {
			q.moveDue(now)
		}
	}
}

func (a *admin) Depths(ctx context.Context, names []string) ([]broker.Depth, error) {
	if err := a.lock(ctx); err != nil {
		return nil, err
	}
	defer a.server.mu.Unlock()
	now := time.Now()
	out := make([]broker.Depth, len(names))
	for i, name := range names {
		q := a.server.queues[name]
		if q == nil {
			out[i] = broker.Depth{Queue: name, Missing: true}
			continue
		}
		out[i] = broker.Depth{
			Queue:     name,
			Ready:     broker.Known(int64(q.ready())),
			InFlight:  broker.Known(int64(q.unsettled)),
			Stuck:     broker.Known(int64(q.stuck(now))),
			Consumers: broker.Known(int64(len(q.subs))),
		}
	}
	return out, nil
}

func (a *admin) Delete(ctx context.Context, names []string) ([]broker.Deleted, error) {
	if err := a.lock(ctx); err != nil {
		return nil, err
	}
	defer a.server.mu.Unlock()
	out := make([]broker.Deleted, len(names))
	for i, name := range names {
		out[i] = broker.Deleted{Queue: name, Messages: broker.Known(0)}
		if q := a.server.queues[name]; q != nil {
			out[i].Messages = broker.Known(int64(q.ready() + q.unsettled))
			a.server.remove(q)
		}
	}
	return out, nil
}

// remove deletes a queue; who consumed from it learns that its subscription is over.
func (s *Server) remove(q *queue) {
	delete(s.queues, q.name)
	if q.timer != nil {
		q.timer.Stop()
	}
	for c := range s.clients {
		for sub := range c.subs {
			if sub.queue == q {
				sub.end(broker.ErrLost, counted)
			}
		}
	}
}
