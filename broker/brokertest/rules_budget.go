package brokertest

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/settle"
)

func budgetRules() []rule {
	return []rule{
		{id: "C1", test: alwaysRetry}, {id: "C2", test: lastCall}, {id: "C3", test: defaultAndZeroBudget}, {id: "C4", test: overTheBudget},
		{id: "C6", test: whatSpendsBudget}, {id: "C7", test: retryWithoutHold}, {id: "C10", test: crashLoop},
	}
}

// alwaysRetry runs the worked example: ten retries where waiting costs nothing, four elsewhere.
func alwaysRetry(w *world) {
	budget := 4
	if w.b.Virtual {
		budget = 10
	}
	r := w.rig()
	c := r.consume(always(runtime.Retry), with(runtime.MaxRetries(uint32(budget))))
	r.publish("m")
	dead := r.deadLetters(1)[0]
	r.empty()
	c.clean()
	calls := c.all()
	if len(calls) != budget+1 {
		w.t.Fatalf("%d calls, want %d", len(calls), budget+1)
	}
	for i, call := range calls {
		if call.Retries != uint32(i) {
			w.t.Errorf("call %d saw count %d", i, call.Retries)
		}
		if i > 0 {
			r.wasHeld(calls[i-1], call, min(i-1, len(w.b.Tiers)-1))
		}
	}
	if dead.text(header.DeathReason) != string(settle.MaxRetriesExceeded) || dead.text(header.RetryCount) != strconv.Itoa(budget) {
		w.t.Errorf("died of %q with count %q", dead.text(header.DeathReason), dead.text(header.RetryCount))
	}
}

// lastCall gives each outcome on the call that sees count == max.
func lastCall(w *world) {
	r := w.rig()
	c := r.consume(func(_ context.Context, call call) runtime.Outcome {
		switch {
		case call.Body == "reject":
			return runtime.Reject
		case call.Body == "defer" && call.Defers == 0:
			return runtime.Defer
		}
		return runtime.Ack
	}, with(runtime.MaxRetries(2)))
	r.put(withCount("ack", 2), withCount("reject", 2), withCount("defer", 2))
	c.called(4)
	dead := r.deadLetters(1)[0]
	r.empty()
	c.clean()
	if string(dead.Body) != "reject" || dead.text(header.DeathReason) != string(settle.Rejected) {
		w.t.Errorf("dead letter %q with reason %q", dead.Body, dead.text(header.DeathReason))
	}
	w.counts(c.of("ack"), 2)
	w.counts(c.of("reject"), 2)
	w.counts(c.of("defer"), 2, 2)
}

func defaultAndZeroBudget(w *world) {
	r := w.rig()
	c := r.consume(always(runtime.Retry))
	r.put(withCount("m", 9))
	dead := r.deadLetters(1)[0]
	r.empty()
	c.clean()
	w.counts(c.all(), 9, 10)
	if dead.text(header.RetryCount) != "10" {
		w.t.Errorf("died with count %q, want the default budget of 10", dead.text(header.RetryCount))
	}

	c = r.consume(always(runtime.Retry), with(runtime.MaxRetries(0)))
	r.publish("m")
	dead = r.deadLetters(1)[0]
	r.empty()
	c.clean()
	w.counts(c.all(), 0)
	if dead.text(header.DeathReason) != string(settle.MaxRetriesExceeded) {
		w.t.Errorf("died of %q", dead.text(header.DeathReason))
	}
}

func overTheBudget(w *world) {
	r := w.rig()
	c := r.consume(inTurn(runtime.Retry), with(runtime.MaxRetries(3)))
	r.put(withCount("m", 50))
	r.deadLetters(1)
	r.empty()
	c.clean()
	w.counts(c.all(), 50)
}

