package rabbitmq

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/rabbitserver"
	"github.com/shove-dev/shove/topology"
)

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

func TestQ2_PublishIsStoredWithItsHeaders(t *testing.T) {
	b := newBench(t)
	d := b.declare(orders(), "")
	p := b.publisher(d)
	at := time.Unix(1700000000, 0)
	err := p.Publish(t.Context(), []broker.Message{{
		ID: "id-1", Key: "customer-7", RoutingKey: "ignored.without.exchange", ContentType: "application/json", Timestamp: at, Body: []byte("{}"),
		Headers: header.Map{"n": 1 << 40, "u": uint64(1<<63 + 1), "list": []string{"a"}, "deep": map[string]any{"n": 5, "l": []any{1, "x"}}, "b": []byte("b")},
	}})
	if err != nil {
		t.Fatal(err)
	}
	got := receive(t, b.subscribe(d, 1), 1)[0]
	if got.Key != "customer-7" || got.ContentType != "application/json" || !got.Timestamp.Equal(at) || got.Native.MessageID() != "id-1" {
		t.Errorf("got %+v", got)
	}
	want := header.Map{
		"n": int64(1 << 40), "u": "9223372036854775809", "list": []any{"a"}, "deep": amqp.Table{"n": int64(5), "l": []any{int64(1), "x"}}, "b": []byte("b"),
		header.MessageID: "id-1", header.Key: "customer-7",
	}
	if diff := cmp.Diff(want, got.Headers); diff != "" {
		t.Errorf("headers (-want +got):\n%s", diff)
	}
	if raw := got.Native.(*entry).raw; raw.DeliveryMode != amqp.Persistent {
		t.Error("not persistent")
	}
}

func TestQ3_BatchSaysExactlyWhatFailed(t *testing.T) {
	b := newBench(t)
	b.exchange("shop", amqp.ExchangeTopic)
	d := b.declare(orders(), `{"bindings":[{"exchange":"shop","routingKey":"order.*"}]}`)
	p := b.publisher(d)
	batch := messages("m", 9)
	batch[1].RoutingKey = "order.new"
	batch[2].RoutingKey = "invoice.new" // nobody takes it
	batch[3].Headers = header.Map{"big": strings.Repeat("x", 200<<10)}
	batch[4].Headers = header.Map{strings.Repeat("n", 300): 1}
	batch[5].Headers = header.Map{"odd": struct{}{}}
	batch[6].ContentType = strings.Repeat("c", 300)
	batch[7].RoutingKey = strings.Repeat("k", 300)
	err := p.Publish(t.Context(), batch)
	want := map[int]error{2: broker.ErrUnroutable, 3: broker.ErrTooLarge, 4: broker.ErrTooLarge, 5: broker.ErrUnsupported, 6: broker.ErrTooLarge, 7: broker.ErrTooLarge}
	for i := range batch {
		if got := publishItem(t, err, i); !errors.Is(got, want[i]) || (got == nil) != (want[i] == nil) {
			t.Errorf("message %d: got %v, want %v", i, got, want[i])
		}
	}
	b.eventuallyReady("orders", 3)
	if err := p.Publish(t.Context(), messages("again", 100)); err != nil {
		t.Errorf("the channel did not survive: %v", err)
	}
	b.eventuallyReady("orders", 103)
}

func TestPublishToAMissingQueueOrExchange(t *testing.T) {
	b := newBench(t)
	p := b.publisher(declaration(t, topology.Spec{Queue: "nowhere"}, ""))
	if err := publishItem(t, p.Publish(t.Context(), messages("m", 3)), 1); !errors.Is(err, broker.ErrUnroutable) {
		t.Errorf("missing queue: got %v, want ErrUnroutable", err)
	}
	q := b.publisher(declaration(t, topology.Spec{Queue: "nowhere"}, `{"bindings":[{"exchange":"none","routingKey":"x"}]}`))
	m := messages("m", 1)
	m[0].RoutingKey = "x"
	err := publishItem(t, q.Publish(t.Context(), m), 0)
	if !errors.Is(err, broker.ErrUnknown) || !errors.Is(err, broker.ErrNotFound) || !strings.Contains(err.Error(), "none") {
		t.Errorf("missing exchange: got %v, want ErrUnknown with ErrNotFound", err)
	}
	b.exchange("none", amqp.ExchangeFanout)
	if err := publishItem(t, q.Publish(t.Context(), m), 0); !errors.Is(err, broker.ErrUnroutable) {
		t.Errorf("a new channel was not opened: %v", err)
	}
}

