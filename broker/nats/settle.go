package nats

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/settle"
)

// errSettledBefore is what a delivery gets that is settled twice, or by two calls at once, or too late.
var errSettledBefore = fmt.Errorf("settled already, being settled by another call, or no longer ours: %w", broker.ErrLost)

// Settle carries out actions. Copies are sent first, so that the time until they are confirmed is used to acknowledge
// what needs no copy; their originals are acknowledged once they are confirmed (A9).
func (s *subscription) Settle(ctx context.Context, batch []broker.Settlement) error {
	if len(batch) == 0 {
		return nil
	}
	r := round{sub: s, batch: batch}
	r.claim()
	var f *flight
	if r.copies > 0 {
		s.reached(stepBeforeCopy)
		f = r.send()
		s.reached(stepCopied)
	}
	if r.returns > 0 {
		r.handBack()
	}
	if r.plain > 0 {
		r.acknowledge(isPlain)
	}
	if f != nil {
		r.await(ctx, f)
		s.reached(stepBeforeAck)
		r.acknowledge(func(k settle.Kind) bool { return k == settle.Hold || k == settle.Copy })
		r.bury(ctx)
	}
	s.reached(stepAcked)
	s.topUp()
	if len(r.items) == 0 {
		return nil
	}
	slices.SortFunc(r.items, func(a, b broker.SettleItem) int { return a.Index - b.Index })
	return &broker.SettleError{Items: r.items}
}

func isPlain(k settle.Kind) bool { return k == settle.Done || k == settle.Drop }

func isReturn(k settle.Kind) bool {
	return k == settle.Requeue || k == settle.GiveBack || k == settle.WaitInPlace
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
	sub   *subscription
	batch []broker.Settlement
	items []broker.SettleItem
	// skip marks what is out already; nil while nothing is.
	skip                         []bool
	plain, returns, copies, dead int
	index                        []int // of the flight's messages in batch
}

// fail records that a delivery is not settled.
func (r *round) fail(i int, err error) {
	if r.skip == nil {
		r.skip = make([]bool, len(r.batch))
	}
	if r.skip[i] {
		return
	}
	r.skip[i] = true
	r.items = append(r.items, broker.SettleItem{Index: i, Err: err})
}

func (r *round) skipped(i int) bool { return r.skip != nil && r.skip[i] }

// claim takes every delivery that can be settled, so that no other call does.
func (r *round) claim() {
	s := r.sub
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range r.batch {
		e, kind := entryOf(r.batch[i].Delivery), r.batch[i].Action.Kind
		switch {
		case e == nil:
			r.fail(i, fmt.Errorf("not a delivery of NATS: %w", broker.ErrUnsupported))
		case e.sub != s:
			r.fail(i, fmt.Errorf("a delivery of another subscription: %w", broker.ErrLost))
		case e.state != unsettled:
			r.fail(i, errSettledBefore)
		case s.lost != nil:
			r.fail(i, s.lost)
		case now.Sub(e.renewed) >= s.ackWait:
			// Another consumer may have it. The server would take our acknowledgement all the same.
			s.forget(e)
			r.fail(i, errSettledBefore)
		default:
			if err := s.check(&r.batch[i].Action); err != nil {
				r.fail(i, err)
				continue
			}
			e.state = settling
			switch {
			case isPlain(kind):
				r.plain++
			case isReturn(kind):
				r.returns++
			default:
				r.copies++
			}
		}
	}
}

// check refuses actions that no caller may ask of this subscription.
func (s *subscription) check(a *settle.Action) error {
	t := &s.plan.topology
	switch a.Kind {
	case settle.Done, settle.Drop, settle.Requeue, settle.GiveBack:
		return nil
	case settle.WaitInPlace:
		if s.inPlace {
			return nil
		}
	case settle.Hold:
		if s.role == broker.ReadMain && !t.External && a.Tier >= 0 && a.Tier < len(t.Holds) {
			return nil
		}
	case settle.Copy:
		if s.role == broker.ReadMain && !t.External {
			return nil
		}
	case settle.DeadLetter:
		if s.role == broker.ReadMain && t.DeadLetter != "" {
			return nil
		}
	}
	return fmt.Errorf("action %s on a delivery of %q: %w", a.Kind, s.queue, broker.ErrUnsupported)
}

// release gives a delivery back to the caller, to be settled another time.
func (r *round) release(i int, err error) {
	s := r.sub
	e := entryOf(r.batch[i].Delivery)
	s.mu.Lock()
	back := s.closed
	if e.state == settling {
		e.state = unsettled
		if back {
			s.forget(e)
		}
	}
	switch {
	case s.lost != nil:
		err = fmt.Errorf("%w: %w", s.lost, err)
	case s.conn.isDone(): // and the subscription is about to learn of it
		err = fmt.Errorf("%w: %w", broker.ErrLost, err)
	}
	s.mu.Unlock()
	if back {
		_ = s.conn.Publish(e.msg.Reply, nak)
	}
	r.fail(i, err)
}

