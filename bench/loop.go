package main

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/memory"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/codec"
	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/settle"
)

// body is 128 bytes, as in every benchmark here.
var body = make([]byte, 128)

// setup is one topology on one broker.
type setup struct {
	driver   broker.Driver
	kind     config.Broker
	options  []byte
	prefetch int
	holds    []time.Duration
	// concurrency is that of handlers; zero: the default.
	concurrency int
}

func (s setup) config() *config.RuntimeConfig {
	t := config.Topology{Name: "bench", Broker: "bench", Queue: "bench", DeadLetter: "bench-dlq", Options: s.options}
	for _, d := range s.holds {
		t.HoldQueues = append(t.HoldQueues, config.Hold{Delay: config.Duration(d)})
	}
	b := s.kind
	b.Name = "bench"
	options := config.Options{Prefetch: &s.prefetch}
	if s.concurrency > 0 {
		options.Concurrency = &s.concurrency
	}
	return &config.RuntimeConfig{APIVersion: config.APIVersion, Kind: config.Kind, Brokers: []config.Broker{b}, Topologies: []config.Topology{t},
		Consumers: []config.Consumer{{Group: "bench", Topology: "bench", Options: options}}}
}

func (s setup) declaration() broker.Declaration {
	d, err := s.config().Topologies[0].Declaration()
	if err != nil {
		panic(err) // a bug of this program
	}
	return d
}

func (s setup) runtime(handle func(m *runtime.Metadata) runtime.Outcome) (*runtime.Runtime, error) {
	return runtime.New(runtime.Drivers(s.driver), runtime.Config(s.config()), runtime.HTTPAddr(""), runtime.Registerer(prometheus.NewRegistry()),
		runtime.Logger(slog.New(slog.DiscardHandler)),
		runtime.Handle("bench", runtime.HandlerFunc[[]byte](func(_ context.Context, _ []byte, m *runtime.Metadata) runtime.Outcome { return handle(m) }),
			runtime.Codec(codec.Raw)))
}

// consume runs our runtime until the handler said done, and measures from start to the end of the drain.
func (s setup) consume(n int, handle func(m *runtime.Metadata) runtime.Outcome, done <-chan struct{}, started func()) (sample, error) {
	r, err := s.runtime(handle)
	if err != nil {
		return sample{}, err
	}
	stop := watch(n)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	if started != nil {
		started()
	}
	select {
	case <-done:
	case err := <-ended:
		cancel()
		return sample{}, errors.Join(errors.New("the runtime ended"), err)
	case <-time.After(2 * time.Minute):
		cancel()
		return sample{}, errors.Join(errors.New("not done within 2 minutes"), <-ended)
	}
	out := stop()
	cancel()
	return out, <-ended
}

// countdown closes a channel at the n-th call.
type countdown struct {
	left atomic.Int64
	done chan struct{}
}

func newCountdown(n int) *countdown {
	c := &countdown{done: make(chan struct{})}
	c.left.Store(int64(n))
	return c
}

func (c *countdown) tick() {
	if c.left.Add(-1) == 0 {
		close(c.done)
	}
}

// loopOnMemory compares the delivery loop with the in-memory broker alone.
func loopOnMemory(name string) (pair, error) {
	const n = 200_000
	fresh := func() (setup, *memory.Server, error) {
		server := memory.New(memory.Options{})
		s := setup{driver: memory.Driver(server), kind: config.Broker{Kind: "memory"}, prefetch: 100}
		a, err := s.driver.OpenAdmin(context.Background(), broker.Config{})
		if err != nil {
			return s, nil, err
		}
		if err := a.Declare(context.Background(), s.declaration()); err != nil {
			return s, nil, err
		}
		msgs := make([]memory.Raw, n)
		for i := range msgs {
			msgs[i] = memory.Raw{Body: body}
		}
		return s, server, server.Put("bench", msgs...)
	}
	return pair{
		name: name, maxCPU: 1500, maxAllocs: 4,
		ours: func() (sample, error) {
			s, _, err := fresh()
			if err != nil {
				return sample{}, err
			}
			c := newCountdown(n)
			return s.consume(n, func(*runtime.Metadata) runtime.Outcome { c.tick(); return runtime.Ack }, c.done, nil)
		},
		baseline: func() (sample, error) {
			s, _, err := fresh()
			if err != nil {
				return sample{}, err
			}
			client, err := s.driver.OpenClient(context.Background(), broker.Config{})
			if err != nil {
				return sample{}, err
			}
			defer client.Close(context.Background())
			stop := watch(n)
			sub, err := client.Subscribe(context.Background(), broker.Subscribe{Declaration: s.declaration(), Prefetch: s.prefetch, Concurrency: 10, Lease: 30 * time.Second})
			if err != nil {
				return sample{}, err
			}
			var batch []broker.Settlement
			for left := n; left > 0; {
				ds, err := sub.Receive(context.Background())
				if err != nil {
					return sample{}, err
				}
				batch = batch[:0]
				for _, d := range ds {
					batch = append(batch, broker.Settlement{Delivery: d, Action: settle.Action{Kind: settle.Done}})
				}
				if err := sub.Settle(context.Background(), batch); err != nil {
					return sample{}, err
				}
				left -= len(ds)
			}
			return stop(), nil
		},
	}, nil
}
