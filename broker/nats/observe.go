package nats

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// diffs compares what we set with what a stream has. Subjects of hold queues are objects of their own.
func (s stream) diffs(have settings, schedules bool) []broker.Diff {
	out := diffs(s.fixed(), have, false)
	out = append(out, diffs(s.mutable(schedules), have, true)...)
	if subjects := have.list("subjects"); !slices.Contains(subjects, s.name) {
		out = append(out, broker.Diff{Property: "subjects", Want: s.name, Have: strings.Join(subjects, ","), Repairable: true})
	}
	return out
}

// changes are the properties that an update has to set.
func (s stream) changes(have settings, schedules bool) map[string]any {
	out := map[string]any{}
	want := s.mutable(schedules)
	for _, d := range diffs(want, have, true) {
		out[d.Property] = want[d.Property]
	}
	subjects := have.list("subjects") // those of tiers that left stay: they may hold messages
	n := len(subjects)
	for _, subject := range s.subjects {
		if !slices.Contains(subjects, subject) {
			subjects = append(subjects, subject)
		}
	}
	if len(subjects) > n {
		out["subjects"] = subjects
	}
	return out
}

// diffs of a consumer on somebody else's stream that exists are only those that make it useless.
func (c consumer) diffs(have settings) []broker.Diff {
	out := diffs(c.fixed(), have, false)
	if !c.foreign {
		out = append(out, diffs(c.mutable(), have, true)...)
	}
	return out
}

func diffs(want map[string]any, have settings, repairable bool) []broker.Diff {
	var out []broker.Diff
	for _, key := range slices.Sorted(maps.Keys(want)) {
		raw, err := json.Marshal(want[key])
		if err != nil || bytes.Equal(raw, have[key]) || len(have[key]) == 0 && isZero(raw) {
			continue
		}
		out = append(out, broker.Diff{Property: key, Want: settingText(key, raw), Have: settingText(key, have[key]), Repairable: repairable})
	}
	return out
}

// isZero says whether a value is what the server leaves out.
func isZero(raw []byte) bool {
	switch string(raw) {
	case `""`, "0", "false", "null", "[]":
		return true
	}
	return false
}

// settingText is a value for people.
func settingText(key string, raw json.RawMessage) string {
	if len(raw) == 0 {
		return "none"
	}
	if key == "duplicate_window" || key == "ack_wait" {
		var d time.Duration
		if json.Unmarshal(raw, (*int64)(&d)) == nil {
			return d.String()
		}
	}
	var text string
	if json.Unmarshal(raw, &text) == nil && text != "" {
		return text
	}
	return string(raw)
}

// limits are settings of a stream that lose messages, or keep held ones from being moved, with what to say of them.
var limits = []struct{ key, why string }{
	{"max_age", "messages that wait longer are lost, held ones too"},
	{"max_msgs", "beyond it the oldest messages are lost, held ones too"},
	{"max_bytes", "beyond it the oldest messages are lost, held ones too"},
	{"max_msgs_per_subject", "beyond it the oldest messages are lost"},
	{"max_msg_size", "a held message that is larger when it is due, by about 200 bytes, stays held for ever"},
}

func (s stream) warnings(have settings) []string {
	var out []string
	for _, l := range limits {
		if n := have.number(l.key); n > 0 {
			out = append(out, fmt.Sprintf("stream %q has %s: %s; take the limit away", s.name, l.key, l.why))
		}
	}
	return out
}

func (c consumer) warnings(have settings) []string {
	var out []string
	if !c.foreign {
		return nil
	}
	if n := have.number("max_deliver"); n > 0 {
		out = append(out, fmt.Sprintf("consumer %q of stream %q has max_deliver %d: a message beyond it is not delivered again and not dead-lettered either; set it to -1", c.name, c.stream, n))
	}
	if n := have.number("max_ack_pending"); n > 0 {
		out = append(out, fmt.Sprintf("consumer %q of stream %q has max_ack_pending %d: messages that wait for a retry count as such and can stop all others; set it to -1", c.name, c.stream, n))
	}
	return out
}

