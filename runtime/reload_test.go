package runtime_test

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/broker/memory"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/config"
)

// volume is a directory like one that kubelet makes of a ConfigMap: the files are links through "..data", and an
// update swaps that one link.
type volume struct {
	t   *testing.T
	dir string
	n   int
}

func (v *volume) path() string { return filepath.Join(v.dir, "config.yaml") }

func (v *volume) write(c *config.RuntimeConfig) {
	v.t.Helper()
	b, err := config.Marshal(c)
	if err != nil {
		v.t.Fatal(err)
	}
	v.writeRaw(b)
}

func (v *volume) writeRaw(b []byte) {
	v.t.Helper()
	v.n++
	version := "..v" + strconv.Itoa(v.n)
	must := func(err error) {
		if err != nil {
			v.t.Fatal(err)
		}
	}
	must(os.Mkdir(filepath.Join(v.dir, version), 0o755))
	must(os.WriteFile(filepath.Join(v.dir, version, "config.yaml"), b, 0o644))
	must(os.Symlink(version, filepath.Join(v.dir, "..data_tmp")))
	must(os.Rename(filepath.Join(v.dir, "..data_tmp"), filepath.Join(v.dir, "..data")))
	if v.n == 1 {
		must(os.Symlink(filepath.Join("..data", "config.yaml"), v.path()))
	}
}

func until(t *testing.T, what string, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatal("not within 20 s: " + what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestReloadThroughTheDataSwap(t *testing.T) {
	server := memory.New(memory.Options{})
	cfg := func(generation string, change func(*config.RuntimeConfig)) *config.RuntimeConfig {
		c := &config.RuntimeConfig{APIVersion: config.APIVersion, Kind: config.Kind, Generation: generation,
			Brokers:    []config.Broker{{Name: "mem", Kind: "memory"}},
			Topologies: []config.Topology{{Name: "orders", Broker: "mem", Queue: "orders", DeadLetter: "orders-dlq", HoldQueues: []config.Hold{{Delay: config.Duration(20 * time.Millisecond)}}}},
			Consumers:  []config.Consumer{{Group: "workers", Topology: "orders"}}}
		if change != nil {
			change(c)
		}
		return c
	}
	v := &volume{t: t, dir: t.TempDir()}
	v.write(cfg("1", nil))
	var calls atomic.Int32
	var atOnce, most atomic.Int32
	gate := make(chan struct{})
	r, err := runtime.New(runtime.Drivers(memory.Driver(server)), runtime.ConfigFile(v.path()), runtime.Declare(), runtime.HTTPAddr(""),
		runtime.Registerer(prometheus.NewRegistry()), runtime.Logger(slog.New(slog.NewTextHandler(t.Output(), nil))),
		runtime.Handle("orders", runtime.HandlerFunc[order](func(ctx context.Context, o order, _ *runtime.Metadata) runtime.Outcome {
			calls.Add(1)
			n := atOnce.Add(1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			defer atOnce.Add(-1)
			if o.ID >= 100 {
				<-gate
				return runtime.Ack
			}
			return runtime.Retry
		})))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	put := func(id int) {
		t.Helper()
		if err := server.Put("orders", memory.Raw{Body: []byte(`{"id":` + strconv.Itoa(id) + `}`)}); err != nil {
			t.Fatal(err)
		}
	}
	dead := func() int { ready, _ := server.Counts("orders-dlq"); return ready }
	until(t, "consuming", func() bool { return r.Ready() })

	put(1)
	until(t, "dead after 11 calls", func() bool { return dead() == 1 })
	if calls.Load() != 11 {
		t.Errorf("%d calls with the default budget, want 11", calls.Load())
	}

	v.write(cfg("2", func(c *config.RuntimeConfig) { c.Consumers[0].Options.MaxRetries = new(uint32(2)) }))
	until(t, "generation 2", func() bool { return r.Status().Generation == "2" })
	calls.Store(0)
	put(2)
	until(t, "dead after 3 calls", func() bool { return dead() == 2 })
	if calls.Load() != 3 {
		t.Errorf("%d calls with the reloaded budget, want 3", calls.Load())
	}

	v.writeRaw([]byte("kind: RuntimeConfig\napiVersion: runtime.shove.dev/v1alpha1\nrequires: [time-travel]\n"))
	until(t, "the refusal", func() bool { return r.Status().ReloadError != "" })
	if r.Status().Generation != "2" {
		t.Error("the last good configuration is not in use any more")
	}

	v.write(cfg("3", func(c *config.RuntimeConfig) { c.Consumers[0].Paused = true }))
	until(t, "paused", func() bool { return r.Status().Consumers[0].State == runtime.StatePaused })
	put(3)
	if !r.Ready() {
		t.Error("a paused consumer makes the process unready")
	}

	v.write(cfg("4", func(c *config.RuntimeConfig) {
		c.Consumers[0].Options.Concurrency = new(3)
		c.Consumers[0].Options.RetryStrategy = new("InPlace")
	}))
	until(t, "dead after the pause", func() bool { return dead() == 3 })
	if got := r.Status().RestartRequired; len(got) != 1 {
		t.Errorf("restart required for %v, want retryStrategy alone", got)
	}
	most.Store(0)
	for id := range 10 {
		put(100 + id)
	}
	until(t, "three at once", func() bool { return atOnce.Load() == 3 })
	close(gate)
	until(t, "all handled", func() bool { ready, unsettled := server.Counts("orders"); return ready+unsettled == 0 })
	if most.Load() != 3 {
		t.Errorf("%d handlers at once after the reload, want 3", most.Load())
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
