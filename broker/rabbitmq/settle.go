package rabbitmq

import (
	"context"
	"fmt"
	"math"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/settle"
)

// errSettledBefore is what a delivery gets that is settled twice, or by two calls at once.
var errSettledBefore = fmt.Errorf("settled already, or being settled by another call: %w", broker.ErrLost)

// Settle carries out actions. Copies are sent first, so that the time until they are confirmed is used to acknowledge
// what needs no copy; their originals are acknowledged once they are confirmed and routed (A9).
func (s *subscription) Settle(ctx context.Context, batch []broker.Settlement) error {
	if len(batch) == 0 {
		return nil
	}
	r := round{sub: s, batch: batch}
	r.claim()
	var f *flight
	if r.copies > 0 {
		f = r.send(ctx)
	}
	if r.returns > 0 {
		r.handBack()
	}
	if r.plain > 0 {
		r.acknowledge(isPlain)
	}
	if f != nil {
		r.await(f)
		r.acknowledge(settle.Kind.Copies)
	}
	return r.failures.Err()
}

func isPlain(k settle.Kind) bool  { return k == settle.Done || k == settle.Drop }
func isReturn(k settle.Kind) bool { return k == settle.Requeue || k == settle.GiveBack }
func entryOf(d *broker.Delivery) *entry {
	if d == nil {
		return nil
	}
	e, _ := d.Native.(*entry)
	return e
}

// round is one call of Settle.
type round struct {
	sub                    *subscription
	batch                  []broker.Settlement
	failures               broker.SettleFailures
	plain, returns, copies int
	index                  []int // of the flight's messages in batch
}

// claim takes every delivery that can be settled, so that no other call does.
func (r *round) claim() {
	s := r.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range r.batch {
		e, kind := entryOf(r.batch[i].Delivery), r.batch[i].Action.Kind
		switch {
		case e == nil:
			r.failures.Add(i, fmt.Errorf("not a delivery of RabbitMQ: %w", broker.ErrUnsupported))
		case e.sub != s:
			r.failures.Add(i, fmt.Errorf("a delivery of another subscription: %w", broker.ErrLost))
		case e.state != unsettled:
			r.failures.Add(i, errSettledBefore)
		case s.lost != nil:
			r.failures.Add(i, s.lost)
		default:
			if err := broker.CheckAction(&s.topology, s.role, r.batch[i].Action); err != nil {
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

// release gives a delivery back to the caller, to be settled another time.
func (r *round) release(i int, err error) {
	s := r.sub
	s.mu.Lock()
	entryOf(r.batch[i].Delivery).state = unsettled
	s.mu.Unlock()
	r.failures.Add(i, err)
}

// handBack requeues with nack, which from 4.3 on is not counted.
func (r *round) handBack() {
	s := r.sub
	s.ackMu.Lock()
	defer s.ackMu.Unlock()
	for i := range r.batch {
		if r.failures.Has(i) || !isReturn(r.batch[i].Action.Kind) {
			continue
		}
		e := entryOf(r.batch[i].Delivery)
		s.mu.Lock()
		s.list.remove(e)
		e.state = settled
		s.mu.Unlock()
		if err := s.ch.Nack(e.raw.DeliveryTag, false, true); err != nil {
			r.failures.Add(i, s.gone(err))
		}
	}
}

// acknowledge acknowledges the deliveries of some kinds. All below the lowest unsettled one go in one frame; those
// above it, which a slower message separates from the rest, one by one, so that it does not hold them back (A11).
func (r *round) acknowledge(of func(settle.Kind) bool) {
	s := r.sub
	s.ackMu.Lock()
	defer s.ackMu.Unlock()
	lowest := r.unlink(of)
	var upTo uint64
	n := 0
	for i := range r.batch {
		if !r.failures.Has(i) && of(r.batch[i].Action.Kind) {
			if tag := entryOf(r.batch[i].Delivery).raw.DeliveryTag; tag < lowest {
				upTo = max(upTo, tag)
				n++
			}
		}
	}
	var err error
	if n > 0 {
		err = s.ch.Ack(upTo, n > 1)
	}
	for i := range r.batch {
		if r.failures.Has(i) || !of(r.batch[i].Action.Kind) {
			continue
		}
		if tag := entryOf(r.batch[i].Delivery).raw.DeliveryTag; tag > lowest && err == nil {
			err = s.ch.Ack(tag, false)
		}
		if err != nil {
			r.failures.Add(i, s.gone(err))
		}
	}
}

// unlink takes the deliveries out of the unsettled ones and returns the lowest tag that remains.
func (r *round) unlink(of func(settle.Kind) bool) uint64 {
	s := r.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range r.batch {
		if !r.failures.Has(i) && of(r.batch[i].Action.Kind) {
			e := entryOf(r.batch[i].Delivery)
			s.list.remove(e)
			e.state = settled
		}
	}
	if s.list.head == nil {
		return math.MaxUint64
	}
	return s.list.head.raw.DeliveryTag
}

// gone is the error of a delivery whose channel is gone: the broker has it back.
func (s *subscription) gone(cause error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lost != nil {
		return s.lost
	}
	return fmt.Errorf("%w: %w", broker.ErrLost, scrubbed(cause))
}

// send starts publishing the copies. A nil flight means that none could be started.
func (r *round) send(ctx context.Context) *flight {
	s := r.sub
	c, err := s.copies.get(ctx)
	if err != nil {
		for i := range r.batch {
			if !r.failures.Has(i) && r.batch[i].Action.Kind.Copies() {
				r.release(i, fmt.Errorf("copy: %w", err))
			}
		}
		return nil
	}
	out := make([]outgoing, 0, r.copies)
	r.index = make([]int, 0, r.copies)
	for i := range r.batch {
		if r.failures.Has(i) || !r.batch[i].Action.Kind.Copies() {
			continue
		}
		m := copyOf(entryOf(r.batch[i].Delivery), &r.batch[i], target(&s.topology, r.batch[i].Action))
		if err := fits(&m.msg, c.conn.frameMax); err != nil {
			r.release(i, fmt.Errorf("copy to queue %q: %w", m.key, err))
			continue
		}
		out = append(out, m)
		r.index = append(r.index, i)
	}
	if len(out) == 0 {
		return nil
	}
	return c.send(ctx, out)
}

// await waits for the copies' confirms. What is not known to be stored stays unsettled.
func (r *round) await(f *flight) {
	for j, err := range f.wait() {
		if err != nil {
			r.release(r.index[j], fmt.Errorf("copy to queue %q: %w", f.messages[j].key, err))
		}
	}
}