// Returns must reach the message they belong to, whatever else is in flight.
func TestReturnsAreNeverMissed(t *testing.T) {
	b := newBench(t)
	b.exchange("shop", amqp.ExchangeDirect)
	d := b.declare(orders(), `{"bindings":[{"exchange":"shop","routingKey":"yes"}]}`)
	p := b.publisher(d)
	var wg sync.WaitGroup
	const callers, calls, size = 8, 10, 20
	for c := range callers {
		wg.Go(func() {
			for n := range calls {
				batch := messages(fmt.Sprintf("c%d-%d-", c, n), size)
				for i := range batch {
					batch[i].RoutingKey = []string{"yes", "no", "yes"}[i%3]
				}
				err := p.Publish(context.Background(), batch)
				for i := range batch {
					var got error
					if e, ok := errors.AsType[*broker.PublishError](err); ok {
						for _, it := range e.Items {
							if it.Index == i {
								got = it.Err
							}
						}
					}
					if (i%3 == 1) != errors.Is(got, broker.ErrUnroutable) {
						t.Errorf("message %d of call %d: %v", i, n, got)
					}
				}
			}
		})
	}
	wg.Wait()
	pub := p.(*publisher)
	if n := len(pub.confirmers.cur.inflight); n != 0 {
		t.Errorf("%d messages are remembered for ever", n)
	}
}

func TestPublishWithoutAServer(t *testing.T) {
	v := testenv.RabbitMQ(t).Vhost(t)
	proxy := testenv.Proxy(t, hostOf(t, v.URL))
	b := benchOn(t, v, proxy.URL(v.URL))
	p := b.publisher(b.declare(orders(), ""))
	if err := p.Publish(t.Context(), messages("a", 10)); err != nil {
		t.Fatal(err)
	}
	proxy.Freeze()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := publishItem(t, p.Publish(ctx, messages("b", 3)), 2); !errors.Is(err, broker.ErrUnknown) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("frozen: got %v, want ErrUnknown", err)
	}
	proxy.Cut()
	testenv.Eventually(t, bound, func() error {
		err := publishItem(t, p.Publish(t.Context(), messages("c", 2)), 1)
		if !errors.Is(err, broker.ErrUnavailable) {
			return fmt.Errorf("cut: got %v, want ErrUnavailable", err)
		}
		return nil
	})
	proxy.Restore()
	if err := p.Publish(t.Context(), messages("d", 3)); err != nil {
		t.Errorf("after the cut: %v", err)
	}
	closeBounded(t, b.client)
	if err := publishItem(t, p.Publish(t.Context(), messages("e", 1)), 0); !errors.Is(err, broker.ErrClosed) {
		t.Errorf("closed: got %v, want ErrClosed", err)
	}
}

// A server that is short of memory takes no messages; acknowledgements still reach it.
func TestPublishWhileBlocked(t *testing.T) {
	srv := testenv.StartRabbitMQ(t, rabbitserver.Options{Config: []string{"vm_memory_high_watermark.absolute = 10MB"}})
	b := benchOn(t, srv.Vhost(t), "")
	p := b.publisher(b.declare(orders(), ""))
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if err := publishItem(t, p.Publish(ctx, messages("a", 1)), 0); !errors.Is(err, broker.ErrUnknown) || !strings.Contains(err.Error(), "blocks publishing") {
		t.Errorf("first: got %v, want ErrUnknown that says that the server blocks", err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := publishItem(t, p.Publish(ctx, messages("b", 1)), 0); !errors.Is(err, broker.ErrUnavailable) || !strings.Contains(err.Error(), "blocks publishing") {
		t.Errorf("second: got %v, want ErrUnavailable that says that the server blocks", err)
	}
	// A body that no socket buffer takes blocks in the write.
	ctx, cancel = context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	big := messages("c", 1)
	big[0].Body = bytes.Repeat([]byte("x"), 64<<20)
	started := time.Now()
	if err := publishItem(t, p.Publish(ctx, big), 0); err == nil || time.Since(started) > 5*time.Second {
		t.Errorf("big: got %v after %v", err, time.Since(started))
	}
}

func TestBodyAboveTheServersLimit(t *testing.T) {
	srv := testenv.StartRabbitMQ(t, rabbitserver.Options{Config: []string{"max_message_size = 1000000"}})
	b := benchOn(t, srv.Vhost(t), "")
	p := b.publisher(b.declare(orders(), ""))
	batch := messages("a", 3)
	batch[1].Body = bytes.Repeat([]byte("x"), 1000001)
	err := p.Publish(t.Context(), batch)
	if got := publishItem(t, err, 1); !errors.Is(got, broker.ErrTooLarge) {
		t.Errorf("got %v, want ErrTooLarge", got)
	}
	for _, i := range []int{0, 2} {
		if got := publishItem(t, err, i); got != nil && !errors.Is(got, broker.ErrUnknown) && !errors.Is(got, broker.ErrUnavailable) {
			t.Errorf("message %d: got %v", i, got)
		}
	}
	batch[1].Body = batch[1].Body[:1000000]
	if err := p.Publish(t.Context(), batch); err != nil {
		t.Errorf("at the limit: %v", err)
	}
}
