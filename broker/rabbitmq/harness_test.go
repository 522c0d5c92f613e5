package rabbitmq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// bound is how long a test waits for something that should come soon.
const bound = 20 * time.Second

// bench is one vhost with a client, an admin and a raw connection.
type bench struct {
	t        testing.TB
	vhost    testenv.RabbitMQVhost
	endpoint json.RawMessage
	client   broker.Client
	admin    broker.Admin
	raw      *amqp.Connection
}

func withoutUser(t testing.TB, raw string) string {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal("a test URL does not parse")
	}
	u.User = nil
	return u.String()
}

func endpointOf(t testing.TB, amqpURL, managementURL string) json.RawMessage {
	t.Helper()
	in := endpointJSON{URL: withoutUser(t, amqpURL)}
	if managementURL != "" {
		in.Management = &managementJSON{URL: withoutUser(t, managementURL)}
	}
	out, err := json.Marshal(map[string]any{"url": in.URL, "management": in.Management})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func userOf(t testing.TB, raw string) broker.Credentials {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil || u.User == nil {
		t.Fatal("a test URL without a user")
	}
	p, _ := u.User.Password()
	return broker.Credentials{Username: u.User.Username(), Password: p}
}

func credentials(c broker.Credentials) func(context.Context) (broker.Credentials, error) {
	return func(context.Context) (broker.Credentials, error) { return c, nil }
}

// newBench uses the shared server.
func newBench(t testing.TB) *bench {
	t.Helper()
	return benchOn(t, testenv.RabbitMQ(t).Vhost(t), "")
}

// benchOn connects to a vhost; the client goes through clientURL where it is given, such as a proxy's.
func benchOn(t testing.TB, v testenv.RabbitMQVhost, clientURL string) *bench {
	t.Helper()
	b := &bench{t: t, vhost: v, endpoint: endpointOf(t, v.URL, v.ManagementURL)}
	clientEndpoint := b.endpoint
	if clientURL != "" {
		clientEndpoint = endpointOf(t, clientURL, "")
	}
	creds := credentials(userOf(t, v.URL))
	b.client = openTestClient(t, broker.Config{Endpoint: clientEndpoint, Credentials: creds, Name: t.Name()})
	admin, err := Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: b.endpoint, Credentials: creds, Name: t.Name()})
	if err != nil {
		t.Fatal(err)
	}
	b.admin = admin
	t.Cleanup(func() { closeBounded(t, admin) })
	b.raw = dialRaw(t, v.URL)
	return b
}

func dialRaw(t testing.TB, u string) *amqp.Connection {
	t.Helper()
	c, err := amqp.Dial(u)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
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

// declaration derives and declares a topology.
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
	return topology.Spec{Queue: "orders", Holds: []time.Duration{100 * time.Millisecond, 400 * time.Millisecond}, DeadLetter: true}
}

func (b *bench) subscribe(d broker.Declaration, prefetch int) broker.Subscription {
	b.t.Helper()
	return b.subscribeAs(broker.Subscribe{Declaration: d, Prefetch: prefetch, Concurrency: prefetch, Consumer: "test"})
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

// publish sends raw messages to a queue and waits for their confirms.
func (b *bench) publish(queue string, messages ...amqp.Publishing) {
	b.t.Helper()
	ch, err := b.raw.Channel()
	if err != nil {
		b.t.Fatal(err)
	}
	defer ch.Close()
	if err := ch.Confirm(false); err != nil {
		b.t.Fatal(err)
	}
	for _, m := range messages {
		if m.DeliveryMode == 0 {
			m.DeliveryMode = amqp.Persistent
		}
		c, err := ch.PublishWithDeferredConfirm("", queue, true, false, m)
		if err != nil {
			b.t.Fatal(err)
		}
		if !c.Wait() {
			b.t.Fatalf("publish to %q: not confirmed", queue)
		}
	}
}

func numbered(n int) []amqp.Publishing {
	out := make([]amqp.Publishing, n)
	for i := range out {
		id := fmt.Sprintf("m%03d", i)
		out[i] = amqp.Publishing{MessageId: id, Body: []byte(id), Headers: amqp.Table{header.MessageID: id}}
	}
	return out
}

// leftovers are deliveries of a batch that a test did not ask for yet.
var leftovers sync.Map // broker.Subscription -> []*broker.Delivery

// receive returns the next n deliveries.
func receive(t testing.TB, s broker.Subscription, n int) []*broker.Delivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	var out []*broker.Delivery
	if left, ok := leftovers.LoadAndDelete(s); ok {
		out = left.([]*broker.Delivery)
	}
	for len(out) < n {
		ds, err := s.Receive(ctx)
		if err != nil {
			t.Fatalf("received %d of %d: %v", len(out), n, err)
		}
		out = append(out, ds...)
	}
	if len(out) > n {
		leftovers.Store(s, out[n:])
	}
	return out[:n]
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

func mustSettle(t testing.TB, s broker.Subscription, batch []broker.Settlement) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	if err := s.Settle(ctx, batch); err != nil {
		t.Fatal(err)
	}
}

// copying is a settlement with the headers that the runtime would stamp.
func copying(d *broker.Delivery, a settle.Action) broker.Settlement {
	facts := header.Parse(d.Headers)
	return broker.Settlement{Delivery: d, Action: a, Stamp: header.Stamp(nil, facts, a, "orders", d.Native.DeliveryID(), time.Now())}
}

// live counts a queue by passive declare.
func (b *bench) live(queue string) amqp.Queue {
	b.t.Helper()
	ch, err := b.raw.Channel()
	if err != nil {
		b.t.Fatal(err)
	}
	defer ch.Close()
	q, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	return q
}

// eventuallyReady waits for a number of ready messages.
func (b *bench) eventuallyReady(queue string, n int) {
	b.t.Helper()
	testenv.Eventually(b.t, bound, func() error {
		if got := b.live(queue).Messages; got != n {
			return fmt.Errorf("queue %q has %d ready messages, want %d", queue, got, n)
		}
		return nil
	})
}

// ready says what a consumer that closes its channel at once would find: the queue's content, unacknowledged
// messages of closed channels included.
func (b *bench) contents(queue string) []amqp.Delivery {
	b.t.Helper()
	ch, err := b.raw.Channel()
	if err != nil {
		b.t.Fatal(err)
	}
	defer ch.Close()
	var out []amqp.Delivery
	for {
		d, ok, err := ch.Get(queue, false)
		if err != nil {
			b.t.Fatal(err)
		}
		if !ok {
			return out
		}
		out = append(out, d)
	}
}

func ids(ds []*broker.Delivery) []string {
	out := make([]string, len(ds))
	for i, d := range ds {
		out[i] = string(d.Body)
	}
	return out
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

func publishItem(t testing.TB, err error, index int) error {
	t.Helper()
	e, ok := errors.AsType[*broker.PublishError](err)
	if !ok {
		t.Fatalf("got %v, want a *PublishError", err)
	}
	for _, it := range e.Items {
		if it.Index == index {
			return it.Err
		}
	}
	return nil
}

// set is a set of strings for several goroutines.
type set struct {
	mu sync.Mutex
	m  map[string]int
}

func (s *set) add(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.m == nil {
		s.m = map[string]int{}
	}
	s.m[id]++
}
