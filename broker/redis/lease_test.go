package redis

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/settle"
)

// With the override unset a message whose handler ran into its deadline gets no outcome: it stays pending, comes again
// when its lease is over, and has spent nothing.
func TestH8_PendingAfterTheDeadline(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	d := b.declare(orders(t))
	const timeout = 300 * time.Millisecond
	type call struct {
		retries, deliveries uint32
		at                  time.Time
	}
	calls := make(chan call, 10)
	w := b.work(d, func(ctx context.Context, m *runtime.Metadata) runtime.Outcome {
		n, _ := m.DeliveryCount()
		calls <- call{m.RetryCount, n, time.Now()}
		if n < 3 {
			<-ctx.Done()
			return runtime.Reject // too late
		}
		return runtime.Ack
	}, runtime.HandlerTimeout(timeout), runtime.MaxRetries(1), runtime.Prefetch(1), runtime.Concurrency(1))
	b.publish(d, messages("m", 1)...)
	var got []call
	for range 3 {
		select {
		case c := <-calls:
			got = append(got, c)
		case <-time.After(bound):
			t.Fatalf("calls: %+v", got)
		}
	}
	for i, c := range got {
		if c.retries != 0 || c.deliveries != uint32(i+1) {
			t.Errorf("call %d: retry count %d and delivery count %d, want 0 and %d", i, c.retries, c.deliveries, i+1)
		}
		// Renewed at the latest when its deadline passed, and then idle for at least two seconds.
		if i > 0 && c.at.Sub(got[i-1].at) < minIdle {
			t.Errorf("call %d came %s after the one before", i, c.at.Sub(got[i-1].at))
		}
	}
	testenv.Eventually(t, bound, func() error {
		if n := b.raw.XLen(t.Context(), main(d)).Val(); n != 0 {
			return fmt.Errorf("%d entries are left", n)
		}
		return nil
	})
	if err := w.stop(); err != nil {
		t.Errorf("the drain ended with %v", err)
	}
	if n := w.metric(t, "shove_messages_failed_total", "reason", "timeout"); n != 2 {
		t.Errorf("%v timeouts counted, want 2", n)
	}
	if n := b.raw.XLen(t.Context(), dead(d)).Val(); n != 0 {
		t.Errorf("%d dead letters", n)
	}
	if !b.log.has("stays pending") {
		t.Error("no warning about it")
	}
}

// A timed-out message that stays pending frees its place: others are handled meanwhile.
func TestH8_FreesItsPlace(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	d := b.declare(orders(t))
	done := make(chan string, 10)
	b.work(d, func(ctx context.Context, m *runtime.Metadata) runtime.Outcome {
		if n, _ := m.DeliveryCount(); string(m.Body()) == "m000" && n == 1 {
			<-ctx.Done()
			return runtime.Ack
		}
		done <- string(m.Body())
		return runtime.Ack
	}, runtime.HandlerTimeout(500*time.Millisecond), runtime.Prefetch(1), runtime.Concurrency(1))
	b.publish(d, messages("m", 3)...)
	for _, want := range []string{"m001", "m002", "m000"} {
		select {
		case got := <-done:
			if got != want {
				t.Errorf("%s was handled, want %s", got, want)
			}
		case <-time.After(bound):
			t.Fatalf("%s was not handled", want)
		}
	}
}

