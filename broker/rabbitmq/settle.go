package rabbitmq

import (
	"context"
	"fmt"
	"math"
	"slices"

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
	if len(r.items) == 0 {
		return nil
	}
	slices.SortFunc(r.items, func(a, b broker.SettleItem) int { return a.Index - b.Index })
	return &broker.SettleError{Items: r.items}
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
	sub   *subscription
	batch []broker.Settlement
	items []broker.SettleItem
	// skip marks what is out already; nil while nothing is.
	skip                   []bool
	plain, returns, copies int
	index                  []int // of the flight's messages in batch
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
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range r.batch {
		e, kind := entryOf(r.batch[i].Delivery), r.batch[i].Action.Kind
		switch {
		case e == nil:
			r.fail(i, fmt.Errorf("not a delivery of RabbitMQ: %w", broker.ErrUnsupported))
		case e.sub != s:
			r.fail(i, fmt.Errorf("a delivery of another subscription: %w", broker.ErrLost))
		case e.state != unsettled:
			r.fail(i, errSettledBefore)
		case s.lost != nil:
			r.fail(i, s.lost)
		default:
			if err := r.check(r.batch[i].Action); err != nil {
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

// check refuses actions that no caller may ask of this backend.
func (r *round) check(a settle.Action) error {
	t := &r.sub.topology
	switch a.Kind {
	case settle.Done, settle.Drop, settle.Requeue, settle.GiveBack:
		return nil
	case settle.Hold:
		if t.External {
			return fmt.Errorf("hold a message of the external queue %q: %w", t.Queue, broker.ErrUnsupported)
		}
		if a.Tier < 0 || a.Tier >= len(t.Holds) {
			return fmt.Errorf("hold tier %d of %q: it has %d: %w", a.Tier, t.Queue, len(t.Holds), broker.ErrUnsupported)
		}
		return nil
	case settle.Copy:
		if t.External {
			return fmt.Errorf("copy a message to the external queue %q: %w", t.Queue, broker.ErrUnsupported)
		}
		return nil
	case settle.DeadLetter:
		if t.DeadLetter == "" {
			return fmt.Errorf("dead-letter a message of %q: it has no dead-letter queue: %w", t.Queue, broker.ErrUnsupported)
		}
		return nil
	default: // waiting in place is the caller's part: the lease of a delivery cannot be renewed
		return fmt.Errorf("action %s: %w", a.Kind, broker.ErrUnsupported)
	}
}

// release gives a delivery back to the caller, to be settled another time.
func (r *round) release(i int, err error) {
	s := r.sub
	s.mu.Lock()
	entryOf(r.batch[i].Delivery).state = unsettled
	s.mu.Unlock()
	r.fail(i, err)
}

// handBack requeues with nack, which from 4.3 on is not counted.
func (r *round) handBack() {
	s := r.sub
	s.ackMu.Lock()
	defer s.ackMu.Unlock()
	for i := range r.batch {
		if r.skipped(i) || !isReturn(r.batch[i].Action.Kind) {
			continue
		}
		e := entryOf(r.batch[i].Delivery)
		s.mu.Lock()
		s.list.remove(e)
		e.state = settled
		s.mu.Unlock()
		if err := s.ch.Nack(e.raw.DeliveryTag, false, true); err != nil {
			r.fail(i, s.gone(err))
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
		if !r.skipped(i) && of(r.batch[i].Action.Kind) {
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
		if r.skipped(i) || !of(r.batch[i].Action.Kind) {
			continue
		}
		if tag := entryOf(r.batch[i].Delivery).raw.DeliveryTag; tag > lowest && err == nil {
			err = s.ch.Ack(tag, false)
		}
		if err != nil {
			r.fail(i, s.gone(err))
		}
	}
}

// unlink takes the deliveries out of the unsettled ones and returns the lowest tag that remains.
func (r *round) unlink(of func(settle.Kind) bool) uint64 {
	s := r.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range r.batch {
		if !r.skipped(i) && of(r.batch[i].Action.Kind) {
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
			if !r.skipped(i) && r.batch[i].Action.Kind.Copies() {
				r.release(i, fmt.Errorf("copy: %w", err))
			}
		}
		return nil
	}
	out := make([]outgoing, 0, r.copies)
	r.index = make([]int, 0, r.copies)
	for i := range r.batch {
		if r.skipped(i) || !r.batch[i].Action.Kind.Copies() {
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