// found is what the server has, by name. A nil value: it does not exist.
type found struct {
	mu        sync.Mutex
	streams   map[string]*streamInfo
	consumers map[[2]string]*consumerInfo
}

// Observe compares declarations with the server: one request for each stream and each consumer, several at once.
func (a *admin) Observe(ctx context.Context, ds []broker.Declaration) ([]broker.Observation, error) {
	c, err := a.link.get(ctx)
	if err != nil {
		return nil, err
	}
	plans := make([]plan, len(ds))
	have := found{streams: map[string]*streamInfo{}, consumers: map[[2]string]*consumerInfo{}}
	for i, d := range ds {
		if plans[i], err = newPlan(d); err != nil {
			return nil, fmt.Errorf("observe %q: %w", d.Topology.Queue, err)
		}
		a.learn(plans[i])
		if plans[i].verify != "" {
			have.streams[plans[i].verify] = nil
		}
		for _, s := range plans[i].streams {
			have.streams[s.name] = nil
		}
		for _, k := range plans[i].consumers {
			have.consumers[[2]string{k.stream, k.name}] = nil
		}
		if len(plans[i].holds) > 0 {
			have.consumers[[2]string{physical(d.Topology, d.Topology.Queue), parkedConsumer}] = nil
		}
	}
	if err := have.read(ctx, c); err != nil {
		return nil, err
	}
	out := make([]broker.Observation, len(ds))
	for i := range ds {
		out[i] = a.compare(c, ds[i], plans[i], &have)
	}
	return out, nil
}

