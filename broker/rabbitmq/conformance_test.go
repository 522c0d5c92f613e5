package rabbitmq

import (
	"encoding/json"
	"strings"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/brokertest"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/rabbitserver"
	"github.com/shove-dev/shove/topology"
)

func TestConformance(t *testing.T) {
	for _, c := range []struct{ kind, other string }{{quorumQueue, classicQueue}, {classicQueue, quorumQueue}} {
		t.Run(c.kind, func(t *testing.T) {
			brokertest.Run(t, brokertest.Backend{
				Open:               openConformance,
				Capabilities:       Driver.Capabilities,
				Variants:           []brokertest.Variant{{Options: json.RawMessage(`{"queueType":"` + c.kind + `"}`)}},
				ConflictingOptions: json.RawMessage(`{"queueType":"` + c.other + `"}`),
			})
		})
	}
}

// openConformance gives a subtest a vhost, and a server of its own where it restarts it.
func openConformance(t *testing.T) brokertest.Instance {
	srv := testenv.RabbitMQServer{}
	private := strings.HasSuffix(t.Name(), "restarts_under_load")
	if private {
		srv = *testenv.StartRabbitMQ(t, rabbitserver.Options{})
	} else {
		srv = testenv.RabbitMQ(t)
	}
	v := srv.Vhost(t)
	w := testWire(t, hostOf(t, v.URL))
	creds := credentials(userOf(t, v.URL))
	in := brokertest.Instance{
		Driver: Driver,
		Client: broker.Config{Endpoint: endpointOf(t, "amqp://"+w.addr()+"/"+v.Name, ""), Credentials: creds},
		Admin:  broker.Config{Endpoint: endpointOf(t, v.URL, v.ManagementURL), Credentials: creds},
		Raw:    &raw{url: v.URL, wire: w},
		Faults: brokertest.Faults{
			Cut: func(testing.TB) { w.end() },
			Block: func(testing.TB) func() {
				w.setRefuse(true)
				w.end()
				return func() { w.setRefuse(false) }
			},
			HoldConfirms: func(testing.TB) func() { return w.holdConfirms() },
			CutAt:        func(_ testing.TB, step brokertest.Step) func() { return w.arm(step) },
		},
	}
	if private {
		in.Faults.Restart = func(t testing.TB) {
			t.Helper()
			srv.Kill(t)
			srv.Restart(t)
		}
	}
	return in
}

// raw reads and writes the server with the plain client library, on a connection for each call.
type raw struct {
	url  string
	wire *wire
}

func (r *raw) channel(t testing.TB) (*amqp.Channel, func()) {
	t.Helper()
	c, err := amqp.Dial(r.url)
	if err != nil {
		t.Fatal(err)
	}
	ch, err := c.Channel()
	if err != nil {
		t.Fatal(err)
	}
	return ch, func() { _ = c.Close() }
}

func (r *raw) Publish(t testing.TB, d broker.Declaration, q topology.Queue, msgs ...brokertest.Message) {
	t.Helper()
	ch, done := r.channel(t)
	defer done()
	if err := ch.Confirm(false); err != nil {
		t.Fatal(err)
	}
	for _, m := range msgs {
		h := amqp.Table{}
		for k, v := range m.Headers {
			h[k] = toField(v)
		}
		if m.Key != "" {
			h[header.Key] = m.Key
		}
		c, err := ch.PublishWithDeferredConfirm("", physical(d.Topology, q.Name), true, false, amqp.Publishing{
			Headers: h, ContentType: m.ContentType, DeliveryMode: amqp.Persistent, Body: m.Body})
		if err != nil {
			t.Fatal(err)
		}
		if !c.Wait() {
			t.Fatalf("publish to %q: not confirmed", q.Name)
		}
	}
}

func (r *raw) Take(t testing.TB, d broker.Declaration, q topology.Queue) []brokertest.Message {
	t.Helper()
	ch, done := r.channel(t)
	defer done()
	var out []brokertest.Message
	for {
		m, ok, err := ch.Get(physical(d.Topology, q.Name), true)
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			return out
		}
		got := brokertest.Message{Body: m.Body, Headers: header.Map(m.Headers), ContentType: m.ContentType}
		if n, ok := header.Int(got.Headers[deliveryCount]); ok && n == 0 {
			delete(got.Headers, deliveryCount) // 3.10 adds it to what basic.get gets
		}
		got.Key, _ = got.Headers.Text(header.Key)
		out = append(out, got)
	}
}

func (r *raw) Count(t testing.TB, d broker.Declaration, q topology.Queue) (ready, inFlight int) {
	t.Helper()
	ch, done := r.channel(t)
	defer done()
	name := physical(d.Topology, q.Name)
	got, err := ch.QueueDeclarePassive(name, true, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	return got.Messages, r.wire.unackedOf(name)
}
