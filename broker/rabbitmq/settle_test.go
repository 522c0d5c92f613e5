package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// bothTypes runs a test on a quorum and on a classic main queue.
func bothTypes(t *testing.T, f func(t *testing.T, options string)) {
	for _, kind := range []string{quorumQueue, classicQueue} {
		t.Run(kind, func(t *testing.T) { f(t, `{"queueType":"`+kind+`"}`) })
	}
}

func TestSettleActions(t *testing.T) {
	bothTypes(t, func(t *testing.T, options string) {
		b := newBench(t)
		d := b.declare(orders(), options)
		s := b.subscribe(d, 10)
		b.publish("orders", numbered(6)...)
		ds := receive(t, s, 6)
		dead := settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected, Text: "no such customer", Retries: 2}
		batch := []broker.Settlement{
			{Delivery: ds[0], Action: settle.Action{Kind: settle.Done}},
			{Delivery: ds[1], Action: settle.Action{Kind: settle.Drop}},
			copying(ds[2], dead),
			copying(ds[3], settle.Action{Kind: settle.Hold, Tier: 1, Delay: 400 * time.Millisecond, Retries: 2}),
			{Delivery: ds[4], Action: settle.Action{Kind: settle.Requeue}},
			copying(ds[5], settle.Action{Kind: settle.Copy, Retries: 1}),
		}
		mustSettle(t, s, batch)
		got := map[string]uint32{}
		for range 3 {
			x := receive(t, s, 1)[0]
			got[string(x.Body)] = header.Parse(x.Headers).Retries
			mustSettle(t, s, act(settle.Done, x))
		}
		if diff := cmp.Diff(map[string]uint32{"m003": 2, "m004": 0, "m005": 1}, got); diff != "" {
			t.Errorf("came back (-want +got):\n%s", diff)
		}
		b.eventuallyReady("orders-dlq", 1)
		facts := header.Parse(header.Map(b.contents("orders-dlq")[0].Headers))
		if facts.Death.Reason != settle.Rejected || facts.Death.Detail != "no such customer" || facts.Death.OriginalQueue != "orders" || facts.Death.Count != 1 {
			t.Errorf("death %+v", facts.Death)
		}
		closeBounded(t, s)
		b.eventuallyReady("orders", 0)
	})
}

func TestSettleTwiceIsLost(t *testing.T) {
	b := newBench(t)
	s := b.subscribe(b.declare(orders(), ""), 10)
	b.publish("orders", numbered(2)...)
	ds := receive(t, s, 2)
	mustSettle(t, s, act(settle.Done, ds[0]))
	err := s.Settle(t.Context(), act(settle.Done, ds[0], ds[1]))
	if got := settleItem(t, err, 0); !errors.Is(got, broker.ErrLost) {
		t.Errorf("second settlement: got %v, want ErrLost", got)
	}
	if got := settleItem(t, err, 1); got != nil {
		t.Errorf("the other one: got %v", got)
	}
	b.publish("orders", numbered(1)...)
	mustSettle(t, s, act(settle.Done, receive(t, s, 1)...)) // the channel is still open
}

func TestA11_SlowMessageDoesNotHoldBackOthers(t *testing.T) {
	bothTypes(t, func(t *testing.T, options string) {
		b := newBench(t)
		s := b.subscribe(b.declare(orders(), options), 3)
		b.publish("orders", numbered(30)...)
		slow := receive(t, s, 3)
		mustSettle(t, s, act(settle.Done, slow[2], slow[1]))
		for range 27 {
			mustSettle(t, s, act(settle.Done, receive(t, s, 1)...))
		}
		mustSettle(t, s, act(settle.Done, slow[0]))
		closeBounded(t, s)
		b.eventuallyReady("orders", 0)
	})
}

