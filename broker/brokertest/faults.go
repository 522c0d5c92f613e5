package brokertest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/runtime"
)

// faultTests keep a ledger over a run in which something breaks.
func faultTests() []rule {
	all := []rule{{id: "cut_mid_flight", test: cutMidFlight}, {id: "broker_restarts_under_load", test: restartUnderLoad}, {id: "killed_with_no_budget", test: killedWithNoBudget}}
	for _, s := range []Step{StepReceived, StepBeforeCopy, StepCopied, StepBeforeAck, StepAcked} {
		all = append(all, rule{id: "killed_at_" + strings.ReplaceAll(string(s), "-", "_"), test: func(w *world) { killedAt(w, s) }})
	}
	return all
}

// account is a rig with a ledger.
type account struct {
	*rig
	Ledger
}

// mixed has every outcome, by the first letter of the body: a message is acked, retried once, rejected, deferred once,
// or retried until its budget of two is spent.
func (a *account) mixed(_ context.Context, c call) runtime.Outcome {
	a.Called(c.ID, c.Retries, c.Defers)
	switch {
	case c.Body[0] == 'r' && c.Retries == 0, c.Body[0] == 'e':
		return runtime.Retry
	case c.Body[0] == 'x':
		return runtime.Reject
	case c.Body[0] == 'd' && c.Defers == 0:
		return runtime.Defer
	}
	a.Acked(c.ID)
	return runtime.Ack
}

// load makes n bodies of all kinds.
func load(n int) []string {
	bodies := make([]string, n)
	for i := range bodies {
		bodies[i] = fmt.Sprintf("%c%d", "arxde"[i%5], i)
	}
	return bodies
}

func (a *account) consume(opts ...option) *consumer {
	opts = append([]option{with(runtime.MaxRetries(2), runtime.Concurrency(10), runtime.Prefetch(50), runtime.DrainTimeout(time.Millisecond))}, opts...)
	return a.rig.consume(a.mixed, opts...)
}

// settled waits until nothing is on its way any more, notes the dead letters, and checks the ledger.
func (a *account) settled() {
	a.t.Helper()
	// More than once: a message that is just being moved from a hold queue to the main one is in neither count.
	a.eventually("the ledger adds up", func() error {
		a.empty()
		for _, m := range a.inst.Raw.Take(a.t, a.decl, a.dead()) {
			a.Dead(m.text(header.MessageID))
		}
		return a.Check()
	})
	a.t.Logf("%d duplicates, each explained", a.Duplicates())
}

// fault breaks something. It is noted before and after, because its effects show between the two.
func (a *account) fault(f func()) {
	a.Fault()
	f()
	a.Fault()
}

// cut breaks the connection of a running consumer. It is noted once more when the consumer knows: until then it calls
// handlers for deliveries that are lost already.
func (a *account) cut(f func()) {
	a.t.Helper()
	a.eventually("the consumer is connected", func() error {
		if lines := a.log.find(0, "consuming"); len(lines) == 0 || lines[len(lines)-1].text != "consuming" {
			return errors.New("it was interrupted")
		}
		return nil
	})
	before := len(a.log.find(4, "interrupted"))
	a.fault(f)
	a.eventually("the consumer notices", func() error {
		if len(a.log.find(4, "interrupted")) == before {
			return errors.New("no line about it")
		}
		return nil
	})
	a.Fault()
}

func cutMidFlight(w *world) {
	if w.inst.Faults.Cut == nil {
		w.t.Fatal("cutting connections takes Faults.Cut")
	}
	a := &account{rig: w.rig()}
	const n = 300
	a.Published(a.publish(load(n)...)...)
	c := a.consume()
	for _, progress := range []int{20, n / 2, n} {
		c.called(progress)
		a.cut(func() { w.inst.Faults.Cut(w.t) })
	}
	a.settled()
	c.clean()
}

