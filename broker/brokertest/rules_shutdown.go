package brokertest

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/shove-dev/shove/runtime"
)

func shutdownRules() []rule {
	return []rule{{id: "N1", test: drains}, {id: "N3", test: nothingIsLeftBehind}}
}

// drains: running handlers finish, what was not begun goes back uncounted, nothing new is fetched.
func drains(w *world) {
	r := w.rig()
	const running, total = 3, 20
	finish := make(chan struct{})
	c := r.consume(func(ctx context.Context, _ call) runtime.Outcome {
		select {
		case <-finish:
		case <-ctx.Done():
			return runtime.Reject
		}
		return runtime.Ack
	}, with(runtime.Concurrency(running), runtime.Prefetch(10)))
	r.publish(numbered(total)...)
	c.called(running)
	c.cancel()
	r.holds(r.main(), total-running, running) // unstarted ones are back before the running ones end
	close(finish)
	c.clean()
	if n := len(c.all()); n != running {
		w.t.Errorf("%d handlers were called, want the %d that ran", n, running)
	}
	r.holds(r.main(), total-running, 0)
	r.holds(r.dead(), 0, 0)

	rest := r.consume(always(runtime.Ack))
	calls := rest.called(total - running)
	rest.clean()
	r.empty()
	for _, call := range calls {
		if call.Retries != 0 {
			w.t.Errorf("message %s came back with count %d", call.Body, call.Retries)
		}
		if w.caps.GivesBackUncounted && call.DeliveryCount != w.deliveries(1) {
			w.t.Errorf("message %s came back with delivery count %d", call.Body, call.DeliveryCount)
		}
	}
	if len(calls) != total-running {
		w.t.Errorf("%d calls for %d messages", len(calls), total-running)
	}
}

// nothingIsLeftBehind drains in full work (dapr/dapr#9604): no message is dead that was not, and none is unsettled.
func nothingIsLeftBehind(w *world) {
	r := w.rig()
	const total = 200
	var acked atomic.Int64
	c := r.consume(func(context.Context, call) runtime.Outcome { acked.Add(1); return runtime.Ack },
		with(runtime.Concurrency(2), runtime.Prefetch(50)))
	r.publish(numbered(total)...)
	c.called(10)
	c.clean()
	r.eventually("every message is handled or back", func() error {
		ready, inFlight := r.count(r.main())
		if inFlight != 0 || ready+int(acked.Load()) != total {
			return fmt.Errorf("%d ready, %d in flight, %d handled of %d", ready, inFlight, acked.Load(), total)
		}
		return nil
	})
	r.holds(r.dead(), 0, 0)
}
