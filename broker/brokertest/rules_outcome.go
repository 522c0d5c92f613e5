package brokertest

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/settle"
)

func outcomeRules() []rule {
	return []rule{
		{id: "A2", test: ackRemoves}, {id: "A3", test: rejectDeadLetters}, {id: "A4", test: retryClimbsTheTiers}, {id: "A5", test: budgetEnds},
		{id: "A6", test: deferKeepsTheCount}, {id: "A9", test: copyBeforeAck}, {id: "A10", test: failedCopyComesBack},
	}
}

func ackRemoves(w *world) {
	r := w.rig()
	c := r.consume(always(runtime.Ack))
	bodies := make([]string, 50)
	for i := range bodies {
		bodies[i] = strconv.Itoa(i)
	}
	r.publish(bodies...)
	c.called(len(bodies))
	r.empty()
	c.clean()
	r.holds(r.dead(), 0, 0)
	if n := len(c.all()); n != len(bodies) {
		w.t.Errorf("%d calls for %d messages", n, len(bodies))
	}
}

func rejectDeadLetters(w *world) {
	r := w.rig()
	c := r.consume(always(runtime.Reject.Because("no such customer")))
	ids := r.publish("fresh")
	r.put(withCount("late", 7))
	dead := r.deadLetters(2)
	c.clean()
	r.empty()
	for _, m := range dead {
		if m.text(header.DeathReason) != string(settle.Rejected) || m.text(header.DeathDetail) != "no such customer" {
			w.t.Errorf("%q died of %q, %q", m.Body, m.text(header.DeathReason), m.text(header.DeathDetail))
		}
		if string(m.Body) == "fresh" && m.text(header.MessageID) != ids[0] {
			w.t.Errorf("the message id %q became %q", ids[0], m.text(header.MessageID))
		}
	}
	if n := len(c.all()); n != 2 {
		w.t.Errorf("%d calls, want one for each message", n)
	}
}

// wasHeld checks that a call came after a wait in the i-th hold queue: not early, and with a copy that was due after
// that tier's delay.
func (r *rig) wasHeld(before, after call, i int) {
	r.t.Helper()
	delay := r.tier(i)
	if waited := after.Began.Sub(before.Ended); waited < delay {
		r.t.Errorf("call %d came after %s, before the %s of tier %d were over", after.Retries, waited, delay, i)
	}
	due := after.due()
	if due.IsZero() {
		r.t.Errorf("call %d: the copy carries no %s", after.Retries, header.Due)
		return
	}
	// The copy is due its tier's delay after it was decided; the tier is the longest that fits into that time.
	tier := -1
	for t, d := range r.b.Tiers {
		if due.Sub(before.Began.Truncate(time.Millisecond)) >= d {
			tier = t
		}
	}
	if tier != i {
		r.t.Errorf("call %d: due %s after the call before, which is tier %d; want tier %d", after.Retries, due.Sub(before.Began), tier, i)
	}
}

// counts checks the retry counts of calls.
func (w *world) counts(calls []call, want ...uint32) {
	w.t.Helper()
	got := make([]uint32, len(calls))
	for i, c := range calls {
		got[i] = c.Retries
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		w.t.Fatalf("retry counts %v, want %v", got, want)
	}
}

func retryClimbsTheTiers(w *world) {
	r := w.rig()
	c := r.consume(inTurn(runtime.Retry, runtime.Retry, runtime.Retry, runtime.Retry))
	ids := r.publish("m")
	calls := c.called(5)
	c.clean()
	r.empty()
	w.counts(calls, 0, 1, 2, 3, 4)
	for i, tier := range []int{0, 1, 2, 2} {
		r.wasHeld(calls[i], calls[i+1], tier)
	}
	for _, call := range calls {
		if call.ID != ids[0] || call.Body != "m" {
			w.t.Errorf("call %d got body %q with id %q", call.Retries, call.Body, call.ID)
		}
	}
	r.holds(r.dead(), 0, 0)
}

func budgetEnds(w *world) {
	r := w.rig()
	c := r.consume(always(runtime.Retry.Because("still down")), with(runtime.MaxRetries(1)))
	r.publish("m")
	dead := r.deadLetters(1)[0]
	r.empty() // nothing is left that could come back
	c.clean()
	w.counts(c.all(), 0, 1)
	if dead.text(header.DeathReason) != string(settle.MaxRetriesExceeded) || dead.text(header.DeathDetail) != "still down" {
		w.t.Errorf("died of %q, %q", dead.text(header.DeathReason), dead.text(header.DeathDetail))
	}
}

func deferKeepsTheCount(w *world) {
	r := w.rig()
	c := r.consume(inTurn(runtime.Defer), with(runtime.MaxRetries(3)))
	r.put(withCount("below", 2), withCount("at", 3), withCount("over", 9))
	c.called(6)
	c.clean()
	r.empty()
	r.holds(r.dead(), 0, 0)
	for body, count := range map[string]uint32{"below": 2, "at": 3, "over": 9} {
		calls := c.of(body)
		w.counts(calls, count, count)
		r.wasHeld(calls[0], calls[1], 0)
	}
}

