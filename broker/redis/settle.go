package redis

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/settle"
)

const (
	// ackMost is how many entries one script acknowledges.
	ackMost = 1000
	// One script writes at most so many copies, and stops at so many bytes: the server does nothing else meanwhile.
	copyMost  = 64
	copyBytes = 1 << 20
	// settleAttempts is how often a script is sent whose answer did not come. It does nothing twice.
	settleAttempts = 3
	settleBackoff  = 50 * time.Millisecond
)

var (
	// errSettledBefore is what a delivery gets that is settled twice, or by two calls at once.
	errSettledBefore = fmt.Errorf("settled already, or being settled by another call: %w", broker.ErrLost)
	// errTaken is what a delivery gets whose lease was over (H9).
	errTaken = fmt.Errorf("its lease was lost, and another consumer has it or had it: %w", broker.ErrLost)
)

func isPlain(k settle.Kind) bool  { return k == settle.Done || k == settle.Drop }
func isReturn(k settle.Kind) bool { return k == settle.Requeue || k == settle.GiveBack }

func entryOf(d *broker.Delivery) *entry {
	if d == nil {
		return nil
	}
	e, _ := d.Native.(*entry)
	return e
}

// Settle carries out actions, with one script for all that are alike. A script makes sure that each entry is still this
// consumer's; a copy and the acknowledgement of its original are one step.
func (s *subscription) Settle(ctx context.Context, batch []broker.Settlement) error {
	if len(batch) == 0 {
		return nil
	}
	r := round{sub: s, batch: batch}
	r.claim()
	if len(r.copies) > 0 {
		r.copy(ctx)
	}
	if len(r.returns) > 0 {
		r.giveBack(ctx)
	}
	if len(r.plain) > 0 {
		r.acknowledge(ctx)
	}
	if r.settled {
		poke(s.wake)
	}
	return r.failures.Err()
}

// round is one call of Settle.
type round struct {
	sub      *subscription
	batch    []broker.Settlement
	failures broker.SettleFailures
	// Indexes into batch, by what is to be done.
	plain, returns, copies []int
	settled                bool
}

func (r *round) entry(i int) *entry { return entryOf(r.batch[i].Delivery) }

// claim takes every delivery that can be settled, so that no other call does.
func (r *round) claim() {
	s := r.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range r.batch {
		e, kind := r.entry(i), r.batch[i].Action.Kind
		switch {
		case e == nil:
			r.failures.Add(i, fmt.Errorf("not a delivery of Redis: %w", broker.ErrUnsupported))
		case e.sub != s:
			r.failures.Add(i, fmt.Errorf("a delivery of another subscription: %w", broker.ErrLost))
		case e.state != unsettled:
			r.failures.Add(i, errSettledBefore)
		case s.lost != nil:
			r.failures.Add(i, s.lost)
		case kind == settle.Leave: // it stays pending and is renewed no more (H8)
			s.drop(e)
			r.settled = true
		default:
			if err := broker.CheckAction(&s.topology, s.role, r.batch[i].Action); err != nil {
				r.failures.Add(i, err)
				continue
			}
			e.state = settling
			switch {
			case isPlain(kind):
				r.plain = append(r.plain, i)
			case isReturn(kind):
				r.returns = append(r.returns, i)
			default:
				r.copies = append(r.copies, i)
			}
		}
	}
}

// release gives deliveries back to the caller, to be settled another time; or never, where they are not ours any more. It
// is sure that nothing was done with them, or not.
func (r *round) release(err error, sure bool, index ...int) {
	s := r.sub
	s.mu.Lock()
	for _, i := range index {
		if e := r.entry(i); e.state == settling {
			e.state = unsettled
			e.doubt = e.doubt || !sure
		}
	}
	s.mu.Unlock()
	for _, i := range index {
		r.failures.Add(i, err)
	}
}

// done forgets deliveries that are settled.
func (r *round) done(index []int) {
	s := r.sub
	s.mu.Lock()
	for _, i := range index {
		s.drop(r.entry(i))
	}
	s.mu.Unlock()
	r.settled = true
}

// group is deliveries of one stream, in the order of their ids.
type group struct {
	stream int
	index  []int // into a batch
}

