package brokertest

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

func deadRules() []rule {
	return []rule{{id: "E1", test: drainedOnlyOnDemand}, {id: "E3", test: deadMetadata}, {id: "E6", test: positionOfTheCopy}, {id: "E7", test: undecodableDead}, {id: "F1", test: discardsAreLoud}}
}

func poisonRules() []rule {
	return []rule{{id: "G1", test: undecodable}, {id: "G2", test: oversize}}
}

func drainedOnlyOnDemand(w *world) {
	r := w.rig()
	c := r.consume(always(runtime.Reject))
	r.publish("m")
	r.holds(r.dead(), 1, 0)
	w.consistently("a dead letter without a dead handler", w.moment(), func() error {
		if ready, inFlight := r.count(r.dead()); ready != 1 || inFlight != 0 {
			return fmt.Errorf("%d ready and %d in flight", ready, inFlight)
		}
		return nil
	})
	c.clean()

	c = r.consume(always(runtime.Ack), drainDead)
	deads := c.calledDead(1)
	r.holds(r.dead(), 0, 0)
	c.clean()
	if deads[0].Body != "m" || len(c.all()) != 0 {
		w.t.Errorf("the dead handler got %q, the handler was called %d times", deads[0].Body, len(c.all()))
	}
}

func deadMetadata(w *world) {
	r := w.rig()
	c := r.consume(func(_ context.Context, call call) runtime.Outcome {
		if call.Body == "rejected" {
			return runtime.Reject.Because("gone")
		}
		return runtime.Retry.Because("down")
	}, with(runtime.MaxRetries(1)), drainDead)
	began := time.Now().Truncate(time.Millisecond)
	ids := r.publish("rejected", "exhausted")
	r.put(foreign("died before", header.Map{header.DeathCount: int64(2), header.MessageID: "m-3", header.RetryCount: int64(1)}))
	deads := c.calledDead(3)
	c.clean()
	r.holds(r.dead(), 0, 0)
	want := map[string]struct {
		id     string
		death  header.Death
		counts uint32
	}{
		"rejected":    {ids[0], header.Death{Reason: settle.Rejected, Detail: "gone", Count: 1}, 0},
		"exhausted":   {ids[1], header.Death{Reason: settle.MaxRetriesExceeded, Detail: "down", Count: 1}, 1},
		"died before": {"m-3", header.Death{Reason: settle.MaxRetriesExceeded, Detail: "down", Count: 3}, 1},
	}
	for _, d := range deads {
		x := want[d.Body]
		x.death.OriginalQueue = r.decl.Topology.Queue
		died := d.Death.DiedAt
		d.Death.DiedAt = time.Time{}
		if d.Death != x.death || d.ID != x.id || d.Retries != x.counts {
			w.t.Errorf("%q: death %+v, id %q, count %d; want %+v, %q, %d", d.Body, d.Death, d.ID, d.Retries, x.death, x.id, x.counts)
		}
		if died.Before(began) || died.After(time.Now()) {
			w.t.Errorf("%q died at %s, which is not between the test's begin and now", d.Body, died)
		}
	}
}

// positionOfTheCopy: in a drain the position and time are the dead copy's own, retry count and delivery id the
// original's.
func positionOfTheCopy(w *world) {
	r := w.rig()
	c := r.consume(inTurn(runtime.Retry, runtime.Reject), drainDead)
	r.publish("m")
	dead := c.calledDead(1)[0]
	c.clean()
	last := c.all()[1]
	if dead.Retries != 1 || dead.DeliveryID != last.DeliveryID {
		w.t.Errorf("retry count %d and delivery id %q, want 1 and %q", dead.Retries, dead.DeliveryID, last.DeliveryID)
	}
	if at, known := dead.Meta.Timestamp(); w.caps.BrokerTimestamp && (!known || at.Before(last.Began.Add(-clockSlack))) {
		w.t.Errorf("timestamp %s (known: %v): the copy was written after %s", at, known, last.Began)
	}
	offset, known := dead.Meta.Offset()
	if known != w.caps.Offset {
		w.t.Errorf("offset %d, known: %v; the capability says %v", offset, known, w.caps.Offset)
	}
	if _, known := dead.Meta.Partition(); known != w.caps.Partition {
		w.t.Errorf("partition known: %v; the capability says %v", known, w.caps.Partition)
	}
}