// rabbitmq/amqp091-go#296: a goroutine for each delivery, acknowledging at once.
func TestCase03_ConcurrentAcks(t *testing.T) {
	bothTypes(t, func(t *testing.T, options string) {
		b := newBench(t)
		s := b.subscribe(b.declare(orders(), options), 3)
		const n = 300
		b.publish("orders", numbered(n)...)
		var seen set
		var wg sync.WaitGroup
		for got := 0; got < n; {
			ds := receiveSome(t, s)
			got += len(ds)
			for _, d := range ds {
				seen.add(string(d.Body))
				wg.Go(func() {
					if err := s.Settle(context.Background(), act(settle.Done, d)); err != nil {
						t.Errorf("%s: %v", d.Body, err)
					}
				})
			}
		}
		wg.Wait()
		for id, times := range seen.m {
			if times != 1 {
				t.Errorf("%s was delivered %d times", id, times)
			}
		}
		b.publish("orders", numbered(1)...)
		mustSettle(t, s, act(settle.Done, receive(t, s, 1)...)) // the channel is open
		closeBounded(t, s)
		b.eventuallyReady("orders", 0)
	})
}

func receiveSome(t testing.TB, s broker.Subscription) []*broker.Delivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	ds, err := s.Receive(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return ds
}

// rabbitmq/rabbitmq-dotnet-client#200: handlers of a killed connection finish after the reconnect.
func TestCase04_LateAcksGoNowhere(t *testing.T) {
	bothTypes(t, func(t *testing.T, options string) {
		v := testenv.RabbitMQ(t).Vhost(t)
		proxy := testenv.Proxy(t, hostOf(t, v.URL))
		b := benchOn(t, v, proxy.URL(v.URL))
		d := b.declare(orders(), options)
		old := b.subscribe(d, 10)
		b.publish("orders", numbered(10)...)
		late := receive(t, old, 10)
		proxy.Flap()
		if _, err := old.Receive(t.Context()); !errors.Is(err, broker.ErrLost) {
			t.Fatalf("Receive after the cut: %v, want ErrLost", err)
		}
		fresh := b.subscribe(d, 10)
		again := receive(t, fresh, 10)
		batch := act(settle.Done, late[:4]...)
		batch = append(batch, act(settle.Requeue, late[4:6]...)...)
		for _, x := range late[6:] {
			batch = append(batch, copying(x, settle.Action{Kind: settle.Hold, Retries: 1}))
		}
		err := old.Settle(t.Context(), batch)
		for i := range batch {
			if got := settleItem(t, err, i); !errors.Is(got, broker.ErrLost) {
				t.Errorf("late settlement %d: %v, want ErrLost", i, got)
			}
		}
		for _, x := range again {
			if !x.Redelivered {
				t.Errorf("%s is not marked as redelivered", x.Body)
			}
		}
		nothing(t, fresh, 300*time.Millisecond)
		mustSettle(t, fresh, act(settle.Done, again...))
		b.publish("orders", numbered(1)...)
		mustSettle(t, fresh, act(settle.Done, receive(t, fresh, 1)...))
		closeBounded(t, fresh)
		b.eventuallyReady("orders", 0)
	})
}

// A late delivery handed to another subscription is refused there, too.
func TestM3_DeliveryOfAnotherSubscription(t *testing.T) {
	b := newBench(t)
	d := b.declare(orders(), "")
	one := b.subscribe(d, 1)
	b.publish("orders", numbered(2)...)
	first := receive(t, one, 1)
	two := b.subscribe(d, 1)
	second := receive(t, two, 1)
	if err := settleItem(t, two.Settle(t.Context(), act(settle.Done, first...)), 0); !errors.Is(err, broker.ErrLost) {
		t.Fatalf("got %v, want ErrLost", err)
	}
	mustSettle(t, one, act(settle.Done, first...))
	mustSettle(t, two, act(settle.Done, second...))
}