func (f *found) read(ctx context.Context, c *conn) error {
	var all []func() error
	for name := range f.streams {
		all = append(all, func() error {
			got, err := c.stream(ctx, name)
			if err != nil {
				return ignoreMissing(fmt.Sprintf("observe stream %q", name), err)
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			f.streams[name] = got
			return nil
		})
	}
	for key := range f.consumers {
		all = append(all, func() error {
			got, err := c.consumer(ctx, key[0], key[1])
			if err != nil {
				return ignoreMissing(fmt.Sprintf("observe consumer %q of stream %q", key[1], key[0]), err)
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			f.consumers[key] = got
			return nil
		})
	}
	return each(all)
}

func ignoreMissing(what string, err error) error {
	if errors.Is(err, broker.ErrNotFound) {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}

// each runs calls, several at once, and returns the first error.
func each(calls []func() error) error {
	var wg sync.WaitGroup
	errs := make([]error, min(parallel, len(calls)))
	next := make(chan func() error)
	for i := range errs {
		wg.Go(func() {
			for call := range next {
				if err := call(); err != nil && errs[i] == nil {
					errs[i] = err
				}
			}
		})
	}
	for _, call := range calls {
		next <- call
	}
	close(next)
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// compare is what the server's answers say about one declaration.
func (a *admin) compare(c *conn, d broker.Declaration, p plan, have *found) broker.Observation {
	o := broker.Observation{DriftKnown: true}
	add := func(obj broker.Object, missing bool, diffs []broker.Diff) {
		o.Objects = append(o.Objects, broker.ObservedObject{Object: obj, Missing: missing, Diffs: diffs})
	}
	if p.verify != "" {
		add(broker.Object{Kind: "stream", Name: p.verify, Role: p.verifyRole()}, have.streams[p.verify] == nil, nil)
	}
	var subjects []string // of the main queue's stream
	for _, s := range p.streams {
		got := have.streams[s.name]
		if got == nil {
			add(s.object(), true, nil)
			continue
		}
		diff := s.diffs(got.Config, a.schedules(c))
		if s.holds {
			subjects = got.Config.list("subjects")
			diff = append(diff, p.parkingDiff(got.Config, have)...)
		}
		add(s.object(), false, diff)
		o.Warnings = append(o.Warnings, s.warnings(got.Config)...)
	}
	for _, k := range p.consumers {
		got := have.consumers[[2]string{k.stream, k.name}]
		if got == nil {
			add(k.object(), true, nil)
			continue
		}
		add(k.object(), false, k.diffs(got.Config))
		o.Warnings = append(o.Warnings, k.warnings(got.Config)...)
	}
	for _, h := range p.holds {
		add(p.holdObject(h, topology.RoleHold), !slices.Contains(subjects, holdFilter(h.name)), nil)
	}
	for _, r := range d.Retired {
		h := hold{name: physical(d.Topology, r.Name)}
		if slices.Contains(subjects, holdFilter(h.name)) { // one that is gone is done with
			add(p.holdObject(h, topology.RoleRetired), false, nil)
		}
	}
	return o
}

// parkingDiff says whether held messages would not be moved by anybody.
func (p plan) parkingDiff(stream settings, have *found) []broker.Diff {
	if len(p.holds) == 0 || stream.flag("allow_msg_schedules") {
		return nil
	}
	got := have.consumers[[2]string{physical(p.topology, p.topology.Queue), parkedConsumer}]
	d := broker.Diff{Property: "consumer of parked messages", Want: parkedConsumer, Have: "none", Repairable: true}
	switch {
	case got == nil:
		return []broker.Diff{d}
	case p.parkingDiffers(got.Config):
		d.Want, d.Have = "all tiers", strings.Join(got.Config.list("filter_subjects"), ",")
		return []broker.Diff{d}
	}
	return nil
}

// Depths counts messages: for each queue one or two requests, several at once.
func (a *admin) Depths(ctx context.Context, names []string) ([]broker.Depth, error) {
	c, err := a.link.get(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]broker.Depth, len(names))
	calls := make([]func() error, len(names))
	for i, name := range names {
		calls[i] = func() error {
			d, err := a.depth(ctx, c, name)
			if err != nil {
				return fmt.Errorf("count messages of %q: %w", name, err)
			}
			out[i] = d
			return nil
		}
	}
	if err := each(calls); err != nil {
		return nil, err
	}
	return out, nil
}

// depth of a main or dead-letter queue is its consumer's: what it did not deliver yet, and what it delivered and was
// not acknowledged, be it at work, waiting in place, or handed back and not fetched again.
func (a *admin) depth(ctx context.Context, c *conn, name string) (broker.Depth, error) {
	d := broker.Depth{Queue: name, Stuck: broker.Known(0)}
	if !isName(name) {
		return broker.Depth{Queue: name, Missing: true}, nil
	}
	var ready, unacked uint64
	known := false
	if source := a.sourceOf(name); source != "" {
		k, err := c.consumer(ctx, source, name)
		switch {
		case err == nil:
			ready, unacked, known = k.Pending, k.AckPending, true
		case !errors.Is(err, broker.ErrNotFound):
			return d, err
		}
	}
	k, err := c.consumer(ctx, name, name)
	switch {
	case err == nil:
		ready, unacked = ready+k.Pending, unacked+k.AckPending
	case !errors.Is(err, broker.ErrNotFound):
		return d, err
	case !known:
		return withoutConsumer(ctx, c, name)
	}
	d.Ready, d.InFlight = broker.Known(int64(ready)), broker.Known(int64(unacked))
	return d, nil
}

// withoutConsumer counts what is on a stream's subject, or in a hold queue.
func withoutConsumer(ctx context.Context, c *conn, name string) (broker.Depth, error) {
	d := broker.Depth{Queue: name, Stuck: broker.Known(0), InFlight: broker.Known(0)}
	var on struct {
		State struct {
			Subjects map[string]int64 `json:"subjects"`
		} `json:"state"`
	}
	err := c.api(ctx, apiStreamInfo+name, map[string]any{"subjects_filter": name}, &on)
	if err == nil {
		d.Ready = broker.Known(on.State.Subjects[name])
		return d, nil
	}
	if !errors.Is(err, broker.ErrNotFound) {
		return d, err
	}
	owner, err := c.streamOf(ctx, holdFilter(name))
	if err != nil {
		return d, err
	}
	if owner == "" {
		return broker.Depth{Queue: name, Missing: true}, nil
	}
	n, err := c.subjects(ctx, owner, holdFilter(name))
	if err != nil {
		return d, ignoreMissing("count held messages", err)
	}
	d.Ready = broker.Known(int64(n))
	return d, nil
}
