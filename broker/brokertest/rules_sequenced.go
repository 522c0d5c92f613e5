package brokertest

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/codec"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

func sequencedRules() []rule {
	ordered := func(test func(*world)) func(*world) {
		return func(w *world) {
			if !w.caps.Sequenced {
				w.exempt("ordered topologies are not supported on this broker (Sequenced)")
				return
			}
			test(w)
		}
	}
	return []rule{
		{id: "K1", test: ordered(keysKeepOrder)}, {id: "K2", test: ordered(keyOfThePublisher)},
		{id: "K3", test: ordered(skipGoesOn)}, {id: "K4", test: ordered(failAllStopsTheKey)},
	}
}

func sequenced(onFailure topology.OnFailure) setup {
	return func(s *topology.Spec) { s.Sequenced = &topology.SequencedSpec{OnFailure: onFailure, Shards: 2} }
}

// publishKeyed sends bodies like "a3", whose first letter is the key.
func (r *rig) publishKeyed(bodies ...string) {
	r.t.Helper()
	msgs, _ := messages(bodies...)
	for i := range msgs {
		msgs[i].Key = bodies[i][:1]
	}
	r.must(r.publisher().Publish(r.ctx(), msgs), "publish")
}

// interleaved makes n bodies for each key, in turns.
func interleaved(n int, keys ...string) []string {
	var bodies []string
	for i := range n {
		for _, k := range keys {
			bodies = append(bodies, k+strconv.Itoa(i))
		}
	}
	return bodies
}

// keysKeepOrder: the next message of a key begins after the one before it is settled for good, over its retries and
// over the loss of the connection; other keys go on meanwhile.
func keysKeepOrder(w *world) {
	r := w.rig(sequenced(topology.Skip))
	const n = 8
	var mu sync.Mutex
	running := map[string]int{}
	overlaps := 0
	handler := func(_ context.Context, call call) runtime.Outcome {
		key := call.Body[:1]
		mu.Lock()
		if running[key]++; running[key] > 1 {
			overlaps++
		}
		mu.Unlock()
		time.Sleep(5 * time.Millisecond)
		mu.Lock()
		running[key]--
		mu.Unlock()
		if call.Body == "a2" && call.Retries < 2 {
			return runtime.Retry
		}
		return runtime.Ack
	}
	r.publishKeyed(interleaved(n, "a", "b", "c")...)
	c := r.consume(handler, with(runtime.Concurrency(10), runtime.Prefetch(60)))
	calls := c.called(3*n + 2)
	c.clean()
	r.orderedEmpty()
	if overlaps > 0 {
		w.t.Errorf("two messages of one key ran at once, %d times", overlaps)
	}
	want := interleaved(n, "a")
	want = slices.Insert(want, 3, "a2", "a2")
	if got := bodiesOf(calls, "a"); !slices.Equal(got, want) {
		w.t.Errorf("key a: %v, want %v", got, want)
	}
	for _, key := range []string{"b", "c"} {
		if got := bodiesOf(calls, key); !slices.Equal(got, interleaved(n, key)) {
			w.t.Errorf("key %s: %v", key, got)
		}
	}
	retried := c.of("a2")
	for i, tier := range []int{0, 1} {
		if waited := retried[i+1].Began.Sub(retried[i].Ended); waited < w.tier(tier) {
			w.t.Errorf("retry %d came after %s of %s", i+1, waited, w.tier(tier))
		}
	}
	if others := c.of("b" + strconv.Itoa(n-1))[0]; others.Began.After(retried[2].Began) {
		w.t.Error("key b waited for a retry of key a")
	}

	r.publishKeyed(interleaved(n, "a", "b")...)
	lost := r.consume(handler, with(runtime.DrainTimeout(time.Millisecond)))
	lost.called(5)
	if cut := w.inst.Faults.Cut; cut != nil {
		cut(w.t)
	}
	_ = lost.stop()
	last := r.consume(handler)
	r.orderedEmpty()
	last.clean()
	for _, key := range []string{"a", "b"} {
		got := firsts(bodiesOf(append(lost.all(), last.all()...), key))
		if !slices.Equal(got, interleaved(n, key)) {
			w.t.Errorf("key %s after its consumer was lost: %v", key, got)
		}
	}
}

// orderedEmpty waits until nothing is left in the queues that an ordered topology reads.
func (r *rig) orderedEmpty() {
	r.t.Helper()
	r.eventually("the ordered topology is empty", func() error {
		queues := []topology.Queue{r.main()}
		for _, s := range r.decl.Topology.Sequenced.Shards {
			queues = append(queues, topology.Queue{Name: s.Queue, Role: topology.RoleShard})
		}
		for _, q := range queues {
			if ready, inFlight := r.count(q); ready+inFlight != 0 {
				return fmt.Errorf("queue %q: %d ready, %d in flight", q.Name, ready, inFlight)
			}
		}
		return nil
	})
}

func bodiesOf(calls []call, key string) []string {
	var all []string
	for _, c := range calls {
		if strings.HasPrefix(c.Body, key) {
			all = append(all, c.Body)
		}
	}
	return all
}

