package brokertest

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/codec"
	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// Bench measures a backend, the same on every broker: publishing, receiving and acknowledging, holding, the whole
// delivery loop with a handler that does nothing, and how late held messages come back.
func Bench(b *testing.B, inst Instance, options json.RawMessage) {
	b.Helper()
	for _, m := range []struct {
		name  string
		holds []time.Duration
		run   func(*bench)
	}{
		{"publish", nil, (*bench).publish},
		{"ack", nil, (*bench).ack},
		{"hold", []time.Duration{time.Hour}, (*bench).hold},
		{"loop", nil, (*bench).loop},
		{"lateness", []time.Duration{heldFor}, (*bench).lateness},
	} {
		b.Run(m.name, func(b *testing.B) {
			w := newBench(b, inst, options, m.holds)
			defer w.close()
			m.run(w)
		})
	}
}

// Of the measurements.
const (
	benchBody     = 128
	benchBatch    = 100
	benchPrefetch = 500
	// heldFor and heldAtOnce: so many messages are held, at a rate at which all of them are there at one time.
	heldFor    = 16 * time.Second
	heldAtOnce = 20_000
	heldRate   = 2_000 // a second
)

// bench is a topology under measurement.
type bench struct {
	b      *testing.B
	inst   Instance
	decl   broker.Declaration
	admin  broker.Admin
	client broker.Client
	ctx    context.Context
	stop   context.CancelFunc
}

func newBench(b *testing.B, inst Instance, options json.RawMessage, holds []time.Duration) *bench {
	b.Helper()
	top, err := topology.Derive(topology.Spec{Queue: "bench." + strings.ToLower(rand.Text()[:8]), Holds: holds})
	w := &bench{b: b, inst: inst, decl: broker.Declaration{Topology: top, Options: options}}
	w.must(err)
	w.ctx, w.stop = context.WithTimeout(context.Background(), 10*time.Minute)
	w.admin, err = inst.Driver.OpenAdmin(w.ctx, inst.Admin)
	w.must(err)
	w.must(w.admin.Declare(w.ctx, w.decl))
	w.client, err = inst.Driver.OpenClient(w.ctx, inst.Client)
	w.must(err)
	return w
}

func (w *bench) must(err error) {
	w.b.Helper()
	if err != nil {
		w.b.Fatal(err)
	}
}

func (w *bench) close() {
	w.b.StopTimer()
	objects, err := w.inst.Driver.Objects(w.decl)
	w.must(err)
	w.must(w.client.Close(w.ctx))
	var names []string
	for i := len(objects) - 1; i >= 0; i-- {
		names = append(names, objects[i].Name)
	}
	_, err = w.admin.Delete(w.ctx, names)
	w.must(err)
	w.must(w.admin.Close(w.ctx))
	w.stop()
}

// fill publishes n messages.
func (w *bench) fill(n int) {
	p, err := w.client.Publisher(w.ctx, w.decl)
	w.must(err)
	body := make([]byte, benchBody)
	for n > 0 {
		msgs := make([]broker.Message, min(n, benchBatch))
		for i := range msgs {
			msgs[i] = broker.Message{ID: newID(), Body: body}
		}
		w.must(p.Publish(w.ctx, msgs))
		n -= len(msgs)
	}
	w.must(p.Close(w.ctx))
}

func (w *bench) publish() {
	w.b.ReportAllocs()
	w.b.ResetTimer()
	w.fill(w.b.N)
}

// settleAll settles every message with an action.
func (w *bench) settleAll(a settle.Action, stamp []header.Field) {
	w.fill(w.b.N)
	s, err := w.client.Subscribe(w.ctx, broker.Subscribe{Declaration: w.decl, Prefetch: benchPrefetch, Concurrency: benchPrefetch})
	w.must(err)
	w.b.ReportAllocs()
	w.b.ResetTimer()
	var batch []broker.Settlement
	for n := 0; n < w.b.N; n += len(batch) {
		ds, err := s.Receive(w.ctx)
		w.must(err)
		batch = batch[:0]
		for _, d := range ds {
			batch = append(batch, broker.Settlement{Delivery: d, Action: a, Stamp: stamp})
		}
		w.must(s.Settle(w.ctx, batch))
	}
}

