package nats

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/settle"
)

var logStream = jetstream.StreamConfig{Name: "orders-log", Subjects: []string{"log.>"}}

// TestCase12_HeldMessagesStopNoOthers (nats-server#6093): with two unacknowledged messages allowed, two held and three
// more published, the three are handled meanwhile.
func TestCase12_HeldMessagesStopNoOthers(t *testing.T) {
	t.Parallel()
	for name, m := range map[string]mode{"scheduled": {}, "parked": {park: true}} {
		t.Run(name, func(t *testing.T) {
			b := benchOn(t, startServer(t), m)
			d := b.declare(orders(), "")
			k := b.consumerInfo("orders", "orders").Config
			k.MaxAckPending = 2
			if _, err := b.raw.js.UpdateConsumer(t.Context(), "orders", k); err != nil {
				t.Fatal(err)
			}
			s := b.subscribe(d, 10)
			b.publish(d, messages("held", 2)...)
			began := time.Now()
			for _, x := range receive(t, s, 2) {
				mustSettle(t, s, copying(x, holdFor(1, 1)))
			}
			b.publish(d, messages("more", 3)...)
			for done := 0; done < 3; {
				for _, x := range receiveSome(t, s, 2) {
					if string(x.Body[:4]) != "more" {
						t.Errorf("%q came after %s", x.Body, time.Since(began))
					}
					mustSettle(t, s, act(settle.Done, x)...)
					done++
				}
			}
			if waited := time.Since(began); waited > 2*time.Second {
				t.Errorf("the others waited %s, as long as the held ones", waited)
			}
			for done := 0; done < 2; {
				for _, x := range receiveSome(t, s, 2) {
					mustSettle(t, s, act(settle.Done, x)...)
					done++
				}
			}
		})
	}
}

// TestCase13_NeverSucceeds (nats-server#5564): a message of a work queue whose handler never succeeds ends in the
// dead-letter stream and leaves the work queue, instead of staying there undelivered.
func TestCase13_NeverSucceeds(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	d := b.declare(orders(), "")
	s := b.subscribe(d, 1)
	b.publish(d, messages("m", 1)...)
	policy := settle.Policy{Holds: d.Topology.Delays()[:1], DeadLetter: true, MaxRetries: 3}
	calls := 0
	for {
		x := receive(t, s, 1)[0]
		calls++
		a := settle.Decide(settle.Retry, settle.Message{Retries: header.Parse(x.Headers).Retries}, policy)
		mustSettle(t, s, copying(x, a))
		if a.Kind == settle.DeadLetter {
			break
		}
	}
	dead := b.eventually("orders-dlq", "orders-dlq", 1)
	b.eventually("orders", ">", 0)
	if calls != 4 || dead[0].Header.Get(header.DeathReason) != string(settle.MaxRetriesExceeded) {
		t.Errorf("%d calls, died of %q", calls, dead[0].Header.Get(header.DeathReason))
	}
	if k := b.consumerInfo("orders", "orders"); k.NumAckPending != 0 || k.NumPending != 0 || k.Config.MaxDeliver != -1 {
		t.Errorf("%d unacknowledged, %d pending, at most %d deliveries", k.NumAckPending, k.NumPending, k.Config.MaxDeliver)
	}
}

// TestCase14_LeasesOfWhatIsPrefetched (nats.go#1929): many messages are prefetched and handled one after the other for
// much longer than the ack wait: none begins with a lease that is over, none comes twice.
func TestCase14_LeasesOfWhatIsPrefetched(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	d := b.declare(orders(), `{"ackWait": "2s"}`)
	const n = 500
	b.publish(d, messages("m", n)...)
	s := b.subscribeAs(broker.Subscribe{Declaration: d, Prefetch: n, Concurrency: 1, Lease: time.Minute})
	other := b.subscribe(d, 1) // would get what is redelivered
	var theirs atomic.Int64
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			ds, err := other.Receive(t.Context())
			if errors.Is(err, broker.ErrClosed) {
				return
			}
			if err != nil {
				t.Errorf("receive: %v", err)
				return
			}
			for _, x := range ds {
				if x.Redelivered {
					t.Errorf("%q was delivered %d times", x.Body, x.DeliveryCount)
				}
			}
			theirs.Add(int64(len(ds)))
			if err := other.Settle(t.Context(), act(settle.Done, ds...)); err != nil {
				t.Errorf("settle: %v", err)
			}
		}
	}()
	seen := map[string]bool{}
	for len(seen)+int(theirs.Load()) < n {
		for _, x := range receiveSome(t, s, n) {
			time.Sleep(15 * time.Millisecond) // the handler: 7.5 s for all of them
			if seen[string(x.Body)] || x.Redelivered {
				t.Fatalf("%q came twice", x.Body)
			}
			seen[string(x.Body)] = true
			mustSettle(t, s, act(settle.Done, x)...)
		}
	}
	closeBounded(t, other)
	<-ended
	b.eventually("orders", ">", 0)
	if k := b.consumerInfo("orders", "orders"); k.NumAckPending != 0 {
		t.Errorf("%d are unacknowledged", k.NumAckPending)
	}
}
