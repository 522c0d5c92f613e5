package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/redisserver"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// ledger follows every message of a fault test to its end.
type ledger struct {
	mu        sync.Mutex
	confirmed map[string]time.Time // when
	unknown   map[string]bool
	gone      map[string]bool // destroyed by the fault itself
	done      map[string]int
	maybe     map[string]bool // handled, and it is not known whether the acknowledgement arrived
	dead      map[string]int
	problems  []string
	died      time.Time // when a primary died whose replica took over
}

func newLedger() *ledger {
	return &ledger{confirmed: map[string]time.Time{}, unknown: map[string]bool{}, gone: map[string]bool{}, maybe: map[string]bool{}, done: map[string]int{}, dead: map[string]int{}}
}

func (l *ledger) problem(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.problems = append(l.problems, fmt.Sprintf(format, args...))
}

func (l *ledger) destroyed(ids []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		l.gone[id] = true
	}
}

// snapshot is how many messages were confirmed so far.
func (l *ledger) snapshot() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.confirmed)
}

// grows waits until n more messages are confirmed, so that what follows happens under load.
func (l *ledger) grows(t *testing.T, n int) {
	t.Helper()
	before := l.snapshot()
	testenv.Eventually(t, time.Minute, func() error {
		if now := l.snapshot(); now < before+n {
			return fmt.Errorf("%d messages confirmed, %d before", now, before)
		}
		return nil
	})
}

// missing are the confirmed messages that did not end yet and were not destroyed.
func (l *ledger) missing() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for id := range l.confirmed {
		if l.done[id] == 0 && l.dead[id] == 0 && !l.gone[id] && !l.maybe[id] {
			out = append(out, id)
		}
	}
	slices.Sort(out)
	return out
}

// produce publishes until ctx ends, and notes what was confirmed and what may be stored.
func (l *ledger) produce(ctx context.Context, p broker.Publisher) {
	for n := 0; ctx.Err() == nil; n++ {
		batch := messages(fmt.Sprintf("p%05d-", n), 10)
		call, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := p.Publish(call, batch)
		cancel()
		failed := map[int]error{}
		if e, ok := errors.AsType[*broker.PublishError](err); ok {
			for _, it := range e.Items {
				failed[it.Index] = it.Err
			}
		} else if err != nil {
			l.problem("publish: %v", err)
		}
		l.mu.Lock()
		for i, m := range batch {
			switch {
			case failed[i] == nil:
				l.confirmed[m.ID] = time.Now()
			case errors.Is(failed[i], broker.ErrUnknown):
				l.unknown[m.ID] = true
			}
		}
		l.mu.Unlock()
		pauseFor(ctx, 5*time.Millisecond)
	}
}

func pauseFor(ctx context.Context, d time.Duration) { pause(d, ctx.Done()) }

// consume settles as a worker would, until ctx ends: one in three is retried once, one in seven dies, the rest is
// acknowledged. What cannot be settled for the moment is tried again while it is ours.
func (l *ledger) consume(ctx context.Context, c broker.Client, d broker.Declaration) {
	for ctx.Err() == nil {
		s, err := c.Subscribe(ctx, broker.Subscribe{Declaration: d, Prefetch: 20, Concurrency: 20, Lease: 5 * time.Second})
		if err != nil {
			if errors.Is(err, broker.ErrUnauthorized) || errors.Is(err, broker.ErrUnsupported) {
				l.problem("subscribe: %v", err)
			}
			pauseFor(ctx, 100*time.Millisecond)
			continue
		}
		l.work(ctx, s)
		_ = s.Close(context.Background())
	}
}

func (l *ledger) work(ctx context.Context, s broker.Subscription) {
	for {
		ds, err := s.Receive(ctx)
		if err != nil {
			if !errors.Is(err, broker.ErrLost) && ctx.Err() == nil {
				l.problem("receive: %v", err)
			}
			return
		}
		batch := make([]broker.Settlement, len(ds))
		for i, d := range ds {
			batch[i] = decide(d)
		}
		for len(batch) > 0 && ctx.Err() == nil {
			batch = l.settle(s, batch)
		}
	}
}

func decide(d *broker.Delivery) broker.Settlement {
	sum := 0
	for _, b := range d.Body {
		sum += int(b)
	}
	switch retries := header.Parse(d.Headers).Retries; {
	case sum%3 == 0 && retries == 0:
		return copying(d, settle.Action{Kind: settle.Hold, Tier: 0, Delay: 100 * time.Millisecond, Retries: 1})
	case sum%7 == 0:
		return copying(d, settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected, Retries: retries})
	}
	return broker.Settlement{Delivery: d, Action: settle.Action{Kind: settle.Done}}
}

// settle returns what is still ours and not settled.
func (l *ledger) settle(s broker.Subscription, batch []broker.Settlement) []broker.Settlement {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	err := s.Settle(ctx, batch)
	cancel()
	failed := map[int]error{}
	if e, ok := errors.AsType[*broker.SettleError](err); ok {
		for _, it := range e.Items {
			failed[it.Index] = it.Err
		}
	} else if err != nil {
		l.problem("settle: %v", err)
	}
	var again []broker.Settlement
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, b := range batch {
		id := string(b.Delivery.Body)
		switch {
		case failed[i] == nil && b.Action.Kind == settle.Done:
			l.done[id]++
			continue
		case b.Action.Kind == settle.Done:
			l.maybe[id] = true
		}
		if failed[i] != nil && !errors.Is(failed[i], broker.ErrLost) {
			again = append(again, b)
		}
	}
	return again
}

