package brokertest

import (
	"context"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"time"

	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/settle"
)

func identityRules() []rule {
	return []rule{{id: "C5", test: retryHeader}, {id: "C8", test: sameIdentity}, {id: "C9", test: headersSurvive}}
}

// retryHeader: where the count is read from, what is made of nonsense, and what a copy carries.
func retryHeader(w *world) {
	r := w.rig()
	c := r.consume(always(runtime.Reject))
	want := map[string]uint32{"missing": 0, "ours": 3, "theirs": 4, "theirs on logs": 5, "both": 1, "negative": 0, "text": 0, "absurd": 0}
	r.put(
		foreign("missing", nil),
		foreign("ours", header.Map{header.RetryCount: int64(3)}),
		foreign("theirs", header.Map{"x-retry-count": int64(4)}),
		foreign("theirs on logs", header.Map{"Shove-Retry-Count": "5"}),
		foreign("both", header.Map{header.RetryCount: int64(1), "x-retry-count": int64(8), "Shove-Retry-Count": "9"}),
		foreign("negative", header.Map{header.RetryCount: int64(-3)}),
		foreign("text", header.Map{header.RetryCount: "many"}),
		foreign("absurd", header.Map{header.RetryCount: "99999999999999999999"}),
	)
	dead := r.deadLetters(len(want))
	c.clean()
	for body, count := range want {
		w.counts(c.of(body), count)
	}
	for _, m := range dead {
		n, ok := header.Int(m.Headers[header.RetryCount])
		if !ok || n != int64(want[string(m.Body)]) {
			w.t.Errorf("%q: the copy carries the count %v", m.Body, m.Headers[header.RetryCount])
		}
		for _, theirs := range []string{"x-retry-count", "Shove-Retry-Count"} {
			if v, kept := m.Headers[theirs]; kept {
				w.t.Errorf("%q: the copy kept %s: %v", m.Body, theirs, v)
			}
		}
	}
	if len(w.log.find(slog.LevelWarn, "malformed")) == 0 {
		w.t.Error("no warning about malformed counts")
	}
}

// sameIdentity: a message keeps its id over hops, and one without an id gets one that a redelivery repeats.
func sameIdentity(w *world) {
	r := w.rig()
	timestamp := foreign("foreign", header.Map{"tenant": "a"})
	r.put(timestamp)
	wait := func(ctx context.Context, _ call) runtime.Outcome { <-ctx.Done(); return runtime.Retry }
	first := r.consume(wait, with(runtime.DrainTimeout(time.Millisecond)))
	id := first.called(1)[0].ID
	_ = first.stop()
	if id == "" {
		w.t.Fatal("a message without an id got none")
	}
	second := r.consume(inTurn(runtime.Retry, runtime.Defer, runtime.Reject))
	second.called(3)
	dead := r.deadLetters(1)[0]
	second.clean()
	for i, call := range second.all() {
		if call.ID != id {
			w.t.Errorf("call %d after a redelivery: id %q, want %q", i, call.ID, id)
		}
	}
	if dead.text(header.MessageID) != id {
		w.t.Errorf("the dead letter has the id %q, want %q", dead.text(header.MessageID), id)
	}
	ids := r.publish("own")
	third := r.consume(inTurn(runtime.Retry))
	for _, call := range third.called(2) {
		if call.ID != ids[0] {
			w.t.Errorf("id %q, want the publisher's %q", call.ID, ids[0])
		}
	}
	third.clean()
	r.empty()
}

// typed are headers with types that text protocols carry as text.
var typed = header.Map{"tenant": "acme", "traceparent": "00-abc", "attempt": int64(7), "flag": true, "ratio": 2.5, "raw": []byte{0, 1, 254}}

