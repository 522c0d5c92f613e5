package memory

import (
	"context"
	"fmt"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/settle"
)

// Settle stores every copy, waits for their confirms, and only then acknowledges the originals (A9).
func (s *subscription) Settle(ctx context.Context, batch []broker.Settlement) error {
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	b := settling{s: s, batch: batch}
	for i := range batch {
		if batch[i].Action.Kind.Copies() {
			b.copies++
		}
	}
	if b.copies > 0 {
		s.reached(StepBeforeCopy)
		b.storeCopies()
		s.reached(StepCopied)
		b.await(ctx)
	}
	s.reached(StepBeforeAck)
	b.acknowledge()
	s.reached(StepAcked)
	s.signal()
	s.passOn()
	return b.failures.Err()
}

// settling is one call of Settle.
type settling struct {
	s        *subscription
	batch    []broker.Settlement
	copies   int
	failures broker.SettleFailures
}

func (b *settling) storeCopies() {
	now := time.Now()
	slab := make([]stored, b.copies)
	for i := range b.batch {
		st := &b.batch[i]
		if !st.Action.Kind.Copies() {
			continue
		}
		d, err := b.s.held(st.Delivery)
		if err == nil {
			m := &slab[0]
			slab = slab[1:]
			err = b.s.storeCopy(d, st, m, now)
		}
		if err != nil {
			b.failures.Add(i, err)
		}
	}
}

func (s *subscription) storeCopy(d *delivery, st *broker.Settlement, m *stored, now time.Time) error {
	name, err := s.target(st.Action)
	if err != nil {
		return err
	}
	if err := s.server.errDown(); err != nil {
		return err
	}
	if err := s.server.faults.copies.next(); err != nil {
		return fmt.Errorf("copy to queue %q: %w", name, err)
	}
	fillCopy(m, d.msg, st)
	q, err := s.server.admit(name, m)
	if err != nil {
		return err
	}
	s.server.add(q, m, now)
	if err := s.server.faults.copyConfirms.next(); err != nil {
		return fmt.Errorf("confirm of a copy in queue %q: %w", name, err)
	}
	d.settling = true
	return nil
}

// target is the queue that a copy goes to. Nothing is written to an external queue (J3), and a reader of dead letters
// writes none.
func (s *subscription) target(a settle.Action) (string, error) {
	t := s.cfg.Topology
	switch {
	case s.cfg.Role == broker.ReadDeadLetter:
	case a.Kind == settle.DeadLetter && t.DeadLetter != "":
		return t.DeadLetter, nil
	case t.External:
	case a.Kind == settle.Copy:
		return t.Queue, nil
	case a.Kind == settle.Hold && a.Tier >= 0 && a.Tier < len(t.Holds):
		return t.Holds[a.Tier].Queue, nil
	}
	return "", fmt.Errorf("action %s on queue %q: %w", a.Kind, s.queue.name, broker.ErrUnsupported)
}

// fillCopy makes the copy of a message for an action: its own headers as far as they may be kept, and the stamp.
func fillCopy(m, from *stored, st *broker.Settlement) {
	m.key, m.contentType, m.body = from.key, from.contentType, from.body
	if st.Envelope != nil {
		m.body, m.contentType = append([]byte(nil), st.Envelope...), "application/json"
		m.headers = make(header.Map, len(st.Stamp))
	} else {
		m.headers = make(header.Map, len(from.headers)+len(st.Stamp))
		for name, v := range from.headers {
			if header.Keep(name) {
				m.headers[name] = v
			}
		}
	}
	for _, f := range st.Stamp {
		m.headers[f.Name] = f.Value
	}
}

// await waits for the confirms, which come at once unless a fault holds them up. The mutex is released meanwhile.
func (b *settling) await(ctx context.Context) {
	err := b.s.client.awaitConfirm(ctx)
	if err == nil {
		return
	}
	for i := range b.batch {
		if d, ok := b.stored(i); ok {
			d.settling = false
			b.failures.Add(i, err)
		}
	}
}

// stored says whether the i-th delivery's copy is stored and waits for its confirm.
func (b *settling) stored(i int) (*delivery, bool) {
	if !b.batch[i].Action.Kind.Copies() {
		return nil, false
	}
	d, ok := b.batch[i].Delivery.Native.(*delivery)
	return d, ok && d.sub == b.s && d.settling
}

func (b *settling) acknowledge() {
	for i := range b.batch {
		a := &b.batch[i].Action
		if !a.Kind.Copies() {
			if err := b.s.finish(b.batch[i].Delivery, a); err != nil {
				b.failures.Add(i, err)
			}
			continue
		}
		if d, ok := b.stored(i); ok {
			b.s.ack(d)
		} else { // unless it failed before, it was lost since its copy was stored, or is twice in the batch
			b.failures.Add(i, errNotHeld)
		}
	}
}

// finish carries out an action that writes no copy.
func (s *subscription) finish(bd *broker.Delivery, a *settle.Action) error {
	d, err := s.held(bd)
	if err != nil {
		return err
	}
	switch a.Kind {
	case settle.Done, settle.Drop:
		s.ack(d)
	case settle.Requeue:
		s.giveBack(d, delivered)
	case settle.GiveBack:
		s.giveBack(d, uncounted)
	default:
		return fmt.Errorf("action %s on queue %q: %w", a.Kind, s.queue.name, broker.ErrUnsupported)
	}
	return nil
}

// ack removes the message. What it held is freed at once: its neighbours in the batch may live on for long.
func (s *subscription) ack(d *delivery) { *s.unlink(d) = stored{} }