// groups sorts deliveries by stream and id, in groups of at most so many.
func (r *round) groups(index []int, most int) []group {
	slices.SortFunc(index, func(a, b int) int { return r.entry(a).compare(r.entry(b)) })
	var out []group
	for _, i := range index {
		stream := r.entry(i).stream
		if n := len(out); n == 0 || out[n-1].stream != stream || len(out[n-1].index) == most {
			out = append(out, group{stream: stream})
		}
		last := &out[len(out)-1]
		last.index = append(last.index, i)
	}
	return out
}

func (e *entry) compare(o *entry) int {
	return cmp.Or(cmp.Compare(e.stream, o.stream), cmp.Compare(e.ms, o.ms), cmp.Compare(e.n, o.n))
}

// acknowledge settles what needs no copy.
func (r *round) acknowledge(ctx context.Context) {
	s := r.sub
	for _, g := range r.groups(r.plain, ackMost) {
		args := make([]any, 0, 3+len(g.index))
		args = append(args, s.group, s.name, s.modes[g.stream])
		for _, i := range g.index {
			args = append(args, &r.entry(i).id)
		}
		out, sure, err := s.do(ctx, settleScript, []string{s.streams[g.stream]}, args)
		r.conclude(g, out, sure, err)
	}
}

// giveBack returns deliveries, uncounted.
func (r *round) giveBack(ctx context.Context) {
	s := r.sub
	for _, g := range r.groups(r.returns, ackMost) {
		entries := make([]*entry, len(g.index))
		for j, i := range g.index {
			entries[j] = r.entry(i)
		}
		out, sure, err := s.giveBackSurely(ctx, g.stream, entries)
		r.conclude(g, out, sure, err)
	}
	s.mu.Lock()
	s.returns = true // for this consumer too
	s.mu.Unlock()
}

// conclude reads the answer to a script that lists the places of what was not ours, and how many of those nobody has.
func (r *round) conclude(g group, out []any, sure bool, err error) {
	if err != nil {
		r.release(err, sure, g.index...)
		return
	}
	s := r.sub
	others := out[:len(out)-1]
	switch n := toInt(out[len(out)-1]); {
	case n > 0:
		s.suspectOrphans(g.stream)
	case n < 0:
		s.sayLost(int(-n))
	}
	r.done(g.index)
	for _, place := range others {
		if i := g.index[toInt(place)-1]; sure && !r.entry(i).doubt { // else an earlier attempt may have done it
			r.failures.Add(i, errTaken)
		}
	}
}

// copy writes copies and acknowledges their originals.
func (r *round) copy(ctx context.Context) {
	for _, g := range r.groups(r.copies, copyMost) {
		for from := 0; from < len(g.index); {
			from += r.copySome(ctx, g.stream, g.index[from:])
		}
	}
}

// copySome copies the first of index, as many as fit one script, and says how many those are.
func (r *round) copySome(ctx context.Context, stream int, index []int) int {
	s := r.sub
	keys := []string{s.streams[stream]}
	places := map[string]int{}
	args := append(make([]any, 0, 3+4*len(index)), s.group, s.name, s.modes[stream])
	var sent []int
	taken, ahead := 0, s.clockAhead()
	var packed []byte // all copies, one after the other
	for _, i := range index {
		taken++
		e, st := r.entry(i), &r.batch[i]
		key, delay := s.goal(st.Action)
		if places[key] == 0 {
			keys = append(keys, key)
			places[key] = len(keys)
		}
		begin := len(packed)
		if packed == nil {
			packed = make([]byte, 0, min(len(index), 8)*(len(e.fields)+512))
		}
		if delay >= 0 {
			packed = e.prefix(packed)
		}
		var fields int
		if packed, fields = appendCopy(packed, e, st, ahead); fields > maxFields {
			packed = packed[:begin]
			r.release(fmt.Errorf("copy with %d fields: at most %d can be copied: %w", fields, maxFields, broker.ErrTooLarge), true, i)
			continue
		}
		args = append(args, &e.id, places[key], delay, packed[begin:len(packed):len(packed)])
		sent = append(sent, i)
		if len(packed) >= copyBytes {
			break
		}
	}
	if len(sent) > 0 {
		out, sure, err := s.do(ctx, copyScript, keys, args)
		r.concludeCopies(stream, sent, out, sure, err)
	}
	return taken
}

