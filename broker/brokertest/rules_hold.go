package brokertest

import (
	"context"
	"strconv"
	"time"

	"github.com/shove-dev/shove/runtime"
)

func holdRules() []rule {
	return []rule{{id: "B4", test: neverEarly}, {id: "B5", test: heldInTheBroker}}
}

// neverEarly holds many messages in each tier and compares every return with its own delay. How late they may be is
// measured by the benchmarks.
func neverEarly(w *world) {
	r := w.rig()
	const each = 40
	c := r.consume(func(_ context.Context, c call) runtime.Outcome {
		if c.due().IsZero() {
			return runtime.Retry
		}
		return runtime.Ack
	}, with(runtime.Concurrency(20)))
	for tier := range w.b.Tiers {
		for i := range each {
			r.put(withCount(strconv.Itoa(tier)+"/"+strconv.Itoa(i), int64(tier)))
		}
	}
	c.called(2 * each * len(w.b.Tiers))
	c.clean()
	r.empty()
	for tier := range w.b.Tiers {
		for i := range each {
			calls := c.of(strconv.Itoa(tier) + "/" + strconv.Itoa(i))
			if len(calls) != 2 {
				w.t.Fatalf("%d calls for a message of tier %d", len(calls), tier)
			}
			r.wasHeld(calls[0], calls[1], tier)
		}
	}
}

// heldInTheBroker ends every consumer while messages are held.
func heldInTheBroker(w *world) {
	if !w.caps.HeldInBroker {
		w.exempt("held messages live in the consumer's memory on this broker (HeldInBroker)")
		return
	}
	r := w.rig()
	held := len(w.b.Tiers) - 1
	const n = 20
	c := r.consume(always(runtime.Retry))
	for i := range n {
		r.put(withCount(strconv.Itoa(i), int64(held)))
	}
	before := c.called(n)
	r.holds(r.main(), 0, 0)
	if w.inst.Faults.Cut != nil {
		w.inst.Faults.Cut(w.t) // without a goodbye
	}
	_ = c.stop() // what it says does not matter: its process is gone
	ended := map[string]time.Time{}
	for _, call := range before {
		ended[call.Body] = call.Ended
	}
	second := r.consume(always(runtime.Ack))
	after := second.called(n)
	second.clean()
	r.empty()
	seen := map[string]bool{}
	for _, call := range after {
		seen[call.Body] = true
		if call.Retries != uint32(held)+1 {
			w.t.Errorf("message %s came with count %d", call.Body, call.Retries)
		}
		if waited := call.Began.Sub(ended[call.Body]); waited < w.tier(held) {
			w.t.Errorf("message %s came after %s of %s", call.Body, waited, w.tier(held))
		}
	}
	if len(seen) != n || len(after) != n {
		w.t.Errorf("%d calls for %d of %d messages", len(after), len(seen), n)
	}
	if ready, _ := r.count(r.dead()); ready != 0 {
		w.t.Errorf("%d dead letters", ready)
	}
}