// unlink takes deliveries of some kinds out of the unsettled ones. Where the connection is lost they are not ours to
// settle any more.
func (r *round) unlink(of func(settle.Kind) bool) {
	s := r.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	lost := s.lost
	if s.closed && !s.conn.isDone() {
		lost = nil // closed while this call is at work: what it claimed is still its own
	}
	for i := range r.batch {
		if r.skipped(i) || !of(r.batch[i].Action.Kind) {
			continue
		}
		if lost != nil {
			r.fail(i, lost)
			continue
		}
		s.forget(entryOf(r.batch[i].Delivery))
	}
}

// handBack makes the server redeliver, now or after a delay. Either is counted as a delivery.
func (r *round) handBack() {
	s := r.sub
	r.unlink(isReturn)
	now := time.Now()
	for i := range r.batch {
		st := &r.batch[i]
		if r.skipped(i) || !isReturn(st.Action.Kind) {
			continue
		}
		e := entryOf(st.Delivery)
		word := nak
		if st.Action.Kind == settle.WaitInPlace {
			s.client.waiting.put(waitKey{e.from.stream, e.from.consumer, e.origin.seq},
				waiter{delivered: e.origin.delivered, due: now.Add(st.Action.Delay), fields: st.Stamp})
			word = nakAfter(st.Action.Delay)
		}
		if err := s.conn.Publish(e.msg.Reply, word); err != nil {
			r.fail(i, s.gone(err))
		}
	}
}

// nakAfter asks for a redelivery after a delay, which the server counts from when it reads this.
func nakAfter(d time.Duration) []byte {
	out := append(make([]byte, 0, 48), `-NAK {"delay":`...)
	return append(strconv.AppendInt(out, int64(d), 10), '}')
}

// acknowledge acknowledges the deliveries of some kinds, without waiting for an answer.
func (r *round) acknowledge(of func(settle.Kind) bool) {
	s := r.sub
	r.unlink(of)
	for i := range r.batch {
		if r.skipped(i) || !of(r.batch[i].Action.Kind) {
			continue
		}
		if err := s.conn.Publish(entryOf(r.batch[i].Delivery).msg.Reply, ack); err != nil {
			r.fail(i, s.gone(err))
		}
	}
}

// gone is the error of a delivery whose connection is gone: the server has it back, or will.
func (s *subscription) gone(cause error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lost != nil {
		return s.lost
	}
	return fmt.Errorf("%w: %w", broker.ErrLost, cause)
}

// send starts publishing the copies. A nil flight means that none could be started.
func (r *round) send() *flight {
	s := r.sub
	now := time.Now()
	out := make([]outgoing, 0, r.copies)
	r.index = make([]int, 0, r.copies)
	for i := range r.batch {
		if r.skipped(i) || !r.batch[i].Action.Kind.Copies() {
			continue
		}
		m, err := s.copyOf(entryOf(r.batch[i].Delivery), &r.batch[i], now)
		if err != nil {
			r.release(i, err)
			continue
		}
		if r.batch[i].Action.Kind == settle.DeadLetter {
			r.dead++
		}
		out = append(out, m)
		r.index = append(r.index, i)
	}
	if len(out) == 0 {
		return nil
	}
	return s.conn.flights.send(out)
}

// await waits for the copies' confirms. What is not known to be stored stays unsettled.
func (r *round) await(ctx context.Context, f *flight) {
	for j, err := range f.wait(ctx) {
		if err != nil {
			r.release(r.index[j], fmt.Errorf("copy to subject %q: %w", f.messages[j].subject, err))
		}
	}
}

// bury acknowledges the originals of dead letters and waits for the server to confirm that, so that a dead letter is
// not followed by its own redelivery.
func (r *round) bury(ctx context.Context) {
	if r.dead == 0 {
		return
	}
	s := r.sub
	isDead := func(k settle.Kind) bool { return k == settle.DeadLetter }
	r.unlink(isDead)
	acks := make([]outgoing, 0, r.dead)
	index := make([]int, 0, r.dead)
	for i := range r.batch {
		if !r.skipped(i) && isDead(r.batch[i].Action.Kind) {
			acks = append(acks, outgoing{subject: entryOf(r.batch[i].Delivery).msg.Reply, data: ack})
			index = append(index, i)
		}
	}
	if len(acks) == 0 {
		return
	}
	for j, err := range s.conn.flights.send(acks).wait(ctx) {
		if err != nil {
			// Not known to be acknowledged: it may come back, and die a second time.
			r.fail(index[j], fmt.Errorf("%w: acknowledge the original of a dead letter: %w", broker.ErrLost, err))
		}
	}
}
