package runtime_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/memory"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/config"
)

type order struct {
	ID int `json:"id"`
}

// fixture is a runtime on an in-memory broker of its own.
type fixture struct {
	t      *testing.T
	cfg    *config.RuntimeConfig
	server *memory.Server
	driver broker.Driver
	key    string
}

func newFixture(t *testing.T, change func(*config.RuntimeConfig)) *fixture {
	cfg := &config.RuntimeConfig{
		APIVersion: config.APIVersion, Kind: config.Kind,
		Brokers: []config.Broker{{Name: "mem", Kind: "memory"}},
		Topologies: []config.Topology{{Name: "orders", Broker: "mem", Queue: "orders", DeadLetter: "orders-dlq",
			HoldQueues: []config.Hold{{Delay: config.Duration(5 * time.Second)}, {Delay: config.Duration(30 * time.Second)}, {Delay: config.Duration(120 * time.Second)}}}},
		Consumers: []config.Consumer{{Group: "workers", Topology: "orders"}},
	}
	if change != nil {
		change(cfg)
	}
	s := memory.New(memory.Options{})
	return &fixture{t: t, cfg: cfg, server: s, driver: memory.Driver(s)}
}

// run starts a runtime, in a synctest bubble, and returns a function that drains it and returns what Run returned.
func (f *fixture) run(opts ...runtime.Option) (stop func() error) {
	f.t.Helper()
	all := append([]runtime.Option{runtime.Drivers(f.driver), runtime.Config(f.cfg), runtime.Declare(), runtime.HTTPAddr(""), runtime.Pod("pod-0"),
		runtime.Registerer(prometheus.NewRegistry()), runtime.Logger(slog.New(slog.NewTextHandler(f.t.Output(), nil)))}, opts...)
	r, err := runtime.New(all...)
	if err != nil {
		f.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	synctest.Wait() // it consumes
	return func() error { cancel(); return <-done }
}

func (f *fixture) publish(ids ...int) {
	f.t.Helper()
	c, err := f.driver.OpenClient(f.t.Context(), broker.Config{})
	if err != nil {
		f.t.Fatal(err)
	}
	defer c.Close(f.t.Context())
	decl, err := f.cfg.Topologies[0].Declaration()
	if err != nil {
		f.t.Fatal(err)
	}
	p, err := c.Publisher(f.t.Context(), decl)
	if err != nil {
		f.t.Fatal(err)
	}
	for _, id := range ids {
		body, err := json.Marshal(order{ID: id})
		if err != nil {
			f.t.Fatal(err)
		}
		if err := p.Publish(f.t.Context(), []broker.Message{{ID: "m" + strconv.Itoa(id), Key: f.key, Body: body}}); err != nil {
			f.t.Fatal(err)
		}
	}
}

// put publishes as a foreign client would.
func (f *fixture) put(m ...memory.Raw) {
	f.t.Helper()
	if err := f.server.Put("orders", m...); err != nil {
		f.t.Fatal(err)
	}
}

// left is how many messages a queue has, settled ones not counted.
func (f *fixture) left(queue string) int {
	ready, unsettled := f.server.Counts(queue)
	return ready + unsettled
}

func (f *fixture) wantLeft(counts map[string]int) {
	f.t.Helper()
	for queue, want := range counts {
		if got := f.left(queue); got != want {
			f.t.Errorf("%s: %d messages, want %d", queue, got, want)
		}
	}
}

// record is a handler that notes its calls and answers from a script, the last entry again and again.
type record struct {
	mu     sync.Mutex
	began  time.Time
	calls  []call
	script []runtime.Outcome
}

type call struct {
	ID      int
	Retries uint32
	At      time.Duration
}

func script(outcomes ...runtime.Outcome) *record {
	return &record{began: time.Now(), script: outcomes}
}

func (r *record) Handle(_ context.Context, o order, m *runtime.Metadata) runtime.Outcome {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := min(len(r.calls), len(r.script)-1)
	r.calls = append(r.calls, call{o.ID, m.RetryCount, time.Since(r.began)})
	return r.script[n]
}

func (r *record) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.calls)
}

func (r *record) want(t *testing.T, calls ...call) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if diff := cmp.Diff(calls, r.calls); diff != "" {
		t.Error("calls (-want +got):", diff)
	}
}

// drains stops and fails the test unless the drain was clean.
func drains(t *testing.T, stop func() error) {
	t.Helper()
	if err := stop(); err != nil {
		t.Error("drain:", err)
	}
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
