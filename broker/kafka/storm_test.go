package kafka

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/brokertest"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/codec"
	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/topology"
)

// worker is a runtime that consumes: what a pod is.
func worker(driver broker.Driver, d broker.Declaration, endpoint []byte, log slog.Handler, handle runtime.HandlerFunc[[]byte]) (*runtime.Runtime, error) {
	return runtime.New(runtime.Drivers(driver), runtime.HTTPAddr(""), runtime.Registerer(prometheus.NewRegistry()), runtime.Logger(slog.New(log)),
		runtime.Config(&config.RuntimeConfig{
			APIVersion: config.APIVersion, Kind: config.Kind,
			Brokers:    []config.Broker{{Name: "b", Kind: driver.Kind, Endpoint: endpoint}},
			Topologies: []config.Topology{config.FromDeclaration("orders", "", "b", d)},
			Consumers:  []config.Consumer{{Group: "workers", Topology: "orders"}},
		}),
		runtime.Handle("orders", handle, runtime.Codec(codec.Raw), runtime.MaxRetries(1), runtime.Prefetch(20), runtime.Concurrency(5)))
}

// outcome retries bodies that end in 0 once and rejects those that end in 5.
func outcome(body string, retries uint32) runtime.Outcome {
	switch {
	case strings.HasSuffix(body, "0") && retries == 0:
		return runtime.Retry
	case strings.HasSuffix(body, "5"):
		return runtime.Reject
	}
	return runtime.Ack
}

// Three consumers join and leave under load: nothing is lost, and nothing is handled twice, because what runs may
// finish before its partition moves.
func TestRebalanceStorm(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bench) {
		d := b.declare(6, 50*time.Millisecond, 200*time.Millisecond)
		var ledger brokertest.Ledger
		var handled set
		handle := func(_ context.Context, body []byte, m *runtime.Metadata) runtime.Outcome {
			id := m.MessageID()
			ledger.Called(id, m.RetryCount, m.DeferCount)
			time.Sleep(time.Duration(rand.IntN(5)) * time.Millisecond)
			o := outcome(string(body), m.RetryCount)
			if o.Verdict == runtime.Ack.Verdict {
				ledger.Acked(id)
				handled.add(id)
			}
			return o
		}
		published, stop := 0, make(chan struct{})
		var turns atomic.Int32
		var wg sync.WaitGroup
		wg.Go(func() {
			c, err := b.mode.driver().OpenClient(context.Background(), b.cfg)
			if err != nil {
				t.Error(err)
				return
			}
			defer closeBounded(t, c)
			p, err := c.Publisher(context.Background(), d)
			if err != nil {
				t.Error(err)
				return
			}
			for ; ; published += 10 {
				select {
				case <-stop:
					return
				case <-time.After(10 * time.Millisecond):
				}
				var msgs []broker.Message
				for i := range 10 {
					id := fmt.Sprintf("m%06d", published+i)
					msgs = append(msgs, broker.Message{ID: id, Body: []byte(id)})
					ledger.Published(id)
				}
				ctx, cancel := short()
				if err := p.Publish(ctx, msgs); err != nil {
					t.Error(err)
				}
				cancel()
			}
		})
		for i := range 3 {
			wg.Go(func() {
				for ; ; turns.Add(1) {
					rt, err := worker(b.mode.driver(), d, b.cfg.Endpoint, slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}), handle)
					if err != nil {
						t.Error(err)
						return
					}
					// The last turn goes on until everything is worked off.
					ctx, cancel := context.WithTimeout(context.Background(), time.Duration(300+rand.IntN(700)+200*i)*time.Millisecond)
					select {
					case <-stop:
						cancel()
						return
					default:
					}
					if err := rt.Run(ctx); err != nil {
						t.Errorf("a consumer ended with %v", err)
					}
					cancel()
				}
			})
		}
		const rounds = 24 // of joining and leaving, under load
		testenv.Eventually(t, time.Minute, func() error {
			if n := turns.Load(); n < rounds {
				return fmt.Errorf("%d rounds of %d", n, rounds)
			}
			return nil
		})
		close(stop)
		wg.Wait()
		b.workOff(d, handle)
		b.books(d, &ledger)
		t.Logf("%d published, %d handled, %d duplicates", published, handled.len(), ledger.Duplicates())
	})
}

// workOff runs one consumer until nothing is left.
func (b *bench) workOff(d broker.Declaration, handle runtime.HandlerFunc[[]byte]) {
	b.t.Helper()
	rt, err := worker(b.mode.driver(), d, b.cfg.Endpoint, slog.NewTextHandler(b.t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}), handle)
	must(b.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- rt.Run(ctx) }()
	b.drained(d)
	cancel()
	if err := <-ended; err != nil {
		b.t.Errorf("the last consumer ended with %v", err)
	}
}

// drained waits until nothing is left in the main and hold topics.
func (b *bench) drained(d broker.Declaration) {
	b.t.Helper()
	passes := 0
	testenv.Eventually(b.t, time.Minute, func() error {
		for _, q := range d.Topology.Queues() {
			if q.Role == topology.RoleDeadLetter {
				continue
			}
			if ready, inFlight := b.raw.Count(b.t, d, q); ready+inFlight > 0 {
				passes = 0
				return fmt.Errorf("topic %q has %d ready and %d in flight", q.Name, ready, inFlight)
			}
		}
		if passes++; passes < 3 {
			return errors.New("looking again")
		}
		return nil
	})
}

// books closes the ledger with what is dead.
func (b *bench) books(d broker.Declaration, ledger *brokertest.Ledger) {
	b.t.Helper()
	for _, m := range b.raw.Take(b.t, d, topology.Queue{Name: d.Topology.DeadLetter, Role: topology.RoleDeadLetter}) {
		id, _ := m.Headers.Text(header.MessageID)
		ledger.Dead(id)
	}
	if err := ledger.Check(); err != nil {
		b.t.Error(err)
	}
}
