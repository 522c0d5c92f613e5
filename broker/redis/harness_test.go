package redis

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/codec"
	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// bound is how long a test waits for something that should come soon.
const bound = 30 * time.Second

// bench is a server with a client, an admin and a plain connection.
type bench struct {
	t        testing.TB
	endpoint json.RawMessage
	client   broker.Client
	admin    broker.Admin
	raw      *goredis.Client
	log      *logBook
}

// newBench uses the shared server.
func newBench(t testing.TB) *bench {
	t.Helper()
	addr := testenv.Redis(t).Addr(t)
	return benchOn(t, addr, addr)
}

// benchOn connects to a server; the client goes through clientAddr, such as a proxy's.
func benchOn(t testing.TB, addr, clientAddr string) *bench {
	t.Helper()
	return benchWith(t, endpointOf(standalone, addr), endpointOf(standalone, clientAddr), addr)
}

func benchWith(t testing.TB, adminEndpoint, clientEndpoint json.RawMessage, rawAddr string) *bench {
	t.Helper()
	b := &bench{t: t, endpoint: clientEndpoint, log: &logBook{}}
	logger := slog.New(b.log.handler(t))
	b.client = openTestClient(t, broker.Config{Endpoint: clientEndpoint, Name: t.Name(), Logger: logger})
	admin, err := Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: adminEndpoint, Name: t.Name()})
	if err != nil {
		t.Fatal(err)
	}
	b.admin = admin
	t.Cleanup(func() { closeBounded(t, admin) })
	b.raw = goredis.NewClient(&goredis.Options{Addr: rawAddr, Protocol: 2, DisableIdentity: true})
	t.Cleanup(func() { _ = b.raw.Close() })
	return b
}

// on is the bench for a subtest.
func (b *bench) on(t testing.TB) *bench {
	t.Helper()
	c := *b
	c.t = t
	return &c
}

func openTestClient(t testing.TB, cfg broker.Config) broker.Client {
	t.Helper()
	c, err := Driver.OpenClient(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeBounded(t, c) })
	return c
}

func closeBounded(t testing.TB, c interface{ Close(context.Context) error }) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	if err := c.Close(ctx); err != nil {
		t.Logf("closing: %v", err)
	}
}

func declaration(t testing.TB, s topology.Spec) broker.Declaration {
	t.Helper()
	top, err := topology.Derive(s)
	if err != nil {
		t.Fatal(err)
	}
	return broker.Declaration{Topology: top}
}

// orders is a topology with two short tiers and a dead-letter queue, under a name of its own.
func orders(t testing.TB) topology.Spec {
	t.Helper()
	return topology.Spec{Queue: testenv.RedisServer{}.Queue("orders"), Holds: []time.Duration{100 * time.Millisecond, 400 * time.Millisecond}, DeadLetter: true}
}

func (b *bench) declare(s topology.Spec) broker.Declaration {
	b.t.Helper()
	d := declaration(b.t, s)
	if err := b.admin.Declare(b.t.Context(), d); err != nil {
		b.t.Fatal(err)
	}
	return d
}

func (b *bench) subscribe(d broker.Declaration, prefetch int) *subscription {
	b.t.Helper()
	return b.subscribeAs(broker.Subscribe{Declaration: d, Prefetch: prefetch, Concurrency: 1, Lease: 30 * time.Second, Consumer: "test"})
}

func (b *bench) subscribeAs(in broker.Subscribe) *subscription {
	b.t.Helper()
	s, err := b.client.Subscribe(b.t.Context(), in)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { closeBounded(b.t, s) })
	return s.(*subscription)
}

func (b *bench) publish(d broker.Declaration, messages ...broker.Message) {
	b.t.Helper()
	p, err := b.client.Publisher(b.t.Context(), d)
	if err != nil {
		b.t.Fatal(err)
	}
	defer closeBounded(b.t, p)
	if err := p.Publish(b.t.Context(), messages); err != nil {
		b.t.Fatal(err)
	}
}

func messages(prefix string, n int) []broker.Message {
	out := make([]broker.Message, n)
	for i := range out {
		id := fmt.Sprintf("%s%03d", prefix, i)
		out[i] = broker.Message{ID: id, Body: []byte(id)}
	}
	return out
}

// receive returns the next n deliveries; a subscription's prefetch must not let more come.
func receive(t testing.TB, s broker.Subscription, n int) []*broker.Delivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	var out []*broker.Delivery
	for len(out) < n {
		ds, err := s.Receive(ctx)
		if err != nil {
			t.Fatalf("received %d of %d: %v", len(out), n, err)
		}
		out = append(out, ds...)
	}
	if len(out) > n {
		t.Fatalf("received %d, want %d", len(out), n)
	}
	return out
}

func act(kind settle.Kind, ds ...*broker.Delivery) []broker.Settlement {
	out := make([]broker.Settlement, len(ds))
	for i, d := range ds {
		out[i] = broker.Settlement{Delivery: d, Action: settle.Action{Kind: kind}}
	}
	return out
}