// run publishes and consumes until the function that it returns is called, which checks the account.
func (l *ledger) run(t *testing.T, b *bench, d broker.Declaration) (stop func()) {
	t.Helper()
	producing, stopProducing := context.WithCancel(t.Context())
	consuming, stopConsuming := context.WithCancel(t.Context())
	p, err := b.client.Publisher(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	var producers, consumers sync.WaitGroup
	producers.Go(func() { l.produce(producing, p) })
	for range 2 {
		consumers.Go(func() { l.consume(consuming, b.client, d) })
	}
	end := func() {
		stopProducing()
		producers.Wait()
		stopConsuming()
		consumers.Wait()
	}
	t.Cleanup(end)
	return func() {
		t.Helper()
		stopProducing()
		producers.Wait()
		if !l.died.IsZero() {
			b.eventuallyDrained(d)
			l.readDead(t, b, d)
			t.Logf("%d were not replicated", l.notReplicated(l.died))
		}
		testenv.Eventually(t, 90*time.Second, func() error {
			l.readDead(t, b, d)
			if m := l.missing(); len(m) > 0 {
				return fmt.Errorf("%d confirmed messages did not end, such as %s", len(m), m[0])
			}
			return nil
		})
		b.eventuallyDrained(d)
		end()
		l.check(t)
	}
}

// notReplicated notes as destroyed what was confirmed within the second before a primary died and is nowhere: it had not
// reached the replica. It is called when nothing is on its way any more, and returns how many there are.
func (l *ledger) notReplicated(died time.Time) int {
	missing := l.missing()
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, id := range missing {
		if at := l.confirmed[id]; at.Before(died) && died.Sub(at) < time.Second {
			l.gone[id] = true
			n++
		}
	}
	return n
}

// readDead notes what is in the dead-letter queue.
func (l *ledger) readDead(t testing.TB, b *bench, d broker.Declaration) {
	t.Helper()
	all, err := b.raw.XRange(context.Background(), dead(d), "-", "+").Result()
	if err != nil {
		t.Fatal(err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.dead)
	for _, x := range all {
		l.dead[x.Values[header.MessageID].(string)]++
	}
}

// check explains every duplicate: an acknowledgement or a copy was cut off, so that there are no more of them than were
// in flight at the faults.
func (l *ledger) check(t *testing.T) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.problems {
		t.Error(p)
	}
	twice := 0
	for id, n := range l.done {
		twice += n - 1
		if l.confirmed[id].IsZero() && !l.unknown[id] {
			t.Errorf("%s ended that was said not to be stored", id)
		}
	}
	for id, n := range l.dead {
		if twice += n - 1; l.done[id] > 0 {
			twice++
		}
	}
	t.Logf("%d confirmed, %d unknown, %d done, %d dead, %d destroyed, %d duplicates", len(l.confirmed), len(l.unknown), len(l.done), len(l.dead), len(l.gone), twice)
	// Two consumers with 20 in flight each, and at most five faults.
	if most := 5 * 2 * 20; twice > most {
		t.Errorf("%d duplicates: more than the %d that were in flight at the faults", twice, most)
	}
	if len(l.confirmed) == 0 {
		t.Error("nothing was published")
	}
}

func TestA9_Ledger(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		fault func(t *testing.T, l *ledger, srv *redisserver.Server, proxy *testenv.FaultProxy)
	}{
		{"cut", func(t *testing.T, l *ledger, _ *redisserver.Server, proxy *testenv.FaultProxy) {
			for range 5 {
				l.grows(t, 50)
				proxy.Flap()
			}
		}},
		{"cut_in_the_middle_of_answers", func(_ *testing.T, _ *ledger, _ *redisserver.Server, proxy *testenv.FaultProxy) {
			for n := range 5 {
				proxy.Restore()
				proxy.LimitData(int64(20_000 + 1_777*n))
				time.Sleep(400 * time.Millisecond) // a while in which every connection breaks
			}
			proxy.Restore()
		}},
		{"frozen_network", func(t *testing.T, l *ledger, _ *redisserver.Server, proxy *testenv.FaultProxy) {
			l.grows(t, 50)
			proxy.Freeze()
			time.Sleep(8 * time.Second) // longer than a read may take
			proxy.Restore()
			proxy.Flap() // what was frozen is gone
		}},
		{"server_killed", func(t *testing.T, l *ledger, srv *redisserver.Server, _ *testenv.FaultProxy) {
			l.grows(t, 100)
			if err := errors.Join(srv.Kill(), srv.Restart(t.Context())); err != nil {
				t.Fatal(err)
			}
		}},
		{"server_stopped", func(t *testing.T, l *ledger, srv *redisserver.Server, _ *testenv.FaultProxy) {
			l.grows(t, 100)
			if err := errors.Join(srv.Stop(), srv.Restart(t.Context())); err != nil {
				t.Fatal(err)
			}
		}},
		{"server_paused", func(t *testing.T, l *ledger, srv *redisserver.Server, _ *testenv.FaultProxy) {
			l.grows(t, 50)
			if err := srv.Freeze(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(3 * time.Second) // leases run on meanwhile
			if err := srv.Thaw(); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			srv := testenv.StartRedis(t, redisserver.Options{})
			proxy := testenv.Proxy(t, srv.Addr())
			b := benchOn(t, srv.Addr(), proxy.Addr())
			d := b.declare(topology.Spec{Queue: "orders", Holds: []time.Duration{100 * time.Millisecond}, DeadLetter: true})
			l := newLedger()
			stop := l.run(t, b, d)
			c.fault(t, l, srv, proxy)
			l.grows(t, 50)
			stop()
		})
	}
}
