package brokertest

import (
	"context"
	"log/slog"
	"time"

	"github.com/shove-dev/shove/runtime"
)

func deferRules() []rule {
	return []rule{{id: "D1", test: plainAndUntil}, {id: "D2", test: deferWithoutHold}, {id: "D3", test: retryDeferRetry}}
}

func plainAndUntil(w *world) {
	r := w.rig()
	c := r.consume(inTurn(runtime.Defer, runtime.Defer, runtime.Defer), with(runtime.MaxRetries(1)))
	r.publish("plain")
	calls := c.called(4)
	c.clean()
	r.empty()
	r.holds(r.dead(), 0, 0)
	for i, call := range calls {
		if call.Retries != 0 || call.Defers != uint32(i) {
			w.t.Errorf("call %d saw retry count %d and defer count %d", i, call.Retries, call.Defers)
		}
		if i > 0 {
			r.wasHeld(calls[i-1], call, 0)
		}
	}

	// With a not-before time: the longest tier that fits first, and no call before that time.
	wait := w.tier(1) + 3*w.tier(0)
	var until time.Time
	c = r.consume(func(_ context.Context, call call) runtime.Outcome {
		if call.Defers == 0 {
			until = time.Now().Add(wait)
			return runtime.Defer.Until(until)
		}
		return runtime.Ack
	})
	r.publish("until")
	if w.b.Virtual { // elsewhere the first hop may be over before it is looked at
		r.holds(r.hold(1), 1, 0)
	}
	calls = c.called(2)
	c.clean()
	r.empty()
	if len(calls) != 2 {
		w.t.Errorf("%d calls, want 2: the handler is not called before its time", len(calls))
	}
	after := calls[1]
	if early := until.Truncate(time.Millisecond).Sub(after.Began); early > 0 {
		w.t.Errorf("called %s before the not-before time", early)
	}
	if after.Defers != 1 || after.Retries != 0 {
		w.t.Errorf("defer count %d and retry count %d after one deferral", after.Defers, after.Retries)
	}
}

func deferWithoutHold(w *world) {
	r := w.rig(noHolds)
	c := r.consume(inTurn(runtime.Defer, runtime.Defer))
	r.publish("m")
	calls := c.called(3)
	c.clean()
	r.empty()
	for i, call := range calls {
		if call.Retries != 0 || call.Defers != uint32(i) {
			w.t.Errorf("call %d saw retry count %d and defer count %d", i, call.Retries, call.Defers)
		}
		if i > 0 && call.Began.Sub(calls[i-1].Ended) < time.Second {
			w.t.Errorf("call %d came after %s: a deferral without a hold queue waits one second", i, call.Began.Sub(calls[i-1].Ended))
		}
	}
	if len(w.log.find(slog.LevelWarn, "deferred without a hold queue")) == 0 {
		w.t.Error("no warning about deferring without a hold queue")
	}
}

func retryDeferRetry(w *world) {
	r := w.rig()
	c := r.consume(inTurn(runtime.Retry, runtime.Defer, runtime.Retry))
	r.publish("m")
	calls := c.called(4)
	c.clean()
	r.empty()
	w.counts(calls, 0, 1, 1, 2)
	for i, tier := range []int{0, 0, 1} {
		r.wasHeld(calls[i], calls[i+1], tier)
	}
}
