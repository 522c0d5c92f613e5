package kafka

import (
	"context"
	"fmt"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/settle"
)

// errSettledBefore is what a delivery gets that is settled twice, or by two calls at once.
var errSettledBefore = fmt.Errorf("settled already, or being settled by another call: %w", broker.ErrLost)

// Settle carries out actions. What is done is noted here, and committed soon after; a copy is confirmed by all in-sync
// replicas before its original is done (A9).
func (s *subscription) Settle(ctx context.Context, batch []broker.Settlement) error {
	if len(batch) == 0 {
		return nil
	}
	r := round{sub: s, batch: batch}
	r.claim()
	var f *flight
	if r.copies > 0 {
		s.reached(stepBeforeCopy)
		copying, cancel := context.WithCancel(ctx) // a subscription that is over waits for no confirm
		defer cancel()
		stop := context.AfterFunc(s.commits.ctx, cancel)
		defer stop()
		f = r.send(copying)
	}
	if r.plain > 0 {
		r.finish(func(k settle.Kind) bool { return !k.Copies() })
	}
	if f != nil {
		r.await(f)
		s.reached(stepBeforeAck)
		r.finish(settle.Kind.Copies)
	}
	return r.failures.Err()
}

func entryOf(d *broker.Delivery) *entry {
	if d == nil {
		return nil
	}
	e, _ := d.Native.(*entry)
	return e
}

// round is one call of Settle.
type round struct {
	sub           *subscription
	batch         []broker.Settlement
	failures      broker.SettleFailures
	plain, copies int
	index         []int // of the flight's records in batch
}

// claim takes every delivery that can be settled, so that no other call does.
func (r *round) claim() {
	s := r.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range r.batch {
		e := entryOf(r.batch[i].Delivery)
		switch {
		case e == nil:
			r.failures.Add(i, fmt.Errorf("not a delivery of Kafka: %w", broker.ErrUnsupported))
		case e.state != unsettled:
			r.failures.Add(i, errSettledBefore)
		case e.from.lost != nil:
			r.failures.Add(i, e.from.lost)
		case s.parts[topicPartition{e.from.topic, e.from.id}] != e.from:
			r.failures.Add(i, fmt.Errorf("a delivery of another subscription: %w", broker.ErrLost))
		default:
			if err := broker.CheckAction(&s.plan.topology, s.role, r.batch[i].Action); err != nil {
				r.failures.Add(i, err)
				continue
			}
			e.state = settling
			if r.batch[i].Action.Kind.Copies() {
				r.copies++
				s.copying++
			} else {
				r.plain++
			}
		}
	}
}

// finish notes what became of deliveries whose action is one of a kind.
func (r *round) finish(of func(settle.Kind) bool) {
	s := r.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	back := false
	for i := range r.batch {
		kind := r.batch[i].Action.Kind
		if r.failures.Has(i) || !of(kind) {
			continue
		}
		e := entryOf(r.batch[i].Delivery)
		p := e.from
		if kind.Copies() {
			s.copying--
		}
		if p.lost != nil {
			r.failures.Add(i, p.lost)
			continue
		}
		s.out--
		p.dirty = true
		if kind == settle.Requeue || kind == settle.GiveBack {
			p.track.release()
			back = true
			s.comesAgain(e)
			continue
		}
		e.state = settled
		p.track.finish(e.record.Offset)
		if p.paused && p.delay == 0 && !s.full(p) {
			s.unblocked(p)
		}
	}
	s.commits.dirty()
	poke(s.settled)
	if s.worth() && (back || s.backlog > 0 || len(s.held) > 0) {
		poke(s.arrived)
	}
}

// full says whether the next record of a partition is still too far beyond the lowest one that is not done. Half of the
// span is let pass before it goes on, so that it does not stop and go with every record.
func (s *subscription) full(p *partition) bool { return p.track.next-p.track.base > maxSpan/2 }

// comesAgain lets a delivery that was handed back be delivered anew: here, or where its partition goes next.
func (s *subscription) comesAgain(e *entry) {
	e.state = settled
	if s.stopping || e.from.revoking.Load() {
		return
	}
	n := &entry{}
	n.fill(e.record, e.from)
	n.Redelivered = true
	e.from.again = append(e.from.again, n)
	s.repeats++
}

// release gives a delivery back to the caller, to be settled another time.
func (r *round) release(i int, err error) {
	s := r.sub
	s.mu.Lock()
	e := entryOf(r.batch[i].Delivery)
	lost := e.from.lost
	e.state = unsettled
	s.copying-- // only copies are released
	s.mu.Unlock()
	if lost != nil {
		err = lost
	}
	r.failures.Add(i, err)
}

// send starts writing the copies. A nil flight means that none could be started.
func (r *round) send(ctx context.Context) *flight {
	s := r.sub
	c, err := s.client.producing()
	if err != nil {
		for i := range r.batch {
			if !r.failures.Has(i) && r.batch[i].Action.Kind.Copies() {
				r.release(i, fmt.Errorf("copy: %w", err))
			}
		}
		return nil
	}
	f := newFlight(c, r.copies)
	r.index = make([]int, 0, r.copies)
	turn := s.client.turns.take()
	for i := range r.batch {
		if r.failures.Has(i) || !r.batch[i].Action.Kind.Copies() {
			continue
		}
		r.index = append(r.index, i)
		c := copyOf(entryOf(r.batch[i].Delivery), &r.batch[i], s.plan.target(r.batch[i].Action))
		c.Partition = turn
		f.send(ctx, c)
	}
	return f
}

// await waits for the copies to be confirmed. What is not known to be stored stays unsettled.
func (r *round) await(f *flight) {
	for j, err := range f.wait() {
		i := r.index[j]
		if err != nil {
			topic := f.records[j].Topic
			r.release(i, fmt.Errorf("copy to topic %q: %w", topic, err))
			continue
		}
		r.sub.topics.wrote(f.records[j].Topic)
	}
}
