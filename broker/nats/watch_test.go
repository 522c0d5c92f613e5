package nats

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/settle"
)

// lostWithin waits until Receive says that the subscription is over.
func lostWithin(t testing.TB, s broker.Subscription, d time.Duration) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	for {
		ds, err := s.Receive(ctx)
		if err != nil {
			if !errors.Is(err, broker.ErrLost) {
				t.Fatalf("received %v, want that the subscription is lost", err)
			}
			return err
		}
		t.Logf("%d more deliveries", len(ds))
	}
}

// TestWatchdog: a consumer or stream that goes away ends the subscription, and the next one makes the consumer anew.
// The client library would go on silently.
func TestWatchdog(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		remove func(t *testing.T, b *bench)
		full   bool // no request is open when it happens
		stream bool
	}{
		"consumer_deleted": {remove: func(t *testing.T, b *bench) {
			if err := b.raw.js.DeleteConsumer(t.Context(), "orders", "orders"); err != nil {
				t.Fatal(err)
			}
		}},
		"consumer_deleted_while_full": {full: true, remove: func(t *testing.T, b *bench) {
			if err := b.raw.js.DeleteConsumer(t.Context(), "orders", "orders"); err != nil {
				t.Fatal(err)
			}
		}},
		"stream_deleted": {stream: true, remove: func(t *testing.T, b *bench) {
			if _, err := b.admin.Delete(t.Context(), []string{"orders"}); err != nil {
				t.Fatal(err)
			}
		}},
		"stream_made_anew": {remove: func(t *testing.T, b *bench) {
			if _, err := b.admin.Delete(t.Context(), []string{"orders"}); err != nil {
				t.Fatal(err)
			}
			b.publish(b.declare(orders(), ""), messages("m", 2)...)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			d := b.declare(orders(), `{"ackWait": "3s"}`)
			s := b.subscribe(d, 2)
			b.publish(d, messages("m", 2)...)
			ds := receive(t, s, 2)
			if !tc.full {
				mustSettle(t, s, act(settle.Done, ds[0])...)
			}
			tc.remove(t, b)
			if tc.full { // nothing is heard until it asks for more
				mustSettle(t, s, act(settle.Done, ds[0])...)
			}
			t.Log(lostWithin(t, s, bound))
			if err := s.Settle(t.Context(), act(settle.Done, ds[1])); !errors.Is(settleItem(t, err, 0), broker.ErrLost) {
				t.Errorf("settling a lost delivery: %v", err)
			}
			if tc.stream {
				if _, err := b.client.Subscribe(t.Context(), broker.Subscribe{Declaration: d, Prefetch: 2}); !errors.Is(err, broker.ErrNotFound) {
					t.Errorf("subscribing to a stream that is gone: %v", err)
				}
				return
			}
			next := b.subscribe(d, 2)
			for {
				x := receiveSome(t, next, 2)
				mustSettle(t, next, act(settle.Done, x...)...)
				if string(x[len(x)-1].Body) == string(ds[1].Body) {
					return
				}
			}
		})
	}
}

// TestM1_ServerRestart: what was delivered comes back at once over the next connection, and the late settlement of it
// goes nowhere.
func TestM1_ServerRestart(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	d := b.declare(orders(), "")
	b.publish(d, messages("m", 5)...)
	s := b.subscribe(d, 10)
	ds := receive(t, s, 5)
	mustSettle(t, s, copying(ds[0], holdFor(1, 1)), copying(ds[1], settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected}))
	b.server.restart()
	t.Log(lostWithin(t, s, bound))
	if err := s.Settle(t.Context(), act(settle.Done, ds[2])); !errors.Is(settleItem(t, err, 0), broker.ErrLost) {
		t.Errorf("settling a lost delivery: %v", err)
	}
	var next broker.Subscription
	testenv.Eventually(t, bound, func() (err error) {
		next, err = b.client.Subscribe(t.Context(), broker.Subscribe{Declaration: d, Prefetch: 10, Concurrency: 1})
		return err
	})
	defer closeBounded(t, next)
	began := time.Now()
	seen := map[string]uint32{}
	for len(seen) < 4 {
		for _, x := range receiveSome(t, next, 10) {
			seen[string(x.Body)] = x.DeliveryCount
			mustSettle(t, next, act(settle.Done, x)...)
		}
	}
	if waited := time.Since(began); waited > 10*time.Second {
		t.Errorf("they came back after %s, when the ack wait of 30 s would have been over", waited)
	}
	if seen["m0000"] != 1 || seen["m0002"] != 2 || seen["m0004"] != 2 {
		t.Errorf("delivery counts %v", seen)
	}
	b.eventually("orders", ">", 0)
	b.eventually("orders-dlq", ">", 1)
}

// TestFrozenConnection: a network that drops everything in silence ends the subscription, because nothing is heard.
func TestFrozenConnection(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	proxy := testenv.Proxy(t, s.addr())
	b := benchOn(t, s, mode{})
	d := b.declare(orders(), `{"ackWait": "3s"}`)
	c := b.openClient(broker.Config{Endpoint: endpointOf(t, "nats://"+proxy.Addr())})
	sub, err := c.Subscribe(t.Context(), broker.Subscribe{Declaration: d, Prefetch: 1, Concurrency: 1})
	if err != nil {
		t.Fatal(err)
	}
	b.publish(d, messages("m", 1)...)
	x := receive(t, sub, 1)
	proxy.Freeze()
	// Before the connection is given up the delivery is: its lease could not be renewed, and the server has it back.
	other := b.subscribe(d, 1)
	again := receive(t, other, 1)
	if again[0].DeliveryCount != 2 {
		t.Errorf("delivery %d", again[0].DeliveryCount)
	}
	err = lostWithin(t, sub, 3*pingInterval+bound)
	if !strings.Contains(err.Error(), "connection lost") {
		t.Errorf("lost because of %v", err)
	}
	if err := sub.Settle(t.Context(), act(settle.Done, x...)); !errors.Is(settleItem(t, err, 0), broker.ErrLost) {
		t.Errorf("settling a lost delivery: %v", err)
	}
	proxy.Restore()
	mustSettle(t, other, act(settle.Done, again...)...)
	closeBounded(t, c)
}
