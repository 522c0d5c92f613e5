package brokertest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/shove-dev/shove/runtime"
)

func connectionRules() []rule {
	return []rule{{id: "M1", test: reconnects}, {id: "M2", test: reconnectLimit}, {id: "M3", test: lateOutcomes}}
}

// breakable says whether the connection can be broken, which the rules M are about.
func (w *world) breakable() bool {
	if w.inst.Faults.Block != nil && w.inst.Faults.Cut != nil {
		return true
	}
	if !w.caps.Connected {
		w.exempt("there is no connection that could be lost (Connected)")
		return false
	}
	w.t.Fatal("breaking connections takes Faults.Block and Faults.Cut")
	return false
}

func reconnects(w *world) {
	if !w.breakable() {
		return
	}
	r := w.rig()
	c := r.consume(always(runtime.Ack))
	r.publish("before")
	c.called(1)
	unblock := w.inst.Faults.Block(w.t)
	const attempts = 3
	w.eventually("attempts to reconnect", func() error {
		if n := len(w.log.find(slog.LevelWarn, "trying again")); n < attempts {
			return fmt.Errorf("%d attempts", n)
		}
		return nil
	})
	lines := w.log.find(slog.LevelWarn, "trying again")
	unblock()
	for i := 1; i < attempts; i++ {
		least := time.Second / 2 << (i - 1) // 1 s doubling, 50 % less at the most
		if gap := lines[i].at.Sub(lines[i-1].at); gap < least {
			w.t.Errorf("attempt %d came %s after the one before, want at least %s", i+1, gap, least)
		}
	}
	r.publish("after")
	r.eventually("consuming goes on", func() error {
		if len(c.of("after")) == 0 {
			return errors.New("not handled")
		}
		return nil
	})
	c.clean()
	r.empty()
}

func reconnectLimit(w *world) {
	if !w.breakable() {
		return
	}
	r := w.rig()
	c := r.consume(always(runtime.Retry), with(runtime.MaxReconnectAttempts(2), runtime.MaxRetries(7)))
	r.publish("m")
	c.called(1)
	unblock := w.inst.Faults.Block(w.t)
	defer unblock()
	err := c.wait()
	if !errors.Is(err, runtime.ErrReconnectLimit) {
		w.t.Errorf("the consumer ended with %v, want the reconnect limit", err)
	}
	if len(w.log.find(slog.LevelError, "giving up")) == 0 {
		w.t.Error("no error was logged")
	}
	unblock()
	last := r.consume(always(runtime.Ack), with(runtime.MaxReconnectAttempts(2)))
	r.eventually("the message comes with what is left of its retries", func() error {
		if calls := last.all(); len(calls) == 0 {
			return errors.New("not handled")
		}
		return nil
	})
	last.clean()
	r.holds(r.dead(), 0, 0)
}

// lateOutcomes: ten handlers run while their connection is lost (rabbitmq-dotnet-client#200). What they return later
// goes nowhere, each message is redelivered once, and the new subscription stays.
func lateOutcomes(w *world) {
	if !w.breakable() {
		return
	}
	r := w.rig()
	const n = 10
	late := make(chan struct{})
	again := make(chan struct{})
	var once sync.Once
	w.defers(func() { once.Do(func() { close(late) }) })
	c := r.consume(func(ctx context.Context, call call) runtime.Outcome {
		if !call.Redelivered {
			<-late
			return runtime.Reject
		}
		select {
		case <-again:
		case <-ctx.Done():
		}
		return runtime.Ack
	}, with(runtime.Concurrency(2*n), runtime.Prefetch(2*n), runtime.HandlerTimeout(0)))
	r.publish(numbered(n)...)
	c.called(n)
	w.inst.Faults.Cut(w.t)
	c.called(2 * n)
	once.Do(func() { close(late) }) // the outcomes of the lost deliveries
	r.eventually("the late handlers returned", func() error {
		ended := 0
		for _, call := range c.all() {
			if !call.Redelivered && !call.Ended.IsZero() {
				ended++
			}
		}
		if ended < n {
			return fmt.Errorf("%d of %d", ended, n)
		}
		return nil
	})
	w.consistently("the new deliveries stay untouched", w.moment(), func() error {
		if ready, inFlight := r.count(r.main()); ready != 0 || inFlight != n {
			return fmt.Errorf("%d ready and %d in flight, want %d in flight", ready, inFlight, n)
		}
		return nil
	})
	close(again)
	r.empty()
	c.clean()
	r.holds(r.dead(), 0, 0)
	if calls := c.all(); len(calls) != 2*n {
		w.t.Errorf("%d calls, want each message twice", len(calls))
	}
}
