package runtime

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/runtime/metrics"
	"github.com/shove-dev/shove/settle"
)

// finish decides what an outcome leads to and sends the task there. It is called once per task.
func (c *consumer) finish(t *task, o settle.Outcome, elapsed time.Duration) {
	c.count(o.Verdict, elapsed)
	if t.s.over.Load() { // the broker redelivers it; a late outcome goes nowhere (M3)
		t.s.drop(t)
		return
	}
	if o.Verdict == settle.VerdictAck {
		t.action = settle.Action{Kind: settle.Done}
		t.s.settle(t)
		return
	}
	set := c.settings.Load()
	now := time.Now()
	if c.role == broker.ReadDeadLetter {
		t.action = settle.DecideDead(o, t.facts.Retries)
	} else {
		t.action = settle.Decide(o, t.message(now, o.NotBefore), set.policy)
	}
	t.history = t.facts.History
	if o.Verdict != settle.VerdictRelease && o.Verdict != settle.VerdictEarly {
		t.history = header.AppendAttempt(t.history, header.Attempt{At: now, Pod: c.rt.pod, Outcome: o.Verdict.String(), Reason: o.Text})
	}
	c.warn(t, o.Verdict)
	switch {
	case t.action.Kind == settle.WaitInPlace && (!c.caps.WaitsInBroker || c.role == broker.ReadDeadLetter):
		t.s.after(t.action.Delay, t, func() {
			t.s.resume(t.again(t.action.Retries, t.action.Defers, t.action.NotBefore, t.history))
		})
	case t.action.Kind == settle.Copy && t.action.Delay > 0:
		t.s.after(t.action.Delay, t, func() { t.s.settle(t) })
	default:
		t.s.settle(t)
	}
}

// count moves the metrics of one call.
func (c *consumer) count(v settle.Verdict, elapsed time.Duration) {
	if c.role == broker.ReadDeadLetter {
		if v == settle.VerdictAck {
			c.meter.DeadHandled()
		}
		return
	}
	c.meter.Consumed(v)
	c.meter.Duration(v, elapsed)
}

// warn logs what a person should know of a decision.
func (c *consumer) warn(t *task, v settle.Verdict) {
	if w := t.action.Warning; w != settle.NoWarning && c.limits[w].allow() {
		c.log.Warn(w.String(), "message", t)
	}
	if c.log.Enabled(context.Background(), slog.LevelDebug) {
		c.log.Debug("decided", "message", t, "outcome", v, "action", t.action.Kind, "delay", t.action.Delay)
	}
}

// died logs and counts the end of a message that was dead-lettered or discarded (F1, F2). It is called once, when that
// is done on the broker.
func (c *consumer) died(t *task) {
	a := t.action
	c.meter.Failed(a.Reason)
	if a.Kind == settle.Drop {
		c.meter.Discarded(a.Reason)
		c.log.Warn("message discarded: the topology has no dead-letter queue", "message", t, "reason", a.Reason)
		return
	}
	c.log.Warn("message dead-lettered", "message", t, "reason", a.Reason, "queue", c.settings.Load().decl.Topology.DeadLetter)
}

// lost counts messages that somebody removed from the broker before they were settled. The backend logs it.
func (c *consumer) lost(n int) {
	for range n {
		c.meter.Failed(metrics.Lost)
		c.meter.Discarded(metrics.Lost)
	}
}

// panicked turns a handler's panic into an outcome.
func (c *consumer) panicked(t *task, p any) settle.Outcome {
	c.failed(metrics.Panic)
	c.log.Error("handler panicked", "message", t, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
	return settle.Retry.Because("panic: " + fmt.Sprint(p))
}

// timedOut is the outcome of a handler that ran into its deadline (H3).
func (c *consumer) timedOut(set *settings) settle.Outcome {
	o := settle.Outcome{Verdict: set.options.TimeoutOutcome}
	switch {
	case o.Verdict != settle.VerdictUnset:
	case c.caps.TimeoutLeavesPending && c.role == broker.ReadMain:
		return settle.Pending
	default:
		o.Verdict = settle.VerdictRetry
	}
	return o.Because("no outcome within " + set.options.HandlerTimeout.String())
}

// reduction says how much of a copy's headers had to go to fit the frame (C9).
type reduction uint8

const (
	whole reduction = iota
	withoutHistory
	withoutDetail
	enveloped
)

// settlement is what the backend gets for a task.
func (t *task) settlement(now time.Time) broker.Settlement {
	st := broker.Settlement{Delivery: t.d, Action: t.action, Envelope: t.envelope}
	if !t.action.Kind.Copies() && t.action.Kind != settle.WaitInPlace {
		return st
	}
	facts := *t.facts
	facts.MessageID, facts.Derived = messageID(t.d, t.facts, t.meta.Queue)
	facts.History = t.history
	st.Stamp = header.Stamp(make([]header.Field, 0, 12), facts, t.action, t.meta.Queue, t.meta.DeliveryID(), now)
	if t.reduced >= withoutHistory {
		st.Stamp = header.Drop(st.Stamp, header.History)
	}
	if t.reduced >= withoutDetail {
		st.Stamp = header.Drop(st.Stamp, header.DeathDetail)
	}
	if t.reduced == enveloped {
		st.Stamp = append(st.Stamp, header.Field{Name: header.Enveloped, Value: "headers"})
	}
	return st
}

// reduce makes a copy that did not fit smaller by one step: history first, then the detail, and last it becomes a
// dead letter with all headers in its body (C9). It reports whether there was a step left.
func (t *task) reduce() bool {
	switch t.reduced {
	case whole, withoutHistory:
		t.reduced++
		return true
	case withoutDetail:
		t.reduced = enveloped
		t.envelope = header.Envelope(t.d.Headers, t.d.Body)
		t.action = settle.Decide(settle.Poison(settle.Oversize, "the headers do not fit the broker's frame"), t.message(time.Now(), time.Time{}), t.s.c.settings.Load().policy)
		return true
	}
	return false
}
