package nats

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// bound is how long a test waits for something that should come soon.
const bound = 20 * time.Second

// bench is a server with a client, an admin and a raw connection.
type bench struct {
	t      testing.TB
	server *testServer
	mode   mode
	config broker.Config
	client broker.Client
	admin  broker.Admin
	raw    raw
}

func newBench(t testing.TB) *bench {
	t.Helper()
	return benchOn(t, startServer(t), mode{})
}

// newestServer is the one in this process, for what another version does in its own way.
func newestServer(t testing.TB) *testServer {
	t.Helper()
	return startServer(t, func(*server.Options) {})
}

func newestBench(t testing.TB) *bench {
	t.Helper()
	return benchOn(t, newestServer(t), mode{})
}

func benchOn(t testing.TB, s *testServer, m mode) *bench {
	t.Helper()
	b := &bench{t: t, server: s, mode: m, raw: newRaw(s), config: broker.Config{Endpoint: endpointOf(t, "nats://"+s.addr()), Name: t.Name()}}
	b.client = b.openClient(b.config)
	b.admin = b.openAdmin(b.config)
	return b
}

func (b *bench) openClient(cfg broker.Config) broker.Client {
	b.t.Helper()
	c, err := b.mode.driver().OpenClient(b.t.Context(), cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { closeBounded(b.t, c) })
	return c
}

func (b *bench) openAdmin(cfg broker.Config) broker.Admin {
	b.t.Helper()
	a, err := b.mode.driver().OpenAdmin(b.t.Context(), cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { closeBounded(b.t, a) })
	return a
}

func closeBounded(t testing.TB, c interface{ Close(context.Context) error }) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	if err := c.Close(ctx); err != nil {
		t.Logf("closing: %v", err)
	}
}

func credentials(c broker.Credentials) func(context.Context) (broker.Credentials, error) {
	return func(context.Context) (broker.Credentials, error) { return c, nil }
}

func declaration(t testing.TB, s topology.Spec, options string) broker.Declaration {
	t.Helper()
	top, err := topology.Derive(s)
	if err != nil {
		t.Fatal(err)
	}
	d := broker.Declaration{Topology: top}
	if options != "" {
		d.Options = json.RawMessage(options)
	}
	return d
}

func (b *bench) declare(s topology.Spec, options string) broker.Declaration {
	b.t.Helper()
	d := declaration(b.t, s, options)
	if err := b.admin.Declare(b.t.Context(), d); err != nil {
		b.t.Fatal(err)
	}
	return d
}

// orders is a topology with two short tiers and a dead-letter queue.
func orders() topology.Spec {
	return topology.Spec{Queue: "orders", Holds: []time.Duration{100 * time.Millisecond, 2 * time.Second}, DeadLetter: true}
}

func (b *bench) subscribe(d broker.Declaration, prefetch int) broker.Subscription {
	b.t.Helper()
	return b.subscribeAs(broker.Subscribe{Declaration: d, Prefetch: prefetch, Concurrency: prefetch})
}

func (b *bench) subscribeAs(in broker.Subscribe) broker.Subscription {
	b.t.Helper()
	s, err := b.client.Subscribe(b.t.Context(), in)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { closeBounded(b.t, s) })
	return s
}

func (b *bench) publisher(d broker.Declaration) broker.Publisher {
	b.t.Helper()
	p, err := b.client.Publisher(b.t.Context(), d)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { closeBounded(b.t, p) })
	return p
}

func messages(prefix string, n int) []broker.Message {
	out := make([]broker.Message, n)
	for i := range out {
		id := fmt.Sprintf("%s%04d", prefix, i)
		out[i] = broker.Message{ID: id, Body: []byte(id)}
	}
	return out
}

func (b *bench) publish(d broker.Declaration, msgs ...broker.Message) {
	b.t.Helper()
	if err := b.publisher(d).Publish(b.t.Context(), msgs); err != nil {
		b.t.Fatal(err)
	}
}

// receive returns the next n deliveries, and fails when there are more at once.
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

// nothing fails when a delivery comes within d.
func nothing(t testing.TB, s broker.Subscription, d time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	if ds, err := s.Receive(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("received %d deliveries and %v, want none", len(ds), err)
	}
}

func act(kind settle.Kind, ds ...*broker.Delivery) []broker.Settlement {
	out := make([]broker.Settlement, len(ds))
	for i, d := range ds {
		out[i] = broker.Settlement{Delivery: d, Action: settle.Action{Kind: kind}}
	}
	return out
}

// copying is a settlement with the headers that the runtime would stamp.
func copying(d *broker.Delivery, a settle.Action) broker.Settlement {
	return broker.Settlement{Delivery: d, Action: a, Stamp: header.Stamp(nil, header.Parse(d.Headers), a, "orders", d.Native.DeliveryID(), time.Now())}
}

func mustSettle(t testing.TB, s broker.Subscription, batch ...broker.Settlement) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	if err := s.Settle(ctx, batch); err != nil {
		t.Fatal(err)
	}
}

// settleItem finds the error of one settlement.
func settleItem(t testing.TB, err error, index int) error {
	t.Helper()
	e, ok := errors.AsType[*broker.SettleError](err)
	if !ok {
		t.Fatalf("got %v, want a *SettleError", err)
	}
	for _, it := range e.Items {
		if it.Index == index {
			return it.Err
		}
	}
	return nil
}

// stored reads all messages of a stream on subjects that match.
func (b *bench) stored(stream, filter string) []*jetstream.RawStreamMsg {
	b.t.Helper()
	s, err := b.raw.js.Stream(b.t.Context(), stream)
	if err != nil {
		b.t.Fatal(err)
	}
	var out []*jetstream.RawStreamMsg
	for seq := uint64(1); ; seq++ {
		m, err := s.GetMsg(b.t.Context(), seq, jetstream.WithGetMsgSubject(filter))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return out
		}
		if err != nil {
			b.t.Fatal(err)
		}
		out = append(out, m)
		seq = m.Sequence
	}
}

// eventually waits until a stream holds n messages on subjects that match.
func (b *bench) eventually(stream, filter string, n int) []*jetstream.RawStreamMsg {
	b.t.Helper()
	var got []*jetstream.RawStreamMsg
	testenv.Eventually(b.t, bound, func() error {
		if got = b.stored(stream, filter); len(got) != n {
			return fmt.Errorf("stream %q has %d messages on %q, want %d", stream, len(got), filter, n)
		}
		return nil
	})
	return got
}

func (b *bench) put(subject string, h natsgo.Header, body string) {
	b.t.Helper()
	if _, err := b.raw.js.PublishMsg(b.t.Context(), &natsgo.Msg{Subject: subject, Header: h, Data: []byte(body)}); err != nil {
		b.t.Fatal(err)
	}
}

// consumerInfo is what the server says of a durable.
func (b *bench) consumerInfo(stream, name string) *jetstream.ConsumerInfo {
	b.t.Helper()
	k, err := b.raw.js.Consumer(b.t.Context(), stream, name)
	if err != nil {
		b.t.Fatal(err)
	}
	return k.CachedInfo()
}