// dapr/dapr#9604: a shutdown while deliveries are queued, with a dead-letter exchange on the queue.
func TestCase05_StopHandsBack(t *testing.T) {
	bothTypes(t, func(t *testing.T, options string) {
		b := newBench(t)
		d := b.declare(orders(), options)
		s := b.subscribe(d, 10)
		b.publish("orders", numbered(20)...)
		// One batch is received; the rest of the prefetch stays in the client.
		batch := receiveSome(t, s)
		testenv.Eventually(t, bound, func() error {
			sub := s.(*subscription)
			sub.mu.Lock()
			defer sub.mu.Unlock()
			if have := len(batch) + len(sub.buffer); have < 10 {
				return fmt.Errorf("%d of 10 prefetched", have)
			}
			return nil
		})
		ctx, cancel := context.WithTimeout(t.Context(), bound)
		defer cancel()
		if err := s.Stop(ctx); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Receive(ctx); !errors.Is(err, broker.ErrClosed) {
			t.Fatalf("Receive after Stop: %v, want ErrClosed", err)
		}
		b.eventuallyReady("orders", 20-len(batch))
		mustSettle(t, s, act(settle.Done, batch[0])) // what was received can still be settled
		mustSettle(t, s, act(settle.GiveBack, batch[1:]...))
		b.eventuallyReady("orders", 19)
		if err := s.Stop(ctx); err != nil {
			t.Errorf("a second Stop: %v", err)
		}
		closeBounded(t, s)
		b.eventuallyReady("orders", 19)
		if n := b.live("orders-dlq").Messages; n != 0 {
			t.Errorf("the dead-letter queue has %d messages", n)
		}
		left := b.contents("orders")
		var got []string
		for _, x := range left {
			got = append(got, string(x.Body))
		}
		if !slices.IsSorted(got) {
			t.Errorf("the order is lost: %v", got)
		}
	})
}

// rabbitmq/rabbitmq-server#10617: a message with a long delay before one with a short delay.
func TestCase01_LongDelayDoesNotBlockShort(t *testing.T) {
	b := newBench(t)
	s := b.subscribe(b.declare(topology.Spec{Queue: "orders", Holds: []time.Duration{200 * time.Millisecond, 1500 * time.Millisecond}, DeadLetter: true}, ""), 10)
	b.publish("orders", numbered(2)...)
	ds := receive(t, s, 2)
	start := time.Now()
	mustSettle(t, s, []broker.Settlement{copying(ds[0], settle.Action{Kind: settle.Hold, Tier: 1, Delay: 1500 * time.Millisecond, Retries: 2})})
	mustSettle(t, s, []broker.Settlement{copying(ds[1], settle.Action{Kind: settle.Hold, Tier: 0, Delay: 200 * time.Millisecond, Retries: 1})})
	short := receive(t, s, 1)[0]
	if waited := time.Since(start); string(short.Body) != "m001" || waited > 1200*time.Millisecond {
		t.Errorf("first came %s after %v, want the short one after 200 ms", short.Body, waited)
	}
	long := receive(t, s, 1)[0]
	if waited := time.Since(start); string(long.Body) != "m000" || waited < 1500*time.Millisecond {
		t.Errorf("then came %s after %v, want the long one after 1.5 s", long.Body, waited)
	}
}

