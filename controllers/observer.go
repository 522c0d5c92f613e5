package controllers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

const (
	// defaultResync is the time between two looks at everything on a Broker that does not say.
	defaultResync = 5 * time.Minute
	// countInterval is the time between two counts of all messages on a Broker.
	countInterval = 15 * time.Second
	// countShare bounds the share of the time in which a broker is busy with being counted, to a 20th.
	countShare = 20
	// countsPace is the shortest time between two writes of one object's counts.
	countsPace = 30 * time.Second
	// gather is how long a read waits for others to join it. While many come it is as long as the last call took, up
	// to mostGather: a read of everything costs a broker the same for one and for hundreds.
	gather, mostGather = 5 * time.Millisecond, time.Second
)

// observer reads one broker on behalf of all its Topologies. Reads that are asked for at about the same time are one
// call; every resync interval one call looks at everything, and every 15 s one counts the messages. It tells a
// Topology's controller only where something is not as it was.
type observer struct {
	entry *brokerEntry
	clock clock.WithTicker

	mu       sync.Mutex
	subjects map[types.NamespacedName]*subject
	// generation of subjects, so that a resync does not judge what was declared after it began.
	looks   batch[broker.Declaration, broker.Observation]
	counts  batch[[]string, map[string]broker.Depth]
	resync  time.Duration
	family  topology.Kind
	changed func(types.NamespacedName)
	ended   chan struct{}
	endOnce sync.Once
	wake    chan struct{}
}

// subject is one Topology that is looked after.
type subject struct {
	decl   broker.Declaration
	queues []trackedQueue
	// seen is the fingerprint of the observation that the controller has dealt with.
	seen string
	// version counts calls of track.
	version int
	depths  map[string]broker.Depth
	// reported are the counts in the Topology's status, and since when.
	reported   counts
	reportedAt time.Time
}

// trackedQueue is a queue's physical name and what it is for.
type trackedQueue struct {
	name string
	role topology.Role
}

func newObserver(e *brokerEntry, clk clock.WithTicker) *observer {
	return &observer{entry: e, clock: clk, subjects: map[types.NamespacedName]*subject{}, resync: defaultResync,
		ended: make(chan struct{}), wake: make(chan struct{}, 1)}
}

// configure sets what the Broker's spec says.
func (o *observer) configure(kind topology.Kind, resync time.Duration, changed func(types.NamespacedName)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.family, o.changed = kind, changed
	if resync <= 0 {
		resync = defaultResync
	}
	if o.resync != resync {
		o.resync = resync
		select {
		case o.wake <- struct{}{}:
		default:
		}
	}
}

func (o *observer) kind() topology.Kind {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.family
}

func (o *observer) stop() { o.endOnce.Do(func() { close(o.ended) }) }

// run reads at the intervals until it is stopped.
func (o *observer) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	resync, count := o.clock.NewTimer(o.nextResync()), o.clock.NewTimer(countInterval)
	defer resync.Stop()
	defer count.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-o.ended:
			return
		case <-o.wake:
			resync.Reset(o.nextResync())
		case <-resync.C():
			o.resyncAll(ctx)
			resync.Reset(o.nextResync())
		case <-count.C():
			start := o.clock.Now()
			o.countAll(ctx)
			// A broker with so many queues that counting is work for it is counted less often.
			count.Reset(max(countInterval, countShare*o.clock.Since(start)))
		}
	}
}

// nextResync is the interval with 10 % of jitter, so that Brokers do not read in step.
func (o *observer) nextResync() time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.resync - o.resync/10 + rand.N(o.resync/5+1)
}

// track has a Topology looked after, and says with which observation its controller has dealt.
func (o *observer) track(key types.NamespacedName, d broker.Declaration, queues []trackedQueue, seen string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	s := o.subjects[key]
	if s == nil {
		s = &subject{}
		o.subjects[key] = s
	}
	s.decl, s.queues, s.seen = d, queues, seen
	s.version++
}

// untrack forgets a Topology.
func (o *observer) untrack(key types.NamespacedName) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.subjects, key)
}