// goal is where a copy goes, and for how many milliseconds it is held; -1: it is appended.
func (s *subscription) goal(a settle.Action) (key string, delay int64) {
	t := s.topology
	switch a.Kind {
	case settle.Hold:
		h := t.Holds[a.Tier]
		return physical(t, h.Queue), h.Delay.Milliseconds()
	case settle.DeadLetter:
		return physical(t, t.DeadLetter), -1
	default:
		return s.streams[s.target()], -1
	}
}

func (r *round) concludeCopies(stream int, sent []int, out []any, sure bool, err error) {
	s := r.sub
	if err != nil {
		r.release(fmt.Errorf("copy: %w", err), sure, sent...)
		return
	}
	if len(out) > len(sent) {
		s.sayLost(int(toInt(out[len(sent)])))
	}
	var done []int
	var soonest time.Duration = -1
	for j, i := range sent {
		switch v := out[j].(type) {
		case string:
			r.release(fmt.Errorf("copy: %w: %s", replyMeans(v), v), sure, i)
			continue
		case int64:
			if v < 0 {
				s.suspectOrphans(stream)
			}
			if v <= 0 && sure && !r.entry(i).doubt {
				r.failures.Add(i, errTaken)
			}
		}
		done = append(done, i)
		if a := r.batch[i].Action; a.Kind == settle.Hold {
			if d := s.topology.Holds[a.Tier].Delay; soonest < 0 || d < soonest {
				soonest = d
			}
		}
	}
	r.done(done)
	if soonest >= 0 {
		s.dueIn(soonest)
	}
}

// do runs a script that does nothing twice, again where no answer came: sure is false when an earlier attempt may have
// done what the last one found done, or did what it does not know of. An error is the seam's.
func (s *subscription) do(ctx context.Context, sc *script, keys []string, args []any) (out []any, sure bool, err error) {
	sure = true
	wait := settleBackoff
	for attempt := 1; ; attempt++ {
		out, err = s.nodes.run(ctx, sc, keys, args)
		if err == nil {
			break
		}
		if _, replied := reply(err); replied {
			break
		}
		sure = sure && notSent(err)
		if ctx.Err() != nil || attempt == settleAttempts {
			break
		}
		// Where the connection is gone, the subscription may be about to find that out.
		if !pause(wait, s.over, ctx.Done()) {
			break
		}
		wait *= 2
	}
	if err == nil {
		return out, sure, nil
	}
	s.mu.Lock()
	lost := s.lost
	s.mu.Unlock()
	switch {
	case lost != nil:
		return nil, sure, lost
	case groupGone(err):
		s.broken(err)
		return nil, sure, errTaken
	}
	return nil, sure, mapError(err)
}

func (s *subscription) giveBackSurely(ctx context.Context, stream int, entries []*entry) ([]any, bool, error) {
	args := make([]any, 0, 3+len(entries))
	args = append(args, s.group, s.name, returned)
	for _, e := range entries {
		args = append(args, &e.id)
	}
	return s.do(ctx, giveBackScript, []string{s.streams[stream]}, args)
}

func (s *subscription) giveBack(ctx context.Context, stream int, entries []*entry) ([]any, error) {
	out, _, err := s.giveBackSurely(ctx, stream, entries)
	return out, err
}

// ofStream is entries of one stream, in the order of their ids.
type ofStream struct {
	stream  int
	entries []*entry
}

// byStream sorts entries by stream and id, in groups of at most ackMost.
func (s *subscription) byStream(entries []*entry) []ofStream {
	slices.SortFunc(entries, (*entry).compare)
	var out []ofStream
	for _, e := range entries {
		if n := len(out); n == 0 || out[n-1].stream != e.stream || len(out[n-1].entries) == ackMost {
			out = append(out, ofStream{stream: e.stream})
		}
		last := &out[len(out)-1]
		last.entries = append(last.entries, e)
	}
	return out
}