// headersSurvive: user headers keep their values and types over a hold and a dead letter, harmful ones go, and headers
// that do not fit any more end in the dead letter's body instead of closing the connection.
func headersSurvive(w *world) {
	r := w.rig()
	sent := header.Map{"x-death": "forged", "x-delivery-count": int64(3), "x-first-death-reason": "x", "x-last-death-queue": "x",
		"x-shove-death-reason": "forged", header.MessageID: "m-1", header.Type: "order.created", header.Trace: "t-1"}
	for name, v := range typed {
		sent[name] = v
	}
	r.put(foreign("m", sent))
	before := r.inst.Raw.Take(w.t, r.decl, r.main())[0] // as this broker carries them
	r.put(foreign("m", sent))
	c := r.consume(inTurn(runtime.Retry, runtime.Defer, runtime.Reject))
	dead := r.deadLetters(1)[0]
	c.clean()
	for _, name := range append(names(typed), header.Type, header.Trace) {
		if !reflect.DeepEqual(before.Headers[name], dead.Headers[name]) {
			w.t.Errorf("header %s: %#v became %#v", name, before.Headers[name], dead.Headers[name])
		}
	}
	for _, name := range []string{"x-delivery-count", "x-first-death-reason", "x-last-death-queue"} {
		if v, kept := dead.Headers[name]; kept {
			w.t.Errorf("the copy kept %s: %v", name, v)
		}
	}
	if dead.Headers["x-death"] == "forged" || dead.text(header.DeathReason) != string(settle.Rejected) {
		w.t.Errorf("a forged death survived: %v, %v", dead.Headers["x-death"], dead.text(header.DeathReason))
	}
	if string(dead.Body) != "m" || dead.ContentType != before.ContentType {
		w.t.Errorf("body %q with content type %q became %q with %q", before.Body, before.ContentType, dead.Body, dead.ContentType)
	}
	if w.caps.MaxHeaderBytes == 0 {
		return
	}
	r.headersThatDoNotFit()
}

func names(h header.Map) []string {
	var ns []string
	for n := range h {
		ns = append(ns, n)
	}
	return ns
}

// headersThatDoNotFit: first history and detail go, and at last all headers go into the dead letter's body (C9).
func (r *rig) headersThatDoNotFit() {
	tight, full := strings.Repeat("x", r.caps.MaxHeaderBytes-1500), strings.Repeat("x", r.caps.MaxHeaderBytes-180)
	r.put(foreign("tight", header.Map{"big": tight, header.MessageID: "m-2"}), foreign("full", header.Map{"big": full, header.MessageID: "m-3"}))
	c := r.consume(func(_ context.Context, call call) runtime.Outcome {
		if call.Body == "next" {
			return runtime.Ack
		}
		return runtime.Reject.Because(strings.Repeat("why ", 500))
	})
	for _, dead := range r.deadLetters(2) {
		switch dead.text(header.MessageID) {
		case "m-2":
			if string(dead.Body) != "tight" || dead.text("big") != tight || dead.text(header.DeathReason) != string(settle.Rejected) {
				r.t.Errorf("headers that fit without history and detail: %q died of %q", dead.Body, dead.text(header.DeathReason))
			}
		case "m-3":
			if dead.text(header.DeathReason) != string(settle.Oversize) || dead.text(header.Enveloped) == "" {
				r.t.Errorf("headers that do not fit: died of %q, %s is %q", dead.text(header.DeathReason), header.Enveloped, dead.text(header.Enveloped))
			}
			if !strings.Contains(string(dead.Body), full[:100]) {
				r.t.Error("the dead letter's body does not hold the headers")
			}
		default:
			r.t.Errorf("a dead letter with the id %q", dead.text(header.MessageID))
		}
	}
	r.publish("next")
	r.eventually("the next message is handled", func() error {
		if len(c.of("next")) == 0 {
			return fmt.Errorf("calls: %d", len(c.all()))
		}
		return nil
	})
	c.clean()
	r.empty()
	if lost := r.log.find(slog.LevelWarn, "interrupted"); len(lost) > 0 {
		r.t.Errorf("the connection was lost over it: %v", lost)
	}
}