// copyBeforeAck: while the copy is not confirmed, the original is not acknowledged, so that a crash in between makes
// two of it and not none. Where both are one step there is nothing in between, and never two.
func copyBeforeAck(w *world) {
	if w.inst.Faults.HoldConfirms == nil || w.inst.Faults.Cut == nil {
		w.t.Fatal("proving that the copy is confirmed before the original is acknowledged takes Faults.HoldConfirms and Faults.Cut")
	}
	r := w.rig()
	for _, tc := range []struct {
		body    string
		outcome runtime.Outcome
	}{{"retried", runtime.Retry}, {"rejected", runtime.Reject}} {
		begin := make(chan struct{})
		c := r.consume(func(ctx context.Context, call call) runtime.Outcome {
			select {
			case <-begin:
			case <-ctx.Done():
			}
			return tc.outcome
		})
		id := r.publish(tc.body)[0]
		c.called(1)
		release := w.inst.Faults.HoldConfirms(w.t)
		close(begin)
		target := r.hold(0)
		if tc.outcome == runtime.Reject {
			target = r.dead()
		}
		atOnce := w.caps.CopiesAtomically
		r.eventually("the copy is stored, and the original gone where that is one step", func() error {
			copies, _ := r.count(target)
			back, inFlight := r.count(r.main())
			if copies+back != 1 || atOnce && inFlight != 0 { // a consumer that moves held messages may have done so
				return fmt.Errorf("%d copies, %d ready, %d in flight", copies, back, inFlight)
			}
			return nil
		})
		w.inst.Faults.Cut(w.t)
		release()
		if tc.outcome == runtime.Reject {
			// The original comes back and dies again, unless it was acknowledged with the copy.
			dead := 2
			if !atOnce {
				c.called(2)
			}
			if atOnce || w.caps.DedupesCopies {
				dead = 1
			}
			for _, m := range r.deadLetters(dead) {
				if m.text(header.MessageID) != id {
					w.t.Errorf("a dead letter has the id %q, the message had %q", m.text(header.MessageID), id)
				}
			}
			c.clean()
			continue
		}
		// The copy and the original both arrive, with their own counts and one id; or the copy alone.
		r.eventually("the original with count 0 and the copy with count 1", func() error {
			seen := map[uint32]int{}
			for _, call := range c.all() {
				if call.ID != id {
					w.t.Fatalf("a call got the id %q, the message had %q", call.ID, id)
				}
				seen[call.Retries]++
			}
			if atOnce && seen[0] > 1 {
				w.t.Fatalf("calls per count: %v, although the copy and the acknowledgement are one step", seen)
			}
			if seen[0] < 2 && !atOnce || seen[1] < 1 {
				return fmt.Errorf("calls per count: %v", seen)
			}
			return nil
		})
		c.clean()
		r.purge()
	}
}

// purge removes what a part of a test left. It looks more than once: a message that is just being moved from a hold
// queue to the main one is in neither.
func (r *rig) purge() {
	r.t.Helper()
	const passes = 5
	empty := 0
	r.eventually("nothing is left of a part of the test", func() error {
		empty++
		for _, q := range r.decl.Topology.Queues() {
			if n := len(r.inst.Raw.Take(r.t, r.decl, q)); n > 0 {
				empty = 0
			}
		}
		if empty < passes {
			return errors.New("looking again")
		}
		return nil
	})
}

// breakCopies makes copies to the hold queues fail.
func (r *rig) breakCopies() (mend func()) {
	r.t.Helper()
	if f := r.inst.Faults.BreakCopies; f != nil {
		return f(r.t, r.decl)
	}
	var names []string
	for _, h := range r.decl.Topology.Holds {
		names = append(names, r.decl.Topology.Physical(r.inst.Driver.Kind, h.Queue))
	}
	if _, err := r.admin.Delete(r.ctx(), names); err != nil {
		r.t.Fatalf("delete the hold queues: %v", err)
	}
	return func() { r.declare(r.decl) }
}

func failedCopyComesBack(w *world) {
	r := w.rig()
	mend := r.breakCopies()
	c := r.consume(func(_ context.Context, call call) runtime.Outcome {
		if call.Retries == 0 {
			return runtime.Retry
		}
		return runtime.Ack
	})
	r.publish("m")
	c.called(2)
	began := time.Now()
	w.consistently("a message whose copy cannot be written", 2*time.Second, func() error {
		ready, inFlight := r.count(r.main())
		if ready+inFlight != 1 {
			return fmt.Errorf("%d ready and %d in flight, want the one message", ready, inFlight)
		}
		return nil
	})
	calls := c.all()
	for _, call := range calls {
		if call.Retries != 0 {
			w.t.Errorf("a call with count %d although no copy was written", call.Retries)
		}
	}
	if n := len(calls); n > 12 {
		w.t.Errorf("%d calls within %s: it spins instead of backing off", n, time.Since(began))
	}
	mend()
	r.eventually("the retry after copies can be written again", func() error {
		calls := c.all()
		if last := calls[len(calls)-1]; last.Retries != 1 {
			return fmt.Errorf("the last of %d calls has count %d", len(calls), last.Retries)
		}
		return nil
	})
	c.clean()
	r.empty()
	r.holds(r.dead(), 0, 0)
}