// firsts keeps the first occurrence of each.
func firsts(all []string) []string {
	var once []string
	for _, s := range all {
		if !slices.Contains(once, s) {
			once = append(once, s)
		}
	}
	return once
}

// keyOfThePublisher: the key is the publisher's, or a field of the body that the topology names.
func keyOfThePublisher(w *world) {
	given := w.rig(sequenced(topology.Skip))
	c := given.consume(always(runtime.Ack))
	given.publishKeyed("a0")
	if key := c.called(1)[0].Meta.Key(); key != "a" {
		w.t.Errorf("key %q, want the one that was published", key)
	}
	c.clean()

	field := w.rig(func(s *topology.Spec) { s.Sequenced = &topology.SequencedSpec{Key: "customer", Shards: 2} })
	c = field.consume(always(runtime.Ack))
	p, err := runtime.NewPublisher[map[string]any](field.publisherRuntime(), "t", runtime.PublisherConfig{Codec: codec.JSON})
	if err != nil {
		w.t.Fatalf("make a publisher: %v", err)
	}
	field.must(p.Publish(w.ctx(), map[string]any{"customer": "k-7"}), "publish")
	if key := c.called(1)[0].Meta.Key(); key != "k-7" {
		w.t.Errorf("key %q, want the field of the body", key)
	}
	c.clean()
}

func skipGoesOn(w *world) {
	r := w.rig(sequenced(topology.Skip))
	c := r.consume(func(_ context.Context, call call) runtime.Outcome {
		if call.Body == "a3" {
			return runtime.Reject
		}
		return runtime.Ack
	})
	r.publishKeyed("a1", "a2", "a3", "a4", "a5")
	calls := c.called(5)
	dead := r.deadLetters(1)[0]
	c.clean()
	r.orderedEmpty()
	if got := bodiesOf(calls, "a"); !slices.Equal(got, []string{"a1", "a2", "a3", "a4", "a5"}) {
		w.t.Errorf("calls %v", got)
	}
	if string(dead.Body) != "a3" || dead.text(header.DeathReason) != string(settle.Rejected) {
		w.t.Errorf("%q died of %q", dead.Body, dead.text(header.DeathReason))
	}
}

// failAllStopsTheKey: whatever makes a message of a key fail for good, the later ones of that key die with it, and
// those of other keys do not.
func failAllStopsTheKey(w *world) {
	r := w.rig(sequenced(topology.FailAll))
	const limit = 200
	bodies := []string{
		`"r1"`, `"r2"`, `"r3"`, `"r4"`, `"r5"`, // 3 is rejected
		`"e1"`, `"e2"`, `"e3"`, // 1 uses up its retries
		`"u1"`, `u2 is not JSON`, `"u3"`,
		`"o1"`, `"o` + strings.Repeat("x", limit) + `"`, `"o3"`,
		`"n1"`, `"n2"`, // nothing happens to this key
	}
	msgs := make([]broker.Message, len(bodies))
	for i, b := range bodies {
		msgs[i] = broker.Message{ID: newID(), Key: strings.Trim(b, `"`)[:1], Body: []byte(b)}
	}
	c := r.consume(func(_ context.Context, call call) runtime.Outcome {
		switch call.Body {
		case `"r3"`:
			return runtime.Reject
		case `"e1"`:
			return runtime.Retry
		}
		return runtime.Ack
	}, decodeText, with(runtime.MaxRetries(1), runtime.MaxMessageSize(limit)))
	r.must(r.publisher().Publish(w.ctx(), msgs), "publish")
	want := map[string]settle.Reason{
		`"r3"`: settle.Rejected, `"r4"`: settle.SequenceFailed, `"r5"`: settle.SequenceFailed,
		`"e1"`: settle.MaxRetriesExceeded, `"e2"`: settle.SequenceFailed, `"e3"`: settle.SequenceFailed,
		`u2 is not JSON`: settle.Deserialize, `"u3"`: settle.SequenceFailed,
		bodies[12]: settle.Oversize, `"o3"`: settle.SequenceFailed,
	}
	for _, m := range r.deadLetters(len(want)) {
		if reason := want[string(m.Body)]; reason == "" || m.text(header.DeathReason) != string(reason) {
			w.t.Errorf("%.20q died of %q, want %q", m.Body, m.text(header.DeathReason), reason)
		}
	}
	c.clean()
	r.orderedEmpty()
	called := map[string]bool{}
	for _, call := range c.all() {
		called[call.Body] = true
	}
	for _, body := range []string{`"r1"`, `"r2"`, `"u1"`, `"o1"`, `"n1"`, `"n2"`} {
		if !called[body] {
			w.t.Errorf("%s was not handled", body)
		}
	}
	for _, body := range []string{`"r4"`, `"r5"`, `"e2"`, `"e3"`, `"u3"`, `"o3"`} {
		if called[body] {
			w.t.Errorf("%s was handled although its key had failed", body)
		}
	}
}
