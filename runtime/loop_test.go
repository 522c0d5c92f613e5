package runtime_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

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

// run starts a runtime and returns a function that drains it and returns what Run returned.
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
		body, _ := json.Marshal(order{ID: id})
		if err := p.Publish(f.t.Context(), []broker.Message{{ID: string(rune('a' + id)), Body: body}}); err != nil {
			f.t.Fatal(err)
		}
	}
}

type call struct {
	ID      int
	Retries uint32
	At      time.Duration
}

func TestRetriesThenDies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		var calls []call
		var deaths []string
		began := time.Now()
		stop := f.run(
			runtime.Handle("orders", runtime.HandlerFunc[order](func(_ context.Context, o order, m *runtime.Metadata) runtime.Outcome {
				calls = append(calls, call{o.ID, m.RetryCount, time.Since(began)})
				return runtime.Retry.Because("no")
			}), runtime.MaxRetries(3)),
			runtime.HandleDead("orders", runtime.DeadHandlerFunc[order](func(_ context.Context, o order, m *runtime.DeadMetadata) {
				deaths = append(deaths, string(m.Death.Reason)+" "+m.Death.OriginalQueue+" "+m.Death.Detail)
			})),
		)
		time.Sleep(time.Second)
		f.publish(1)
		time.Sleep(10 * time.Minute)
		if err := stop(); err != nil {
			t.Error(err)
		}
		want := []call{{1, 0, time.Second}, {1, 1, 6 * time.Second}, {1, 2, 36 * time.Second}, {1, 3, 156 * time.Second}}
		if diff := cmp.Diff(want, calls); diff != "" {
			t.Error(diff)
		}
		if diff := cmp.Diff([]string{"max_retries_exceeded orders no"}, deaths); diff != "" {
			t.Error(diff)
		}
	})
}
