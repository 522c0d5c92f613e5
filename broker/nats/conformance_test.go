package nats

import (
	"context"
	"encoding/json"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/brokertest"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/natsserver"
	"github.com/shove-dev/shove/topology"
)

// shortAckWait lets what is lost on its way to a consumer come back soon.
var shortAckWait = json.RawMessage(`{"ackWait": "4s"}`)

func TestConformance(t *testing.T) {
	for name, m := range map[string]mode{"scheduled": {}, "parked": {park: true}} {
		t.Run(name, func(t *testing.T) {
			brokertest.Run(t, brokertest.Backend{
				Open: func(t *testing.T) brokertest.Instance { return newInstance(t, m) },
				Capabilities: func(o json.RawMessage) broker.Capabilities {
					c := Driver.Capabilities(o)
					c.ConsumersMoveHeld = m.park || !serverSchedules(t)
					return c
				},
				Variants:           []brokertest.Variant{{Options: shortAckWait}},
				Patience:           time.Minute,
				ConflictingOptions: json.RawMessage(`{"storage": "Memory"}`),
				Goroutines:         natsserver.Goroutines(),
			})
		})
	}
}

// newInstance starts a server for one subtest.
func newInstance(t *testing.T, m mode) brokertest.Instance {
	t.Helper()
	s := startServer(t)
	proxy := testenv.Proxy(t, s.addr())
	var armed atomic.Value // of step
	armed.Store(step(""))
	m.reached = func(c *conn, at step) {
		if armed.Load() != at || !armed.CompareAndSwap(at, step("")) {
			return
		}
		// What was sent by then is with the server; its answers are not with us.
		_ = c.flush(context.Background())
		proxy.Flap()
	}
	return brokertest.Instance{
		Driver: m.driver(),
		Client: broker.Config{Endpoint: endpointOf(t, "nats://"+proxy.Addr())},
		Admin:  broker.Config{Endpoint: endpointOf(t, "nats://"+s.addr())},
		Raw:    newRaw(s),
		Faults: brokertest.Faults{
			Cut:   func(testing.TB) { proxy.Flap() },
			Block: func(testing.TB) func() { proxy.Cut(); return proxy.Restore },
			HoldConfirms: func(testing.TB) func() {
				proxy.Latency(time.Hour)
				return proxy.Restore
			},
			Restart: func(testing.TB) { s.restart() },
			CutAt: func(_ testing.TB, at brokertest.Step) func() {
				armed.Store(step(at))
				return func() { armed.Store(step("")) }
			},
		},
	}
}

// raw is the server as a foreign program sees it.
type raw struct {
	server *testServer
	conn   *natsgo.Conn
	js     jetstream.JetStream
}

func newRaw(s *testServer) raw {
	s.t.Helper()
	r := rawOn(s.t, "nats://"+s.addr())
	r.server = s
	return r
}

func rawOn(t testing.TB, addr string) raw {
	t.Helper()
	c, err := natsgo.Connect(addr, natsgo.MaxReconnects(-1), natsgo.ReconnectWait(20*time.Millisecond))
	if err != nil {
		t.Fatalf("connect: %v", err)
	}
	t.Cleanup(c.Close)
	js, err := jetstream.New(c)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.AccountInfo(t.Context()); err != nil { // starts what the library needs for requests
		t.Fatal(err)
	}
	return raw{nil, c, js}
}

// place is the stream of a queue and the subjects of its messages.
func place(d broker.Declaration, q topology.Queue) (stream, filter string) {
	name := physical(d.Topology, q.Name)
	if q.Role == topology.RoleHold {
		return physical(d.Topology, d.Topology.Queue), holdFilter(name)
	}
	return name, name
}

func (r raw) Publish(t testing.TB, d broker.Declaration, q topology.Queue, msgs ...brokertest.Message) {
	t.Helper()
	stream, subject := place(d, q)
	for _, m := range msgs {
		h := natsgo.Header{}
		for name, v := range m.Headers {
			h[name] = []string{text(v)}
		}
		if m.ContentType != "" {
			h.Set(contentType, m.ContentType)
		}
		if m.Key != "" {
			h.Set(header.Key, m.Key)
		}
		ack, err := r.js.PublishMsg(t.Context(), &natsgo.Msg{Subject: subject, Header: h, Data: m.Body})
		if err != nil {
			t.Fatalf("publish to %q: %v", subject, err)
		}
		if ack.Stream != stream {
			t.Fatalf("stored by stream %q, want %q", ack.Stream, stream)
		}
	}
}

func (r raw) Take(t testing.TB, d broker.Declaration, q topology.Queue) []brokertest.Message {
	t.Helper()
	name, filter := place(d, q)
	stream, err := r.js.Stream(t.Context(), name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil
	}
	if err != nil {
		t.Fatalf("stream %q: %v", name, err)
	}
	var out []brokertest.Message
	for seq := uint64(1); ; seq++ {
		m, err := stream.GetMsg(t.Context(), seq, jetstream.WithGetMsgSubject(filter))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return out
		}
		if err != nil {
			t.Fatalf("read stream %q: %v", name, err)
		}
		seq = m.Sequence
		if err := stream.DeleteMsg(t.Context(), seq); err != nil {
			t.Fatalf("delete message %d of stream %q: %v", seq, name, err)
		}
		one := brokertest.Message{Body: m.Data, Headers: headersOf(m.Header), ContentType: m.Header.Get(contentType), Key: m.Header.Get(header.Key)}
		out = append(out, one)
	}
}

func (r raw) Count(t testing.TB, d broker.Declaration, q topology.Queue) (ready, inFlight int) {
	t.Helper()
	name, filter := place(d, q)
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	stream, err := r.js.Stream(ctx, name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return 0, 0
	}
	if err != nil {
		t.Fatalf("stream %q: %v", name, err)
	}
	if q.Role != topology.RoleHold && r.server.binary != "" {
		// What this server tells: also what was handed back counts.
		k, err := stream.Consumer(ctx, map[bool]string{true: name, false: physical(d.Topology, d.Topology.Queue)}[q.Role == topology.RoleDeadLetter])
		if err == nil {
			inFlight = k.CachedInfo().NumAckPending
		}
	} else if q.Role != topology.RoleHold {
		// Before the messages: one that is delivered in between is then counted as ready, and not twice.
		inFlight = r.server.outstanding(name, physical(d.Topology, d.Topology.Queue))
		if q.Role == topology.RoleDeadLetter {
			inFlight = r.server.outstanding(name, name)
		}
	}
	info, err := stream.Info(ctx, jetstream.WithSubjectFilter(filter))
	if err != nil {
		t.Fatalf("stream %q: %v", name, err)
	}
	for _, n := range info.State.Subjects {
		ready += int(n)
	}
	return ready - inFlight, inFlight
}