// clockSlack is how much the clocks of broker and test may differ.
const clockSlack = time.Second

func undecodableDead(w *world) {
	r := w.rig()
	c := r.consume(always(runtime.Ack), decodeJSON, drainDead)
	body := "\x00\xffnot json"
	r.put(foreign(body, nil))
	dead := c.calledDead(1)[0]
	r.holds(r.dead(), 0, 0)
	c.clean()
	if dead.Body != body || dead.DecodeError == nil || dead.Death.Reason != settle.Deserialize {
		w.t.Errorf("the dead handler got %q with decode error %v and reason %q", dead.Body, dead.DecodeError, dead.Death.Reason)
	}
}

// discardsAreLoud: without a dead-letter queue a message that dies is discarded, with one warning each time.
func discardsAreLoud(w *world) {
	r := w.rig(noDeadLetter)
	c := r.consume(func(_ context.Context, call call) runtime.Outcome {
		if call.Body == "rejected" {
			return runtime.Reject
		}
		return runtime.Retry
	}, with(runtime.MaxRetries(1)))
	r.publish("rejected", "rejected", "exhausted")
	c.called(4)
	r.empty()
	c.clean()
	warned := w.log.find(slog.LevelWarn, "message discarded")
	if len(warned) != 3 {
		w.t.Errorf("%d warnings for 3 discarded messages", len(warned))
	}
	for reason, n := range map[settle.Reason]int{settle.Rejected: 2, settle.MaxRetriesExceeded: 1} {
		got := 0
		for _, l := range warned {
			if strings.Contains(l.attrs, string(reason)) {
				got++
			}
		}
		if got != n {
			w.t.Errorf("%d warnings with reason %s, want %d", got, reason, n)
		}
	}
	if n := len(c.all()); n != 4 {
		w.t.Errorf("%d calls, want 4", n)
	}
}

func undecodable(w *world) {
	r := w.rig()
	c := r.consume(always(runtime.Ack), decodeJSON)
	r.put(foreign("{broken", header.Map{header.RetryCount: int64(99)}), foreign(`{"ok":1}`, nil))
	c.called(1)
	dead := r.deadLetters(1)[0]
	r.empty()
	c.clean()
	if string(dead.Body) != "{broken" || dead.text(header.DeathReason) != string(settle.Deserialize) {
		w.t.Errorf("%q died of %q", dead.Body, dead.text(header.DeathReason))
	}
	if calls := c.all(); len(calls) != 1 || calls[0].Body != `{"ok":1}` {
		w.t.Errorf("calls %v", calls)
	}

	bare := w.rig(noDeadLetter, func(s *topology.Spec) { s.Holds = nil })
	c = bare.consume(always(runtime.Ack), decodeJSON)
	bare.put(foreign("{broken", nil))
	w.eventually("a warning about the discarded message", func() error {
		if len(w.log.find(slog.LevelWarn, "message discarded")) == 0 {
			return fmt.Errorf("no line")
		}
		return nil
	})
	bare.empty()
	c.clean()
}

// oversize: one byte too much dead-letters, exactly the limit passes, and the size is looked at before decoding.
func oversize(w *world) {
	r := w.rig()
	const limit = 1000
	c := r.consume(always(runtime.Ack), decodeJSON, with(runtime.MaxMessageSize(limit)))
	fits := `"` + strings.Repeat("x", limit-20) + `"`
	fits = `{"k":` + fits + `}`
	fits += strings.Repeat(" ", limit-len(fits))
	r.put(foreign(fits, nil), foreign(strings.Repeat("{", limit+1), nil))
	c.called(1)
	dead := r.deadLetters(1)[0]
	r.empty()
	c.clean()
	if len(dead.Body) != limit+1 || dead.text(header.DeathReason) != string(settle.Oversize) {
		w.t.Errorf("%d bytes died of %q", len(dead.Body), dead.text(header.DeathReason))
	}
	if calls := c.all(); len(calls) != 1 || calls[0].Body != fits {
		w.t.Errorf("%d calls", len(calls))
	}
}
