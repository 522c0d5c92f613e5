package brokertest

import (
	"fmt"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

func strategyRules() []rule {
	return []rule{{id: "J1", test: republish}, {id: "J2", test: inPlace}, {id: "J3", test: externalIsNotWritten}, {id: "J4", test: externalIsVerified}}
}

// republish is the default: the copy waits in the hold queue, and the original is gone meanwhile.
func republish(w *world) {
	r := w.rig()
	last := len(w.b.Tiers) - 1
	c := r.consume(inTurn(runtime.Retry))
	r.put(withCount("m", int64(last)))
	r.holds(r.hold(last), 1, 0)
	r.holds(r.main(), 0, 0)
	calls := c.called(2)
	c.clean()
	r.empty()
	r.wasHeld(calls[0], calls[1], last)
}

// inPlace: no copy is written; the same message comes back after its tier's delay, with the counts advanced.
func inPlace(w *world) {
	r := w.rig()
	c := r.consume(inTurn(runtime.Retry, runtime.Retry, runtime.Defer, runtime.Retry), with(runtime.InPlace(), runtime.MaxRetries(2)))
	r.publish("m")
	c.called(1)
	for len(c.all()) < 4 {
		for i := range w.b.Tiers {
			if ready, inFlight := r.count(r.hold(i)); ready+inFlight > 0 {
				w.t.Fatalf("hold queue %d got a copy", i)
			}
		}
		r.holdsInAll(r.main(), 1)
		time.Sleep(10 * time.Millisecond)
	}
	dead := r.deadLetters(1)[0] // also in place a message that dies is dead-lettered
	r.empty()
	c.clean()
	calls := c.all()
	w.counts(calls, 0, 1, 2, 2)
	for i, tier := range []int{0, 1, 0} {
		if waited := calls[i+1].Began.Sub(calls[i].Ended); waited < w.tier(tier) {
			w.t.Errorf("call %d came after %s of %s", i+1, waited, w.tier(tier))
		}
		if calls[i+1].ID != calls[0].ID {
			w.t.Errorf("call %d got the id %q, the first one %q", i+1, calls[i+1].ID, calls[0].ID)
		}
	}
	if calls[3].Defers != 1 {
		w.t.Errorf("defer count %d after one deferral", calls[3].Defers)
	}
	if dead.text(header.DeathReason) != string(settle.MaxRetriesExceeded) {
		w.t.Errorf("died of %q", dead.text(header.DeathReason))
	}
}

// holdsInAll checks that a queue has n messages, ready or not, or that the message has just died.
func (r *rig) holdsInAll(q topology.Queue, n int) {
	r.t.Helper()
	r.eventually("the message is in its queue", func() error {
		ready, inFlight := r.count(q)
		if ready+inFlight == n || r.isDead() {
			return nil
		}
		return fmt.Errorf("%d ready, %d in flight", ready, inFlight)
	})
}

// externalRig is a topology whose queue somebody else made.
func (w *world) externalRig() *rig {
	w.t.Helper()
	theirs := w.rig(noHolds, noDeadLetter)
	spec := topology.Spec{Queue: theirs.decl.Topology.Queue, Holds: w.b.Tiers, DeadLetter: true, External: true}
	r := &rig{world: w, decl: w.derive(spec)}
	r.declare(r.decl)
	return r
}

// externalIsNotWritten: on an external topology nothing is ever written but to our own dead-letter queue.
func externalIsNotWritten(w *world) {
	r := w.externalRig()
	c := r.consume(inTurn(runtime.Retry, runtime.Defer, runtime.Reject), with(runtime.Concurrency(1)))
	r.publish("m")
	dead := r.deadLetters(1)[0]
	r.empty()
	c.clean()
	calls := c.all()
	w.counts(calls, 0, 1, 1)
	for i, tier := range []int{0, 0} {
		if waited := calls[i+1].Began.Sub(calls[i].Ended); waited < w.tier(tier) {
			w.t.Errorf("call %d came after %s of %s", i+1, waited, w.tier(tier))
		}
		if !calls[i+1].due().IsZero() {
			w.t.Errorf("call %d got a copy", i+1)
		}
	}
	if dead.text(header.DeathReason) != string(settle.Rejected) {
		w.t.Errorf("died of %q", dead.text(header.DeathReason))
	}
	r.noHoldQueues()

	strategy := "Republish"
	_, _, err := r.newConsumer(always(runtime.Ack), func(o *options) { o.group.RetryStrategy = &strategy })
	if err == nil {
		w.t.Error("an external topology with the strategy Republish was accepted")
	}
}

// noHoldQueues checks that no hold queue of the rig exists.
func (r *rig) noHoldQueues() {
	r.t.Helper()
	var held []string
	for _, h := range r.decl.Topology.Holds {
		held = append(held, r.decl.Topology.Physical(r.inst.Driver.Kind, h.Queue))
	}
	depths, err := r.admin.Depths(r.ctx(), held)
	if err != nil {
		r.t.Fatalf("depths: %v", err)
	}
	for _, d := range depths {
		if !d.Missing {
			r.t.Errorf("%q exists although the topology is external", d.Queue)
		}
	}
}

func externalIsVerified(w *world) {
	spec := w.spec(external)
	d := w.derive(spec)
	w.owned(d)
	err := w.admin.Declare(w.ctx(), d)
	w.want(err, broker.ErrNotFound, "declare an external topology whose queue is missing")
	r := w.externalRig()
	depths, err := w.admin.Depths(w.ctx(), []string{
		d.Topology.Physical(w.inst.Driver.Kind, d.Topology.Source),
		r.decl.Topology.Physical(w.inst.Driver.Kind, r.decl.Topology.DeadLetter),
	})
	if err != nil {
		w.t.Fatalf("depths: %v", err)
	}
	if !depths[0].Missing {
		w.t.Error("declaring an external topology made its queue")
	}
	if depths[1].Missing {
		w.t.Error("our own dead-letter queue was not made")
	}
	r.noHoldQueues()
	obs, err := w.admin.Observe(w.ctx(), []broker.Declaration{r.decl})
	if err != nil {
		w.t.Fatalf("observe: %v", err)
	}
	if !obs[0].UpToDate() {
		w.t.Errorf("an external topology that was just verified: %s", asJSON(obs[0]))
	}
	c := r.consume(always(runtime.Ack))
	r.publish("m")
	c.called(1)
	c.clean()
	r.empty()
}
