package nats

import (
	"context"
	"fmt"
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
	var waves []wave
	if r.copies > 0 {
		s.reached(stepBeforeCopy)
		waves = r.send()
		s.reached(stepCopied)
	}
	if r.returns > 0 {
		r.handBack()
	}
	if r.plain > 0 {
		r.acknowledge(r.all(isPlain))
	}
	for i, w := range waves {
		r.await(ctx, w)
		s.reached(stepBeforeAck)
		r.acknowledge(r.some(w.index, func(k settle.Kind) bool { return k == settle.Hold || k == settle.Copy }))
		if i < len(waves)-1 {
			s.topUp()
		}
	}
	r.bury(ctx)
	s.reached(stepAcked)
	s.topUp()
	return r.failures.Err()
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
	sub                          *subscription
	batch                        []broker.Settlement
	failures                     broker.SettleFailures
	plain, returns, copies, dead int
}

// wave is a part of a round's copies. The originals of a part are acknowledged, and their places filled, while the
// confirms of the next are on their way.
type wave struct {
	flight *flight
	index  []int // of the flight's messages in the batch
}

// waveSize is what topUp finds worth a request with the default prefetch.
const waveSize = 25

// all lists the settlements of some kinds.
func (r *round) all(of func(settle.Kind) bool) []int {
	out := make([]int, 0, len(r.batch))
	for i := range r.batch {
		if !r.failures.Has(i) && of(r.batch[i].Action.Kind) {
			out = append(out, i)
		}
	}
	return out
}

// some lists those of a list that are of some kinds and not out already.
func (r *round) some(index []int, of func(settle.Kind) bool) []int {
	out := index[:0]
	for _, i := range index {
		if !r.failures.Has(i) && of(r.batch[i].Action.Kind) {
			out = append(out, i)
		}
	}
	return out
}

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
			r.failures.Add(i, fmt.Errorf("not a delivery of NATS: %w", broker.ErrUnsupported))
		case e.sub != s:
			r.failures.Add(i, fmt.Errorf("a delivery of another subscription: %w", broker.ErrLost))
		case e.state != unsettled:
			r.failures.Add(i, errSettledBefore)
		case s.lost != nil:
			r.failures.Add(i, s.lost)
		case now.Sub(e.renewed) >= s.ackWait:
			// Another consumer may have it. The server would take our acknowledgement all the same.
			s.forget(e)
			r.failures.Add(i, errSettledBefore)
		default:
			if err := s.check(r.batch[i].Action); err != nil {
				r.failures.Add(i, err)
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
func (s *subscription) check(a settle.Action) error {
	if a.Kind == settle.WaitInPlace && s.inPlace {
		return nil
	}
	return broker.CheckAction(&s.plan.topology, s.role, a)
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
	r.failures.Add(i, err)
}

// unlink takes deliveries out of the unsettled ones. Where the connection is lost they are not ours to settle any more.
func (r *round) unlink(index []int) {
	s := r.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	lost := s.lost
	if s.closed && !s.conn.isDone() {
		lost = nil // closed while this call is at work: what it claimed is still its own
	}
	for _, i := range index {
		if lost != nil {
			r.failures.Add(i, lost)
			continue
		}
		s.forget(entryOf(r.batch[i].Delivery))
	}
}

// handBack makes the server redeliver, now or after a delay. Either is counted as a delivery.
func (r *round) handBack() {
	s := r.sub
	index := r.all(isReturn)
	r.unlink(index)
	now := time.Now()
	for _, i := range index {
		st := &r.batch[i]
		if r.failures.Has(i) {
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
			r.failures.Add(i, s.gone(err))
		}
	}
}

// nakAfter asks for a redelivery after a delay, which the server counts from when it reads this.
func nakAfter(d time.Duration) []byte {
	out := append(make([]byte, 0, 48), `-NAK {"delay":`...)
	return append(strconv.AppendInt(out, int64(d), 10), '}')
}

// acknowledge acknowledges deliveries, without waiting for an answer.
func (r *round) acknowledge(index []int) {
	s := r.sub
	r.unlink(index)
	for _, i := range index {
		if r.failures.Has(i) {
			continue
		}
		if err := s.conn.Publish(entryOf(r.batch[i].Delivery).msg.Reply, ack); err != nil {
			r.failures.Add(i, s.gone(err))
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

// send starts publishing the copies.
func (r *round) send() []wave {
	s := r.sub
	now := time.Now()
	out := make([]outgoing, 0, r.copies)
	index := make([]int, 0, r.copies)
	for i := range r.batch {
		if r.failures.Has(i) || !r.batch[i].Action.Kind.Copies() {
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
		index = append(index, i)
	}
	waves := make([]wave, 0, len(out)/waveSize+1)
	for len(out) > 0 {
		n := waveSize
		if len(out) < 2*waveSize { // no small one at the end
			n = len(out)
		}
		waves = append(waves, wave{s.conn.flights.send(out[:n:n]), index[:n:n]})
		out, index = out[n:], index[n:]
	}
	return waves
}

// await waits for the copies' confirms. What is not known to be stored stays unsettled.
func (r *round) await(ctx context.Context, w wave) {
	for j, err := range w.flight.wait(ctx) {
		if err != nil {
			r.release(w.index[j], fmt.Errorf("copy to subject %q: %w", w.flight.messages[j].subject, err))
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
	dead := r.all(func(k settle.Kind) bool { return k == settle.DeadLetter })
	r.unlink(dead)
	acks := make([]outgoing, 0, len(dead))
	index := make([]int, 0, len(dead))
	for _, i := range dead {
		if !r.failures.Has(i) {
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
			r.failures.Add(index[j], fmt.Errorf("%w: acknowledge the original of a dead letter: %w", broker.ErrLost, err))
		}
	}
}
