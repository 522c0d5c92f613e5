package runtime

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/settle"
)

// task is one delivery on its way through the loop. A delivery that waits in place and comes back is a new task, so
// that a handler which was overruled may go on reading the old one.
type task struct {
	s       *session
	d       *broker.Delivery
	facts   *header.Facts // read-only; shared where a message has no headers
	meta    Metadata
	ctx     callContext
	state   atomic.Int32
	started time.Time

	// What was decided; owned by whoever won the state, then by the settler.
	action   settle.Action
	history  string
	reduced  reduction
	envelope []byte

	failures int // copies that failed in a row
	lane     *lane
	prev     *task // list of unsettled tasks, for renewing leases
	next     *task
	listed   bool
}

// States of a task. Whoever moves it from running decides its outcome: the worker when the handler returns, the
// deadline watcher when it does not, the drain when it gives up.
const (
	queued int32 = iota
	running
	finished
	overruled
)

// init fills a task for a delivery.
func (t *task) init(s *session, d *broker.Delivery, facts *header.Facts) {
	t.s, t.d, t.facts = s, d, facts
	t.meta = Metadata{Topology: s.c.topology, Queue: s.queue, RetryCount: facts.Retries, DeferCount: facts.Defers,
		Redelivered: d.Redelivered, d: d, facts: facts, call: &t.ctx}
	t.ctx.parent = s.c.values
}

// again is the task for the next call after waiting in place.
func (t *task) again(retries, defers uint32, notBefore time.Time, history string) *task {
	n := &task{lane: t.lane, failures: t.failures}
	facts := *t.facts
	facts.Retries, facts.Defers, facts.NotBefore, facts.History = retries, defers, notBefore, history
	n.init(t.s, t.d, &facts)
	return n
}

// message is what the decision needs to know.
func (t *task) message(now time.Time, notBefore time.Time) settle.Message {
	m := settle.Message{Retries: t.facts.Retries, Defers: t.facts.Defers, Crashes: t.d.Crashes, Age: now.Sub(t.facts.FirstSeen)}
	if !notBefore.IsZero() {
		m.Wait = notBefore.Sub(now)
	}
	return m
}

// LogValue names a task in a log line, without its content.
func (t *task) LogValue() slog.Value {
	return slog.GroupValue(
		slog.String("id", t.meta.MessageID()),
		slog.String("delivery", t.meta.DeliveryID()),
		slog.Uint64("retries", uint64(t.facts.Retries)),
		slog.Uint64("defers", uint64(t.facts.Defers)))
}

// worker runs handlers, one at a time.
type worker struct {
	current atomic.Pointer[task]
	// replaced says that another worker took over its slot, because its handler ignored its deadline (H4).
	replaced atomic.Bool
}

// work is a worker's goroutine.
func (c *consumer) work(w *worker) {
	defer c.workerGone(w)
	for {
		t := c.queue.pop(c.surplus)
		if t == nil {
			return
		}
		c.runTask(w, t)
		if w.replaced.Load() {
			return
		}
	}
}

// runTask calls the handler and hands its outcome on, unless it was overruled meanwhile.
func (c *consumer) runTask(w *worker, t *task) {
	if t.s.over.Load() || t.s.stopping.Load() || t.revoked() {
		t.s.release(t)
		return
	}
	t.started = time.Now()
	if timeout := c.settings.Load().options.HandlerTimeout; timeout > 0 {
		t.ctx.deadline = t.started.Add(timeout)
	}
	t.state.Store(running)
	w.current.Store(t)
	returned := false
	defer func() { // the handler ended its goroutine (runtime.Goexit): that is a panic in all but name
		if !returned {
			c.handlerReturned(t, settle.Retry.Because("the handler ended its goroutine"))
			c.startWorker()
		}
	}()
	outcome := c.guard(t)
	returned = true
	c.handlerReturned(t, outcome)
	w.current.Store(nil)
}

func (c *consumer) handlerReturned(t *task, o settle.Outcome) {
	if !t.state.CompareAndSwap(running, finished) {
		c.meter.AbandonedAdd(-1)
		c.log.Info("a handler returned after it was overruled; its outcome is dropped", "message", t, "outcome", o.Verdict, "after", time.Since(t.started))
		return
	}
	t.ctx.end(context.Canceled)
	c.finish(t, o, time.Since(t.started))
}

// guard calls the handler and turns a panic into Retry (A8, H5).
func (c *consumer) guard(t *task) (o settle.Outcome) {
	defer func() {
		if p := recover(); p != nil {
			o = c.panicked(t, p)
		}
	}()
	return c.call(&t.ctx, t.d, &t.meta)
}