func (w *bench) ack() { w.settleAll(settle.Action{Kind: settle.Done}, nil) }

func (w *bench) hold() {
	w.settleAll(settle.Action{Kind: settle.Hold, Delay: time.Hour, Retries: 1}, []header.Field{{Name: header.RetryCount, Value: int64(1)}})
}

// loop runs the real delivery loop.
func (w *bench) loop() {
	w.fill(w.b.N)
	driver := w.inst.Driver
	driver.OpenClient = func(context.Context, broker.Config) (broker.Client, error) { return w.client, nil }
	left := make(chan struct{}, w.b.N)
	rt, err := runtime.New(runtime.Drivers(driver), runtime.HTTPAddr(""), runtime.Registerer(prometheus.NewRegistry()),
		runtime.Logger(slog.New(slog.DiscardHandler)),
		runtime.Config(&config.RuntimeConfig{
			APIVersion: config.APIVersion, Kind: config.Kind,
			Brokers:    []config.Broker{{Name: "b", Kind: driver.Kind, Endpoint: w.inst.Client.Endpoint}},
			Topologies: []config.Topology{config.FromDeclaration("t", "", "b", w.decl)},
			Consumers:  []config.Consumer{{Group: "g", Topology: "t"}},
		}),
		runtime.Handle("t", runtime.HandlerFunc[[]byte](func(context.Context, []byte, *runtime.Metadata) runtime.Outcome {
			left <- struct{}{}
			return runtime.Ack
		}), runtime.Codec(codec.Raw), runtime.Prefetch(benchPrefetch)))
	w.must(err)
	ctx, cancel := context.WithCancel(w.ctx)
	ended := make(chan error, 1)
	w.b.ReportAllocs()
	w.b.ResetTimer()
	go func() { ended <- rt.Run(ctx) }()
	for range w.b.N {
		<-left
	}
	w.b.StopTimer()
	cancel()
	w.must(<-ended)
}

// lateness holds 20,000 messages at once and reports how long after their time they came back (B4). One run is one
// measurement, whatever the number of iterations.
func (w *bench) lateness() {
	w.fill(heldAtOnce)
	s, err := w.client.Subscribe(w.ctx, broker.Subscribe{Declaration: w.decl, Prefetch: heldRate / 10, Concurrency: heldRate / 10})
	w.must(err)
	action := settle.Action{Kind: settle.Hold, Delay: heldFor, Retries: 1}
	var late []time.Duration
	held := 0
	tick := time.NewTicker(100 * time.Millisecond) // the pace at which messages are held
	defer tick.Stop()
	w.b.ResetTimer()
	for len(late) < heldAtOnce {
		if held < heldAtOnce {
			<-tick.C
		}
		ds, err := s.Receive(w.ctx)
		w.must(err)
		now := time.Now()
		batch := make([]broker.Settlement, len(ds))
		for i, d := range ds {
			if due, back := header.Int(d.Headers[header.Due]); back {
				late = append(late, now.Sub(time.UnixMilli(due)))
				batch[i] = broker.Settlement{Delivery: d, Action: settle.Action{Kind: settle.Done}}
				continue
			}
			held++
			batch[i] = broker.Settlement{Delivery: d, Action: action, Stamp: []header.Field{
				{Name: header.RetryCount, Value: int64(1)}, {Name: header.Due, Value: now.Add(heldFor).UnixMilli()}}}
		}
		w.must(s.Settle(w.ctx, batch))
	}
	slices.Sort(late)
	if late[0] < -time.Millisecond {
		w.b.Errorf("a message came back %s early", -late[0])
	}
	w.b.ReportMetric(float64(late[len(late)/2].Microseconds())/1000, "ms-p50")
	w.b.ReportMetric(float64(late[len(late)*99/100].Microseconds())/1000, "ms-p99")
	w.b.ReportMetric(0, "ns/op")
}