// With the override set the outcome is routed, and while the handler works its lease is renewed. A message is never both
// dead-lettered and redelivered.
func TestH9_OutcomeIsRouted(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		outcome runtime.Outcome
		dead    int64
		retries uint32
	}{{runtime.Reject, 1, 0}, {runtime.Retry, 0, 1}} {
		t.Run(tc.outcome.Verdict.String(), func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			d := b.declare(orders(t))
			var calls atomic.Int32
			var retries atomic.Uint32
			w := b.work(d, func(ctx context.Context, m *runtime.Metadata) runtime.Outcome {
				calls.Add(1)
				retries.Store(m.RetryCount)
				if m.RetryCount == 0 {
					<-ctx.Done()
				}
				return runtime.Ack
			}, runtime.HandlerTimeout(300*time.Millisecond), runtime.HandlerTimeoutOutcome(tc.outcome))
			b.publish(d, messages("m", 1)...)
			testenv.Eventually(t, bound, func() error {
				n, deads, held := b.raw.XLen(t.Context(), main(d)).Val(), b.raw.XLen(t.Context(), dead(d)).Val(), b.raw.ZCard(t.Context(), holdKey(d, 0)).Val()
				if calls.Load() == 0 || n+held != 0 || deads != tc.dead {
					return fmt.Errorf("%d calls, %d entries, %d held, %d dead", calls.Load(), n, held, deads)
				}
				return nil
			})
			// Nothing is redelivered after its lease would have been over.
			testenv.Consistently(t, minIdle+time.Second, func() error {
				if got := calls.Load(); got != 1+int32(tc.retries) || retries.Load() != tc.retries {
					return fmt.Errorf("%d calls, the last with retry count %d", got, retries.Load())
				}
				return nil
			})
			if err := w.stop(); err != nil {
				t.Error(err)
			}
		})
	}
}

// A lease that was lost routes nothing: whatever the outcome, nothing is written and nothing acknowledged.
func TestH9_LostLease(t *testing.T) {
	b := newBench(t)
	d := b.declare(orders(t))
	b.publish(d, messages("m", 10)...)
	s := b.subscribe(d, 10)
	ds := receive(t, s, 10)
	b.steal(d, ds[1], ds[3], ds[5], ds[7], ds[9])
	hold := settle.Action{Kind: settle.Hold, Tier: 1, Retries: 1, Delay: 400 * time.Millisecond}
	reject := settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected}
	batch := append(act(settle.Done, ds[0], ds[1]), copying(ds[2], hold), copying(ds[3], hold), copying(ds[4], reject), copying(ds[5], reject))
	batch = append(batch, act(settle.GiveBack, ds[6], ds[7])...)
	batch = append(batch, act(settle.Drop, ds[8], ds[9])...)
	lostItems(t, s.Settle(t.Context(), batch), 1, 3, 5, 7, 9)

	// Renewing does not take it back.
	if err := s.Extend(t.Context(), ds, 30*time.Second); err != nil {
		t.Error(err)
	}
	if got := b.pending(d); got["thief"] != 5 {
		t.Errorf("pending: %v, want the thief to have 5", got)
	}
	if n := b.raw.XLen(t.Context(), dead(d)).Val(); n != 1 {
		t.Errorf("%d dead letters, want 1", n)
	}
	if n := b.raw.ZCard(t.Context(), holdKey(d, 1)).Val(); n != 1 {
		t.Errorf("%d held, want 1", n)
	}
	// 10 less two acknowledged, one held, one dead; one was given back.
	if n := b.raw.XLen(t.Context(), main(d)).Val(); n != 6 {
		t.Errorf("%d entries, want 6", n)
	}
}

// Renewing raises no count and keeps an entry from being taken away.
func TestH9_LeaseIsRenewed(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	d := b.declare(orders(t))
	b.publish(d, messages("m", 4)...)
	s := b.subscribeAs(broker.Subscribe{Declaration: d, Prefetch: 4, Concurrency: 1, Lease: time.Second})
	ds := receive(t, s, 4)
	other := b.subscribeAs(broker.Subscribe{Declaration: d, Prefetch: 4, Concurrency: 1, Lease: time.Second})
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(300 * time.Millisecond) {
		if err := s.Extend(t.Context(), ds[:2], time.Second); err != nil {
			t.Fatal(err)
		}
	}
	again := receive(t, other, 2)
	if got := fmt.Sprint(bodies(again)); got != "[m002 m003]" {
		t.Errorf("%s came to the other consumer, want those that were not renewed", got)
	}
	for _, x := range again {
		if x.DeliveryCount != 2 || x.Crashes != 1 || !x.Redelivered {
			t.Errorf("delivery count %d, crashes %d, redelivered %v", x.DeliveryCount, x.Crashes, x.Redelivered)
		}
	}
	rows, err := b.raw.XPendingExt(t.Context(), &goredis.XPendingExtArgs{Stream: main(d), Group: d.Topology.Queue, Start: "-", End: "+", Count: 10, Consumer: s.name}).Result()
	if err != nil || len(rows) != 2 || rows[0].RetryCount != 1 {
		t.Errorf("pending of the first consumer: %+v, %v", rows, err)
	}
	lostItems(t, s.Settle(t.Context(), act(settle.Done, ds...)), 2, 3)
	mustSettle(t, other, act(settle.Done, again...))
}

