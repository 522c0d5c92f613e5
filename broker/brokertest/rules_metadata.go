package brokertest

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/shove-dev/shove/runtime"
)

func metadataRules() []rule {
	return []rule{{id: "H4", test: handlerThatIgnoresItsContext}, {id: "H11", test: leaseOutlivesTheHandler}, {id: "I2", test: filledWhereKnown}, {id: "I3", test: deliveryCountRestarts}}
}

// handlerThatIgnoresItsContext: its outcome is applied on time, what it returns later is dropped, and it keeps its slot
// for at most one further deadline.
func handlerThatIgnoresItsContext(w *world) {
	r := w.rig()
	timeout := w.tier(1)
	stuck := make(chan struct{})
	c := r.consume(func(_ context.Context, call call) runtime.Outcome {
		if call.Body == "stuck" && call.Retries == 0 {
			<-stuck
			return runtime.Reject // too late: it must not become a dead letter
		}
		return runtime.Ack
	}, with(runtime.HandlerTimeout(timeout), runtime.HandlerTimeoutOutcome(runtime.Retry), runtime.Concurrency(1)))
	var once sync.Once
	free := func() { once.Do(func() { close(stuck) }) }
	w.defers(free)
	r.publish("stuck")
	began := c.called(1)[0].Began
	r.publish("next") // waits for the only slot
	r.eventually("both messages are handled while the stuck handler still runs", func() error {
		if a, b := len(c.of("stuck")), len(c.of("next")); a < 2 || b < 1 {
			return fmt.Errorf("%d and %d calls", a, b)
		}
		return nil
	})
	retried := c.of("stuck")[1]
	if waited := retried.Began.Sub(began); waited < timeout+w.tier(0) {
		w.t.Errorf("retried after %s: its deadline of %s and the hold of %s are not over", waited, timeout, w.tier(0))
	}
	r.empty()
	free()
	w.eventually("the late outcome is dropped", func() error {
		if len(w.log.find(slog.LevelInfo, "overruled")) == 0 {
			return fmt.Errorf("no line about it")
		}
		return nil
	})
	c.clean()
	r.holds(r.dead(), 0, 0)
	r.empty()
	w.counts(c.of("stuck"), 0, 1)
	w.counts(c.of("next"), 0)
}

// leaseOutlivesTheHandler: handlers that stay just within their deadline, with others waiting behind them for longer
// than one deadline (nats.go#1929): nothing is delivered twice.
func leaseOutlivesTheHandler(w *world) {
	r := w.rig()
	timeout := max(w.tier(1), time.Second)
	c := r.consume(func(context.Context, call) runtime.Outcome {
		time.Sleep(timeout * 4 / 5)
		return runtime.Ack
	}, with(runtime.HandlerTimeout(timeout), runtime.Concurrency(1), runtime.Prefetch(5)))
	bodies := []string{"0", "1", "2", "3", "4"}
	r.publish(bodies...)
	c.called(len(bodies))
	r.empty()
	c.clean()
	for _, body := range bodies {
		if calls := c.of(body); len(calls) != 1 || calls[0].Redelivered {
			w.t.Errorf("message %s was delivered %d times", body, len(calls))
		}
	}
}

func filledWhereKnown(w *world) {
	r := w.rig()
	c := r.consume(always(runtime.Ack))
	began := time.Now()
	r.publish("m")
	call := c.called(1)[0]
	c.clean()
	if n, known := call.Meta.DeliveryCount(); known != w.caps.CountsDeliveries || known && n != 1 {
		w.t.Errorf("delivery count %d, known: %v; the capability says %v, and the first delivery is 1", n, known, w.caps.CountsDeliveries)
	}
	if p, known := call.Meta.Partition(); known != w.caps.Partition {
		w.t.Errorf("partition %d, known: %v; the capability says %v", p, known, w.caps.Partition)
	}
	if o, known := call.Meta.Offset(); known != w.caps.Offset {
		w.t.Errorf("offset %d, known: %v; the capability says %v", o, known, w.caps.Offset)
	}
	// The test's publisher sets a timestamp, so that there is one on every broker.
	if at, known := call.Meta.Timestamp(); !known || at.Before(began.Add(-clockSlack).Truncate(time.Second)) || at.After(time.Now().Add(clockSlack)) {
		w.t.Errorf("timestamp %s, known: %v; published at %s", at, known, began)
	}
	if call.DeliveryID == "" || call.ID == "" || call.Redelivered || call.Retries != 0 || call.Defers != 0 {
		w.t.Errorf("delivery id %q, message id %q, redelivered %v, counts %d and %d", call.DeliveryID, call.ID, call.Redelivered, call.Retries, call.Defers)
	}
}

// deliveryCountRestarts: a copy is a new message for the broker; a message that waits in place is not, and a
// redelivery of it counts on.
func deliveryCountRestarts(w *world) {
	r := w.rig()
	c := r.consume(inTurn(runtime.Retry, runtime.Defer, runtime.Defer))
	r.publish("copied")
	for i, call := range c.called(4) {
		if want := w.deliveries(1); call.DeliveryCount != want {
			w.t.Errorf("call %d: delivery count %d, want %d: each is a new copy", i, call.DeliveryCount, want)
		}
		if want := []uint32{0, 0, 1, 2}[i]; call.Defers != want {
			w.t.Errorf("call %d: defer count %d, want %d", i, call.Defers, want)
		}
	}
	c.clean()

	if w.inst.Faults.Cut == nil {
		w.t.Fatal("a redelivery takes Faults.Cut")
	}
	c = r.consume(func(ctx context.Context, call call) runtime.Outcome {
		if call.Retries == 0 {
			return runtime.Retry
		}
		<-ctx.Done()
		return runtime.Retry
	}, with(runtime.InPlace(), runtime.HandlerTimeout(0), runtime.DrainTimeout(time.Millisecond)))
	r.publish("in place")
	calls := c.called(2)
	w.inst.Faults.Cut(w.t)
	_ = c.stop()
	last := r.consume(always(runtime.Ack))
	again := last.called(1)[0]
	last.clean()
	if w.caps.CountsDeliveries && again.DeliveryCount <= calls[1].DeliveryCount {
		w.t.Errorf("delivery count %d after %d: in place it climbs", again.DeliveryCount, calls[1].DeliveryCount)
	}
	if calls[1].DeliveryCount < calls[0].DeliveryCount {
		w.t.Errorf("delivery count %d, then %d in place", calls[0].DeliveryCount, calls[1].DeliveryCount)
	}
	r.empty()
}

// deliveries is what the delivery count should be, which is unknown where the broker does not tell.
func (w *world) deliveries(n uint32) uint32 {
	if !w.caps.CountsDeliveries {
		return 0
	}
	return n
}

// numbered makes n bodies.
func numbered(n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = strconv.Itoa(i)
	}
	return all
}