// A9: without a stored copy the original stays unsettled, and can be settled once the fault is mended.
func TestA9_NoCopyNoAck(t *testing.T) {
	hold := settle.Action{Kind: settle.Hold, Tier: 0, Delay: 100 * time.Millisecond, Retries: 1}
	t.Run("A10_missing_hold_queue", func(t *testing.T) {
		b := newBench(t)
		d := b.declare(orders(), "")
		s := b.subscribe(d, 10)
		b.publish("orders", numbered(3)...)
		ds := receive(t, s, 3)
		if _, err := b.admin.Delete(t.Context(), []string{"orders-hold-100ms"}); err != nil {
			t.Fatal(err)
		}
		batch := []broker.Settlement{copying(ds[0], hold), copying(ds[1], settle.Action{Kind: settle.Hold, Tier: 1, Delay: 400 * time.Millisecond, Retries: 1}), act(settle.Done, ds[2])[0]}
		err := s.Settle(t.Context(), batch)
		if got := settleItem(t, err, 0); !errors.Is(got, broker.ErrUnroutable) {
			t.Errorf("got %v, want ErrUnroutable", got)
		}
		var failed *broker.SettleError
		if !errors.As(err, &failed) || len(failed.Items) != 1 {
			t.Errorf("got %v, want only the first one to fail", err)
		}
		b.declare(orders(), "")
		mustSettle(t, s, batch[:1])
		got := ids(receive(t, s, 2))
		slices.Sort(got)
		if diff := cmp.Diff([]string{"m000", "m001"}, got); diff != "" {
			t.Errorf("came back (-want +got):\n%s", diff)
		}
	})
	t.Run("A10_full_dead_letter_queue", func(t *testing.T) {
		b := newBench(t)
		d := b.declare(orders(), "")
		b.policy("full", "^orders-dlq$", map[string]any{"max-length": 0, "overflow": "reject-publish"})
		s := b.subscribe(d, 10)
		b.publish("orders", numbered(4)...)
		dead := settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected}
		rejected := 0
		for _, x := range receive(t, s, 4) {
			err := s.Settle(t.Context(), []broker.Settlement{copying(x, dead)})
			if err == nil {
				continue
			}
			if got := settleItem(t, err, 0); !errors.Is(got, broker.ErrRejected) {
				t.Errorf("got %v, want ErrRejected", got)
			}
			rejected++
		}
		if rejected == 0 {
			t.Fatal("a full queue rejected nothing")
		}
		closeBounded(t, s)
		b.eventuallyReady("orders", rejected)
	})
	t.Run("A10_cut_before_the_confirm", func(t *testing.T) {
		v := testenv.RabbitMQ(t).Vhost(t)
		proxy := testenv.Proxy(t, hostOf(t, v.URL))
		b := benchOn(t, v, proxy.URL(v.URL))
		d := b.declare(orders(), "")
		s := b.subscribe(d, 10)
		b.publish("orders", numbered(1)...)
		x := receive(t, s, 1)[0]
		proxy.Freeze()
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		started := time.Now()
		err := s.Settle(ctx, []broker.Settlement{copying(x, hold)})
		if took := time.Since(started); took > 5*time.Second {
			t.Errorf("Settle took %v beyond its context", took)
		}
		if got := settleItem(t, err, 0); !errors.Is(got, broker.ErrUnavailable) && !errors.Is(got, broker.ErrUnknown) {
			t.Errorf("got %v, want ErrUnavailable or ErrUnknown", got)
		}
		proxy.Flap()
		if _, err := s.Receive(t.Context()); !errors.Is(err, broker.ErrLost) {
			t.Errorf("Receive: %v, want ErrLost", err)
		}
		fresh := b.subscribe(d, 10)
		if again := receive(t, fresh, 1)[0]; !again.Redelivered {
			t.Error("the original did not come back")
		}
	})
}

// policy sets a policy and waits until the server applied it.
func (b *bench) policy(name, pattern string, definition map[string]any) {
	b.t.Helper()
	b.vhost.Server.MustCall(b.t, http.MethodPut, "/api/policies/"+b.vhost.Name+"/"+name,
		map[string]any{"pattern": pattern, "apply-to": "queues", "definition": definition}, nil)
	queue := strings.Trim(pattern, "^$")
	testenv.Eventually(b.t, bound, func() error {
		var q listedQueue
		if err := b.vhost.Server.Call(http.MethodGet, "/api/queues/"+b.vhost.Name+"/"+queue, nil, &q); err != nil {
			return err
		}
		if q.Policy != name {
			return fmt.Errorf("queue %q has the policy %q", queue, q.Policy)
		}
		return nil
	})
}