// Consumers look at the deadline that each entry's owner shows, not at their own.
func TestH10_SlowConsumerIsLeftAlone(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	d := b.declare(orders(t))
	b.publish(d, messages("m", 1)...)
	slow := b.subscribeAs(broker.Subscribe{Declaration: d, Prefetch: 1, Concurrency: 1, Lease: time.Minute})
	ds := receive(t, slow, 1)
	quick := b.subscribeAs(broker.Subscribe{Declaration: d, Prefetch: 1, Concurrency: 1, Lease: 100 * time.Millisecond})
	ctx, cancel := context.WithTimeout(t.Context(), minIdle+2*time.Second)
	defer cancel()
	if got, err := quick.Receive(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a quick consumer got %d messages of a slow one: %v", len(got), err)
	}
	mustSettle(t, slow, act(settle.Done, ds...))
}

// Handler timeouts that differ by more than a factor of two are shown to the operator.
func TestH10_DeadlinesAreCompared(t *testing.T) {
	b := newBench(t)
	d := b.declare(orders(t))
	warned := func() string {
		t.Helper()
		obs, err := b.admin.Observe(t.Context(), []broker.Declaration{d})
		if err != nil {
			t.Fatal(err)
		}
		if !obs[0].UpToDate() {
			t.Errorf("%+v", obs[0])
		}
		return strings.Join(obs[0].Warnings, "; ")
	}
	with := func(timeout time.Duration) *subscription {
		return b.subscribeAs(broker.Subscribe{Declaration: d, Prefetch: 1, Concurrency: 1, Lease: timeout})
	}
	with(10 * time.Second)
	with(20 * time.Second)
	if w := warned(); w != "" {
		t.Errorf("10 s and 20 s: %s", w)
	}
	long := with(21 * time.Second)
	if w := warned(); !strings.Contains(w, "10s and 21s") || !strings.Contains(w, main(d)) {
		t.Errorf("10 s and 21 s: %q", w)
	}
	closeBounded(t, long)
	if w := warned(); w != "" {
		t.Errorf("after the last one left: %s", w)
	}
	with(0)
	if w := warned(); !strings.Contains(w, "10s and none") {
		t.Errorf("10 s and none: %q", w)
	}
}

// A stamped copy keeps its identity when its original is taken away in between: it is written by nobody.
func TestH9_NeverBothDeadAndRedelivered(t *testing.T) {
	b := newBench(t)
	d := b.declare(orders(t))
	const n = 200
	b.publish(d, messages("m", n)...)
	s := b.subscribe(d, n)
	ds := receive(t, s, n)
	stolen := make(chan struct{})
	go func() { // takes every second entry away, while all of them are dead-lettered
		defer close(stolen)
		for i := 0; i < n; i += 2 {
			b.raw.XClaimJustID(context.Background(), &goredis.XClaimArgs{Stream: main(d), Group: d.Topology.Queue, Consumer: "thief", Messages: []string{ds[i].Native.DeliveryID()}})
		}
	}()
	routed := map[string]bool{}
	for i := range ds {
		err := s.Settle(t.Context(), []broker.Settlement{copying(ds[i], settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected})})
		if err == nil {
			routed[string(ds[i].Body)] = true
		}
	}
	<-stolen
	deads, err := b.raw.XRange(t.Context(), dead(d), "-", "+").Result()
	if err != nil {
		t.Fatal(err)
	}
	left, err := b.raw.XRange(t.Context(), main(d), "-", "+").Result()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	for _, x := range append(deads, left...) {
		seen[x.Values[header.MessageID].(string)]++
	}
	for id, times := range seen {
		if times != 1 {
			t.Errorf("%s is there %d times", id, times)
		}
	}
	if len(deads)+len(left) != n || len(deads) != len(routed) {
		t.Errorf("%d dead and %d left of %d; %d were said to be routed", len(deads), len(left), n, len(routed))
	}
	t.Logf("%d dead, %d taken away", len(deads), len(left))
}