// reported says which counts a Topology's status holds since when.
func (o *observer) setReported(key types.NamespacedName, c counts, at time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if s := o.subjects[key]; s != nil {
		s.reported, s.reportedAt = c, at
	}
}

// sample is the last count of a Topology's queues, nil where there is none yet.
func (o *observer) sample(key types.NamespacedName) map[string]broker.Depth {
	o.mu.Lock()
	defer o.mu.Unlock()
	if s := o.subjects[key]; s != nil {
		return s.depths
	}
	return nil
}

// observe looks at one declaration, together with whoever else wants to look.
func (o *observer) observe(ctx context.Context, d broker.Declaration) (broker.Observation, error) {
	return o.looks.join(ctx, d, o.lookAt)
}

func (o *observer) lookAt(ctx context.Context, all []broker.Declaration) (out []broker.Observation, err error) {
	err = o.entry.do(ctx, func(ctx context.Context, a broker.Admin) error {
		out, err = a.Observe(ctx, all)
		return err
	})
	return out, err
}

// depths counts the messages in queues, together with whoever else wants to count.
func (o *observer) depths(ctx context.Context, names []string) (map[string]broker.Depth, error) {
	return o.counts.join(ctx, names, func(ctx context.Context, all [][]string) ([]map[string]broker.Depth, error) {
		found, err := o.readDepths(ctx, slices.Concat(all...))
		if err != nil {
			return nil, err
		}
		out := make([]map[string]broker.Depth, len(all))
		for i, names := range all {
			out[i] = pick(found, names)
		}
		return out, nil
	})
}

func pick(from map[string]broker.Depth, names []string) map[string]broker.Depth {
	m := make(map[string]broker.Depth, len(names))
	for _, n := range names {
		m[n] = from[n]
	}
	return m
}

func (o *observer) readDepths(ctx context.Context, names []string) (map[string]broker.Depth, error) {
	slices.Sort(names)
	names = slices.Compact(names)
	var ds []broker.Depth
	err := o.entry.do(ctx, func(ctx context.Context, a broker.Admin) (err error) {
		ds, err = a.Depths(ctx, names)
		return err
	})
	if err != nil {
		return nil, err
	}
	found := make(map[string]broker.Depth, len(ds))
	for i, d := range ds {
		found[names[i]] = d
	}
	return found, nil
}

// resyncAll looks at everything in one call and tells the controllers of what is not as they left it.
func (o *observer) resyncAll(ctx context.Context) {
	o.mu.Lock()
	keys := slices.Collect(maps.Keys(o.subjects))
	decls := make([]broker.Declaration, len(keys))
	versions := make([]int, len(keys))
	for i, k := range keys {
		decls[i], versions[i] = o.subjects[k].decl, o.subjects[k].version
	}
	o.mu.Unlock()
	if len(keys) == 0 {
		return
	}
	seen := oneByOne(ctx, decls, o.lookAt)
	var changed []types.NamespacedName
	o.mu.Lock()
	for i, k := range keys {
		if seen[i].err != nil {
			continue // do has told of a lost connection; anything else is looked at again next time
		}
		if s := o.subjects[k]; s != nil && s.version == versions[i] && s.seen != fingerprint(seen[i].out) {
			changed = append(changed, k)
		}
	}
	tell := o.changed
	o.mu.Unlock()
	for _, k := range changed {
		tell(k)
	}
}

// countAll counts all messages in one call, keeps the figures for metrics, and tells the controllers whose status
// should say so.
func (o *observer) countAll(ctx context.Context) {
	o.mu.Lock()
	var names []string
	for _, s := range o.subjects {
		for _, q := range s.queues {
			names = append(names, q.name)
		}
	}
	o.mu.Unlock()
	if len(names) == 0 {
		return
	}
	found, err := o.readDepths(ctx, names)
	if err != nil {
		o.forgetDepths() // unknown is not what it was
		return
	}
	now := o.clock.Now()
	var changed []types.NamespacedName
	o.mu.Lock()
	for k, s := range o.subjects {
		s.depths = make(map[string]broker.Depth, len(s.queues))
		for _, q := range s.queues {
			s.depths[q.name] = found[q.name]
		}
		if now.Sub(s.reportedAt) >= countsPace && s.reported.movedTo(countsOf(s.queues, s.depths)) {
			changed = append(changed, k)
		}
	}
	tell := o.changed
	o.mu.Unlock()
	for _, k := range changed {
		tell(k)
	}
}