func TestC9_HeadersThatDoNotFit(t *testing.T) {
	b := newBench(t)
	s := b.subscribe(b.declare(orders(), ""), 10)
	big := strings.Repeat("x", 120<<10)
	b.publish("orders", amqp.Publishing{Headers: amqp.Table{"big": big}, Body: []byte("kept")}, amqp.Publishing{Body: []byte("other")})
	ds := receive(t, s, 2)
	action := settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected, Text: "t"}
	large := copying(ds[0], action)
	large.Stamp = append(large.Stamp, header.Field{Name: header.History, Value: strings.Repeat("h", 12<<10)})
	err := s.Settle(t.Context(), []broker.Settlement{large, copying(ds[1], action)})
	if got := settleItem(t, err, 0); !errors.Is(got, broker.ErrTooLarge) {
		t.Fatalf("got %v, want ErrTooLarge", got)
	}
	if got := settleItem(t, err, 1); got != nil {
		t.Errorf("the other one: %v", got)
	}
	large = copying(ds[0], action)
	large.Envelope = []byte(`{"headers":{},"body":"a2VwdA=="}`)
	large.Stamp = append(large.Stamp, header.Field{Name: header.Enveloped, Value: "headers"})
	mustSettle(t, s, []broker.Settlement{large})
	b.eventuallyReady("orders-dlq", 2)
	enveloped := b.contents("orders-dlq")[1]
	if string(enveloped.Body) != string(large.Envelope) || enveloped.Headers[header.Enveloped] == nil || enveloped.Headers["big"] != nil {
		t.Errorf("the envelope came as %q with headers %v", enveloped.Body, enveloped.Headers)
	}
	b.publish("orders", numbered(1)...)
	mustSettle(t, s, act(settle.Done, receive(t, s, 1)...)) // connection and channel are open
}

func TestC9_HarmfulHeadersAreDropped(t *testing.T) {
	b := newBench(t)
	s := b.subscribe(b.declare(orders(), ""), 10)
	b.publish("orders-dlq", numbered(1)...) // so that the queue of the CC exists and its count is known
	b.publish("orders", amqp.Publishing{Headers: amqp.Table{"CC": []any{"orders-dlq"}, "x-retry-count": int64(4), "mine": "1"}, Body: []byte("x")})
	b.eventuallyReady("orders-dlq", 2)
	x := receive(t, s, 1)[0]
	mustSettle(t, s, []broker.Settlement{copying(x, settle.Action{Kind: settle.Hold, Retries: 5})})
	again := receive(t, s, 1)[0]
	if again.Headers["CC"] != nil || again.Headers["x-retry-count"] != nil || again.Headers["mine"] != "1" {
		t.Errorf("headers %v", again.Headers)
	}
	if n := b.live("orders-dlq").Messages; n != 2 {
		t.Errorf("the copy was duplicated: the CC queue has %d messages, want 2", n)
	}
}

func TestSubscriptionOfADeletedQueue(t *testing.T) {
	bothTypes(t, func(t *testing.T, options string) {
		b := newBench(t)
		d := b.declare(orders(), options)
		s := b.subscribe(d, 10)
		b.publish("orders", numbered(1)...)
		x := receive(t, s, 1)
		if _, err := b.admin.Delete(t.Context(), []string{"orders"}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), bound)
		defer cancel()
		if _, err := s.Receive(ctx); !errors.Is(err, broker.ErrLost) {
			t.Errorf("Receive: %v, want ErrLost", err)
		}
		if err := settleItem(t, s.Settle(ctx, act(settle.Done, x...)), 0); !errors.Is(err, broker.ErrLost) {
			t.Errorf("Settle: %v, want ErrLost", err)
		}
		if _, err := b.client.Subscribe(ctx, broker.Subscribe{Declaration: d, Prefetch: 1}); !errors.Is(err, broker.ErrNotFound) {
			t.Errorf("Subscribe: %v, want ErrNotFound", err)
		}
	})
}

func hostOf(t testing.TB, raw string) string {
	t.Helper()
	e, err := parseURL(withoutUser(t, raw))
	if err != nil {
		t.Fatal(err)
	}
	return e.address()
}
