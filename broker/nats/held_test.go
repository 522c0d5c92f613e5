package nats

import (
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// TestB4_ManyHeld: thousands of messages wait at once. They are in the server and not in the consumer's memory, none
// comes early, and the last is not much later than the first. bench/ measures the lateness of 100,000.
func TestB4_ManyHeld(t *testing.T) {
	addr, _ := startProcess(t, childConfig{Store: t.TempDir(), Port: testenv.FreePort(t)}) // its memory is not ours
	b := &bench{t: t, raw: rawOn(t, addr), config: broker.Config{Endpoint: endpointOf(t, addr)}}
	b.client, b.admin = b.openClient(b.config), b.openAdmin(b.config)
	const n, delay = 5_000, 3 * time.Second
	d := b.declare(topology.Spec{Queue: "many", Holds: []time.Duration{delay}}, "")
	s := b.subscribe(d, 500)
	b.publish(d, messages("m", n)...)
	before := heapOf(&runtime.MemStats{})
	for held := 0; held < n; {
		ds := receiveSome(t, s, 500)
		batch := make([]broker.Settlement, len(ds))
		for i, m := range ds {
			batch[i] = copying(m, settle.Action{Kind: settle.Hold, Delay: delay, Retries: 1})
			batch[i].Stamp = append(batch[i].Stamp, header.Field{Name: "held-at", Value: strconv.FormatInt(time.Now().UnixNano(), 10)})
		}
		mustSettle(t, s, batch...)
		held += len(ds)
	}
	if got, err := b.admin.Depths(t.Context(), []string{"many-hold-3s", "many"}); err != nil || got[0].Ready != broker.Known(n) || got[1].Ready != broker.Known(0) {
		t.Logf("counted while they become due: %+v, %v", got, err)
	}
	// A list of what is held would be more than that.
	if grown := heapOf(&runtime.MemStats{}) - before; grown > 200*n {
		t.Errorf("the heap grew by %d bytes over %d held messages", grown, n)
	}
	var late time.Duration
	for back := 0; back < n; {
		ds := receiveSome(t, s, 500)
		now := time.Now()
		for _, m := range ds {
			at, ok := header.Int(m.Headers["held-at"])
			if !ok {
				t.Fatalf("headers %v", m.Headers)
			}
			waited := now.Sub(time.Unix(0, at))
			if waited < delay {
				t.Fatalf("%s came after %s of %s", m.Body, waited, delay)
			}
			late = max(late, waited-delay)
		}
		mustSettle(t, s, act(settle.Done, ds...)...)
		back += len(ds)
	}
	if late > bound/4 {
		t.Errorf("the latest came %s late", late)
	}
	t.Logf("the latest came %s late", late)
}

func heapOf(m *runtime.MemStats) int64 {
	runtime.GC()
	runtime.ReadMemStats(m)
	return int64(m.HeapAlloc)
}

// TestAdoptedDurable: a durable that somebody made with limits of its own is asked for no more than it gives.
func TestAdoptedDurable(t *testing.T) {
	b := newBench(t)
	if _, err := b.raw.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "orders", Subjects: []string{"orders"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.raw.js.CreateConsumer(t.Context(), "orders", jetstream.ConsumerConfig{Durable: "orders", AckPolicy: jetstream.AckExplicitPolicy,
		MaxRequestBatch: 3, MaxRequestExpires: time.Second, AckWait: 3 * time.Second, MaxDeliver: -1, MaxAckPending: -1}); err != nil {
		t.Fatal(err)
	}
	spec := orders()
	spec.External = true
	d := b.declare(spec, "")
	s := b.subscribe(d, 10)
	nothing(t, s, 1200*time.Millisecond) // the first requests expire
	for i := range 20 {
		b.put("orders", nil, strconv.Itoa(i))
	}
	for seen := 0; seen < 20; {
		ds := receiveSome(t, s, 10)
		mustSettle(t, s, act(settle.Done, ds...)...)
		seen += len(ds)
	}
	if got := b.consumerInfo("orders", "orders").Config; got.MaxRequestBatch != 3 || got.AckWait != 3*time.Second {
		t.Errorf("the durable was changed: %+v", got)
	}
}