func (o *observer) forgetDepths() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, s := range o.subjects {
		s.depths = nil
	}
}

// each calls f with every queue that was counted.
func (o *observer) each(f func(types.NamespacedName, trackedQueue, broker.Depth)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for k, s := range o.subjects {
		for _, q := range s.queues {
			if d, ok := s.depths[q.name]; ok {
				f(k, q, d)
			}
		}
	}
}

// fingerprint is the same for observations that call for the same reaction, and empty for one that calls for none.
func fingerprint(o broker.Observation) string {
	var b strings.Builder
	for _, obj := range o.Objects {
		if obj.Role == topology.RoleRetired {
			continue
		}
		if obj.Missing {
			fmt.Fprintf(&b, "missing %s %q\n", obj.Kind, obj.Name)
		}
		for _, d := range obj.Diffs {
			fmt.Fprintf(&b, "%s %q %s %s %s\n", obj.Kind, obj.Name, d.Property, d.Want, d.Have)
		}
	}
	for _, w := range o.Warnings {
		fmt.Fprintln(&b, w)
	}
	return b.String()
}

// batch joins calls that are made at about the same time into one. The zero value is ready.
type batch[In, Out any] struct {
	mu      sync.Mutex
	waiting []*batchItem[In, Out]
	running bool
}

type batchItem[In, Out any] struct {
	in   In
	out  Out
	err  error
	done chan struct{}
}

// join adds in to the next call and waits for its result. The first caller carries out the calls until nobody waits,
// under a context that outlives its own, so that its end does not fail the others.
func (b *batch[In, Out]) join(ctx context.Context, in In, call func(context.Context, []In) ([]Out, error)) (Out, error) {
	item := &batchItem[In, Out]{in: in, done: make(chan struct{})}
	b.mu.Lock()
	b.waiting = append(b.waiting, item)
	lead := !b.running
	b.running = true
	b.mu.Unlock()
	if lead {
		go b.lead(context.WithoutCancel(ctx), call)
	}
	select {
	case <-item.done:
		return item.out, item.err
	case <-ctx.Done():
		var none Out
		return none, ctx.Err()
	}
}

func (b *batch[In, Out]) lead(ctx context.Context, call func(context.Context, []In) ([]Out, error)) {
	for wait := gather; ; {
		time.Sleep(wait)
		b.mu.Lock()
		items := b.waiting
		b.waiting = nil
		if len(items) == 0 {
			b.running = false
			b.mu.Unlock()
			return
		}
		b.mu.Unlock()
		in := make([]In, len(items))
		for i, it := range items {
			in[i] = it.in
		}
		start := time.Now()
		results := oneByOne(ctx, in, call)
		wait = min(max(gather, time.Since(start)), mostGather)
		for i, res := range results {
			items[i].out, items[i].err = res.out, res.err
			close(items[i].done)
		}
	}
}

type result[Out any] struct {
	out Out
	err error
}

// oneByOne makes one call for all, and one for each where the broker refuses that: what is wrong with one Topology,
// such as a right that is missing for its name, is not wrong with the others. A broker that is down is asked once.
func oneByOne[In, Out any](ctx context.Context, in []In, call func(context.Context, []In) ([]Out, error)) []result[Out] {
	results := make([]result[Out], len(in))
	out, err := call(ctx, in)
	if err == nil && len(out) != len(in) {
		err = fmt.Errorf("%d answers to %d questions", len(out), len(in))
	}
	switch {
	case err == nil:
		for i := range out {
			results[i].out = out[i]
		}
	case len(in) == 1 || errors.Is(err, broker.ErrUnavailable) || ctx.Err() != nil:
		for i := range results {
			results[i].err = err
		}
	default:
		for i := range in {
			results[i] = oneByOne(ctx, in[i:i+1], call)[0]
		}
	}
	return results
}