// whatSpendsBudget: a panic and a timeout do, a lost connection, a drain and an undecodable body do not.
func whatSpendsBudget(w *world) {
	r := w.rig()
	timeout := w.tier(1)
	c := r.consume(func(ctx context.Context, call call) runtime.Outcome {
		if call.Retries > 0 {
			return runtime.Ack
		}
		switch call.Body {
		case "panic":
			panic("boom")
		case "timeout":
			<-ctx.Done()
		}
		return runtime.Ack
	}, with(runtime.HandlerTimeout(timeout), runtime.HandlerTimeoutOutcome(runtime.Retry))) // some brokers leave it pending by default (H8)
	r.publish("panic", "timeout")
	c.called(4)
	c.clean()
	r.empty()
	w.counts(c.of("panic"), 0, 1)
	w.counts(c.of("timeout"), 0, 1)

	var let atomic.Bool
	wait := func(ctx context.Context, _ call) runtime.Outcome {
		if !let.Load() {
			<-ctx.Done()
			return runtime.Retry
		}
		return runtime.Ack
	}
	first := r.consume(wait, with(runtime.DrainTimeout(time.Millisecond)))
	r.publish("held by a drain")
	first.called(1)
	_ = first.stop() // gives up on the handler: the broker redelivers
	if cut := w.inst.Faults.Cut; cut != nil {
		second := r.consume(wait, with(runtime.DrainTimeout(time.Millisecond)))
		second.called(1)
		cut(w.t)
		second.called(2)
		_ = second.stop()
		w.counts(second.all(), 0, 0)
	}
	let.Store(true)
	last := r.consume(wait)
	last.called(1)
	last.clean()
	r.empty()
	w.counts(last.all(), 0)
}

func retryWithoutHold(w *world) {
	r := w.rig(noHolds)
	c := r.consume(always(runtime.Retry), with(runtime.MaxRetries(4)))
	r.publish("m")
	dead := r.deadLetters(1)[0]
	c.clean()
	r.empty()
	w.counts(c.all(), 0, 1, 2, 3, 4)
	if dead.text(header.DeathReason) != string(settle.MaxRetriesExceeded) {
		w.t.Errorf("died of %q", dead.text(header.DeathReason))
	}
	if len(w.log.find(slog.LevelWarn, "hold queue")) == 0 {
		w.t.Error("no warning about retrying without a hold queue")
	}
}

// crashLoop: one message ends its process every time, nine innocent ones are in the same process (rabbitmq-server
// PR#11937). The innocent ones are handled, the guilty one is dead-lettered at the limit.
func crashLoop(w *world) {
	if !w.caps.CountsDeliveries {
		w.exempt("this broker does not count deliveries (CountsDeliveries)")
		return
	}
	if w.inst.Faults.Cut == nil {
		w.t.Fatal("proving the crash limit takes Faults.Cut")
	}
	r := w.rig()
	const limit, innocents = 12, 9
	bodies := []string{"guilty"}
	for i := range innocents {
		bodies = append(bodies, strconv.Itoa(i))
	}
	r.publish(bodies...)
	done := map[string]int{}
	crashes := 0
	for !r.finished() {
		if crashes > limit+5 {
			w.t.Fatalf("%d crashes, and the message is still not dead", crashes)
		}
		crashed := make(chan struct{})
		var once atomic.Bool
		c := r.consume(func(ctx context.Context, call call) runtime.Outcome {
			if call.Body == "guilty" {
				if !once.Swap(true) {
					close(crashed)
				}
				<-ctx.Done()
			}
			return runtime.Ack
		}, with(runtime.Prefetch(10), runtime.Concurrency(1), runtime.CrashLimit(limit), runtime.DrainTimeout(time.Millisecond)))
		if r.crashed(c, crashed) {
			crashes++
			w.inst.Faults.Cut(w.t)
		}
		_ = c.stop()
		for _, call := range c.all() {
			if call.Body != "guilty" && !call.Ended.IsZero() {
				done[call.Body]++
			}
		}
	}
	dead := r.deadLetters(1)[0]
	r.empty()
	if len(done) != innocents {
		w.t.Errorf("%d of %d innocent messages were handled", len(done), innocents)
	}
	if string(dead.Body) != "guilty" || dead.text(header.DeathReason) != string(settle.CrashLoop) {
		w.t.Errorf("%q died of %q", dead.Body, dead.text(header.DeathReason))
	}
	if crashes > limit {
		w.t.Errorf("%d crashes with a limit of %d", crashes, limit)
	}
}

// finished says whether nothing is on its way any more and something died.
func (r *rig) finished() bool {
	ready, inFlight := r.count(r.main())
	return ready+inFlight == 0 && r.isDead()
}

func (r *rig) isDead() bool {
	ready, _ := r.count(r.dead())
	return ready > 0
}

// crashed waits until the guilty message runs, or until nothing is left to run.
func (r *rig) crashed(c *consumer, crashed <-chan struct{}) bool {
	r.t.Helper()
	is := false
	r.eventually("the message that ends its process runs, or is dead and the others are done", func() error {
		select {
		case <-crashed:
			is = true
			return nil
		default:
		}
		if !r.finished() {
			return fmt.Errorf("%d calls", len(c.all()))
		}
		return nil
	})
	return is
}
