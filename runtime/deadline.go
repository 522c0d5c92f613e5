package runtime

import (
	"context"
	"slices"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/runtime/metrics"
	"github.com/shove-dev/shove/settle"
)

// overdueCall is a handler that was overruled and has not returned.
type overdueCall struct {
	w     *worker
	t     *task
	until time.Time // when its slot is given to another worker (H4)
}

// watchDeadlines ends calls at their deadline. One timer serves all calls: a call that begins after a look at the
// clock ends at least one timeout later, so sleeping until the earliest known deadline, and never longer than a
// timeout, misses none.
func (c *consumer) watchDeadlines(ctx context.Context, poke <-chan struct{}) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		timer.Reset(c.enforceDeadlines(time.Now()))
		select {
		case <-timer.C:
		case <-poke:
		case <-ctx.Done():
			return
		}
	}
}

// noDeadline is how long the watcher sleeps when nothing has a deadline; a change of settings wakes it.
const noDeadline = time.Hour

// enforceDeadlines overrules every handler whose deadline is over and says how long to sleep.
func (c *consumer) enforceDeadlines(now time.Time) time.Duration {
	set := c.settings.Load()
	sleep := noDeadline
	if set.options.HandlerTimeout > 0 {
		sleep = set.options.HandlerTimeout
	}
	c.mu.Lock()
	workers := slices.Clone(c.workers)
	c.mu.Unlock()
	for _, w := range workers {
		t := w.current.Load()
		if t == nil || t.state.Load() != running || t.ctx.deadline.IsZero() {
			continue
		}
		if left := t.ctx.deadline.Sub(now); left > 0 {
			sleep = min(sleep, left)
			continue
		}
		if o := c.timedOut(set); c.overrule(w, t, now, context.DeadlineExceeded, o) {
			c.expired(t, set, o, now)
			sleep = min(sleep, max(set.options.HandlerTimeout, time.Millisecond))
		}
	}
	return min(sleep, c.replaceOverdue(now))
}

// overrule takes a running task from its worker, for which instead is applied. It reports whether it did: the handler may just have returned.
func (c *consumer) overrule(w *worker, t *task, now time.Time, reason error, instead settle.Outcome) bool {
	if !t.state.CompareAndSwap(running, overruled) {
		return false
	}
	t.ctx.endOverruled(reason, instead)
	c.meter.AbandonedAdd(1)
	c.mu.Lock()
	c.overdue = append(c.overdue, overdueCall{w: w, t: t, until: now.Add(now.Sub(t.started))})
	c.mu.Unlock()
	return true
}

// expired routes the outcome of a call that ran into its deadline (H3), or leaves its message pending (H8).
func (c *consumer) expired(t *task, set *settings, o settle.Outcome, now time.Time) {
	c.failed(metrics.Timeout)
	if o.Verdict == settle.VerdictPending {
		c.log.Warn("handler ran into its deadline; its message stays pending and comes again when its lease is over, with its retries unspent", "message", t, "timeout", set.options.HandlerTimeout)
		c.finish(t, o, now.Sub(t.started))
		return
	}
	c.log.Warn("handler ran into its deadline", "message", t, "timeout", set.options.HandlerTimeout, "outcome", o.Verdict)
	c.finish(t, o, now.Sub(t.started))
}

// replaceOverdue gives the slots of handlers that ignored their deadline for a further one to new workers.
func (c *consumer) replaceOverdue(now time.Time) time.Duration {
	sleep := noDeadline
	var replaced []overdueCall
	c.mu.Lock()
	c.overdue = slices.DeleteFunc(c.overdue, func(o overdueCall) bool {
		if o.w.current.Load() != o.t { // it returned, and its worker went on
			return true
		}
		if left := o.until.Sub(now); left > 0 {
			sleep = min(sleep, left)
			return false
		}
		replaced = append(replaced, o)
		return true
	})
	c.mu.Unlock()
	for _, o := range replaced {
		if o.w.replaced.Swap(true) {
			continue
		}
		c.running.Add(-1)
		c.log.Warn("a handler ignores the end of its context; another worker takes its place, its goroutine is abandoned", "message", o.t, "running", now.Sub(o.t.started))
		c.startWorker()
	}
	return sleep
}

// abandonRunning gives up on every running handler of a session, of all sessions where it is nil: what they return is
// dropped, the broker redelivers their messages (H6, N1). It returns how many there were.
func (c *consumer) abandonRunning(s *session) int {
	c.mu.Lock()
	workers := slices.Clone(c.workers)
	c.mu.Unlock()
	n := 0
	for _, w := range workers {
		if t := w.current.Load(); t != nil && (s == nil || t.s == s) && c.overrule(w, t, time.Now(), context.Canceled, settle.Release) {
			n++
			c.log.Warn("gave up on a handler at the end of the drain; the broker redelivers its message", "message", t, "running", time.Since(t.started))
			t.s.drop(t)
		}
	}
	return n
}

// failed counts a failed attempt.
func (c *consumer) failed(reason settle.Reason) {
	if c.role == broker.ReadDeadLetter {
		c.meter.DeadFailed(reason)
		return
	}
	c.meter.Failed(reason)
}