func mustSettle(t testing.TB, s broker.Subscription, batch []broker.Settlement) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	if err := s.Settle(ctx, batch); err != nil {
		t.Fatal(err)
	}
}

// lostItems checks that exactly these of a batch were refused as lost.
func lostItems(t testing.TB, err error, want ...int) {
	t.Helper()
	e, ok := errors.AsType[*broker.SettleError](err)
	if !ok {
		t.Fatalf("got %v, want a *SettleError", err)
	}
	var got []int
	for _, it := range e.Items {
		if !errors.Is(it.Err, broker.ErrLost) {
			t.Errorf("item %d: %v, want it lost", it.Index, it.Err)
		}
		got = append(got, it.Index)
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Fatalf("items %v were refused, want %v", got, want)
	}
}

// copying is a settlement with the headers that the runtime would stamp.
func copying(d *broker.Delivery, a settle.Action) broker.Settlement {
	facts := header.Parse(d.Headers)
	return broker.Settlement{Delivery: d, Action: a, Stamp: header.Stamp(nil, facts, a, "orders", d.Native.DeliveryID(), time.Now())}
}

func bodies(ds []*broker.Delivery) []string {
	out := make([]string, len(ds))
	for i, d := range ds {
		out[i] = string(d.Body)
	}
	return out
}

// main, dead and hold are the keys of a declaration.
func main(d broker.Declaration) string { return physical(d.Topology, d.Topology.Queue) }
func dead(d broker.Declaration) string { return physical(d.Topology, d.Topology.DeadLetter) }
func holdKey(d broker.Declaration, i int) string {
	return physical(d.Topology, d.Topology.Holds[i].Queue)
}

// pending says who has how many entries.
func (b *bench) pending(d broker.Declaration) map[string]int64 {
	b.t.Helper()
	p, err := b.raw.XPending(b.t.Context(), main(d), d.Topology.Queue).Result()
	if err != nil {
		b.t.Fatal(err)
	}
	return p.Consumers
}

// steal gives entries to another consumer, as a reaper of somebody else does.
func (b *bench) steal(d broker.Declaration, ds ...*broker.Delivery) {
	b.t.Helper()
	var ids []string
	for _, x := range ds {
		ids = append(ids, x.Native.DeliveryID())
	}
	err := b.raw.XClaimJustID(b.t.Context(), &goredis.XClaimArgs{Stream: main(d), Group: d.Topology.Queue, Consumer: "thief", Messages: ids}).Err()
	if err != nil {
		b.t.Fatal(err)
	}
}

// logBook keeps what is logged.
type logBook struct {
	mu    sync.Mutex
	lines []string
}

func (l *logBook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, string(p))
	return len(p), nil
}

func (l *logBook) handler(testing.TB) slog.Handler {
	return slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelInfo})
}

func (l *logBook) has(parts ...string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.lines {
		all := true
		for _, p := range parts {
			all = all && strings.Contains(line, p)
		}
		if all {
			return true
		}
	}
	return false
}

// worker is a running runtime with one consumer.
type worker struct {
	rt     *runtime.Runtime
	reg    *prometheus.Registry
	cancel context.CancelFunc
	done   chan error
}

// work starts a runtime on a declaration.
func (b *bench) work(d broker.Declaration, handle func(context.Context, *runtime.Metadata) runtime.Outcome, opts ...runtime.HandleOption) *worker {
	b.t.Helper()
	w := &worker{reg: prometheus.NewRegistry(), done: make(chan error, 1)}
	var err error
	w.rt, err = runtime.New(runtime.Drivers(Driver), runtime.HTTPAddr(""), runtime.Pod("pod"), runtime.Registerer(w.reg), runtime.Logger(slog.New(b.log.handler(b.t))),
		runtime.Config(&config.RuntimeConfig{
			APIVersion: config.APIVersion, Kind: config.Kind,
			Brokers:    []config.Broker{{Name: "b", Kind: topology.Redis, Endpoint: b.endpoint}},
			Topologies: []config.Topology{config.FromDeclaration("t", "", "b", d)},
			Consumers:  []config.Consumer{{Group: "g", Topology: "t"}},
		}),
		runtime.Handle("t", runtime.HandlerFunc[[]byte](func(ctx context.Context, _ []byte, m *runtime.Metadata) runtime.Outcome { return handle(ctx, m) }),
			append([]runtime.HandleOption{runtime.Codec(codec.Raw)}, opts...)...))
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	w.cancel = cancel
	go func() { w.done <- w.rt.Run(ctx) }()
	b.t.Cleanup(func() { _ = w.stop() })
	return w
}

func (w *worker) stop() error {
	w.cancel()
	err := <-w.done
	w.done <- err
	return err
}

// metric is the sum of a counter's series that have a label value.
func (w *worker) metric(t testing.TB, name, label, value string) float64 {
	t.Helper()
	families, err := w.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == label && l.GetValue() == value {
					sum += m.GetCounter().GetValue()
				}
			}
		}
	}
	return sum
}