// restartUnderLoad ends the broker abruptly while messages are published and consumed.
func restartUnderLoad(w *world) {
	if w.inst.Faults.Restart == nil {
		if w.caps.Durable {
			w.t.Fatal("a durable broker is restarted under load: it takes Faults.Restart")
		}
		w.exempt("messages do not survive the end of this broker (Durable)")
		return
	}
	a := &account{rig: w.rig()}
	a.settleDown()
	c := a.consume()
	stop := make(chan struct{})
	published := make(chan struct{})
	go func() { defer close(published); a.publishUntil(stop) }()
	c.called(50)
	a.cut(func() { w.inst.Faults.Restart(w.t) })
	n := len(c.all())
	c.called(n + 50)
	close(stop)
	<-published
	a.settled()
	c.clean()
}

// settleDown gives a broker that writes its metadata in the background the time to do so (RabbitMQ loses confirmed
// messages of a queue that was declared less than a second before it is killed).
func (r *rig) settleDown() { time.Sleep(2 * time.Second) }

// publishUntil publishes in small batches, over every outage.
func (a *account) publishUntil(stop <-chan struct{}) {
	p := a.publisher()
	for i := 0; ; i++ {
		select {
		case <-stop:
			return
		default:
		}
		msgs, ids := messages(load(5)...)
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		err := p.Publish(ctx, msgs)
		cancel()
		var failed *broker.PublishError
		switch {
		case err == nil:
			a.Published(ids...)
		case errors.As(err, &failed):
			left := map[int]error{}
			for _, item := range failed.Items {
				left[item.Index] = item.Err
			}
			for i, id := range ids {
				if left[i] == nil {
					a.Published(id)
				} else { // what is known not to be stored is never seen, so that noting it as unknown is harmless
					a.Unknown(id)
				}
			}
			time.Sleep(100 * time.Millisecond)
		default:
			a.Unknown(ids...)
			time.Sleep(100 * time.Millisecond)
		}
		// The consumer waits up to 30 s before it is back: what has come together by then must be worked off within
		// the patience of this test, on a slow machine, too.
		time.Sleep(50 * time.Millisecond)
	}
}

// killedAt ends a consumer at one step between receiving a message and its acknowledgement, and lets another one go
// on.
func killedAt(w *world, step Step) {
	if w.inst.Faults.Cut == nil {
		w.t.Fatal("killing a consumer takes Faults.Cut")
	}
	a := &account{rig: w.rig()}
	a.Published(a.publish(load(40)...)...)
	for range 3 {
		a.fault(func() { a.killOne(step) })
	}
	last := a.consume()
	a.settled()
	last.clean()
}

// killOne runs a consumer until it is cut off at a step, or has nothing left to do.
func (a *account) killOne(step Step) {
	a.t.Helper()
	disarm := func() {}
	if a.inst.Faults.CutAt != nil {
		disarm = a.inst.Faults.CutAt(a.t, step)
	}
	before := len(a.log.find(slog.LevelWarn, "interrupted"))
	c := a.consume()
	a.eventually("the consumer is cut off, or nothing is left to do", func() error {
		ready, inFlight := a.count(a.main())
		calls := len(c.all())
		if a.inst.Faults.CutAt == nil && calls >= 5 {
			a.inst.Faults.Cut(a.t)
			return nil
		}
		if len(a.log.find(slog.LevelWarn, "interrupted")) == before && ready+inFlight > 0 {
			return fmt.Errorf("%d ready, %d in flight, %d calls", ready, inFlight, calls)
		}
		return nil
	})
	disarm()
	_ = c.stop() // its process is gone: what it returns does not matter
}

// killedWithNoBudget: with no retries at all, a process that dies in the middle of a message costs no budget: the
// message is redelivered and not dead-lettered (asynq#1015).
func killedWithNoBudget(w *world) {
	if w.inst.Faults.Cut == nil {
		w.t.Fatal("killing a consumer takes Faults.Cut")
	}
	r := w.rig()
	c := r.consume(func(ctx context.Context, _ call) runtime.Outcome { <-ctx.Done(); return runtime.Retry },
		with(runtime.MaxRetries(0), runtime.DrainTimeout(time.Millisecond)))
	r.publish("m")
	c.called(1)
	w.inst.Faults.Cut(w.t)
	_ = c.stop()
	second := r.consume(always(runtime.Ack), with(runtime.MaxRetries(0)))
	call := second.called(1)[0]
	second.clean()
	r.empty()
	r.holds(r.dead(), 0, 0)
	if call.Retries != 0 {
		w.t.Errorf("it came back with count %d", call.Retries)
	}
}
