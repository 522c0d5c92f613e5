package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/rabbitserver"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// settleAge is how old a quorum queue must be before a SIGKILL of the server keeps what it confirmed: observed on
// 3.10, 4.0 and 4.3.
const settleAge = 2500 * time.Millisecond

// ledger follows every message of a fault test to its end.
type ledger struct {
	mu        sync.Mutex
	confirmed map[string]bool
	unknown   map[string]bool
	done      map[string]int
	dead      map[string]int
	problems  []string
}

func newLedger() *ledger {
	return &ledger{confirmed: map[string]bool{}, unknown: map[string]bool{}, done: map[string]int{}, dead: map[string]int{}}
}

func (l *ledger) problem(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.problems = append(l.problems, fmt.Sprintf(format, args...))
}

// missing are the confirmed messages that did not end yet.
func (l *ledger) missing() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for id := range l.confirmed {
		if l.done[id] == 0 && l.dead[id] == 0 {
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
				l.confirmed[m.ID] = true
			case errors.Is(failed[i], broker.ErrUnknown):
				l.unknown[m.ID] = true
			}
		}
		l.mu.Unlock()
		pause(ctx, 5*time.Millisecond)
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// consume settles as a worker would, until ctx ends: one in three is retried once, one in seven dies, the rest is
// acknowledged. What cannot be settled for the moment is tried again while it is ours.
func (l *ledger) consume(ctx context.Context, c broker.Client, d broker.Declaration) {
	for ctx.Err() == nil {
		s, err := c.Subscribe(ctx, broker.Subscribe{Declaration: d, Prefetch: 20, Concurrency: 20})
		if err != nil {
			if errors.Is(err, broker.ErrUnauthorized) || errors.Is(err, broker.ErrUnsupported) {
				l.problem("subscribe: %v", err)
			}
			pause(ctx, 100*time.Millisecond)
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
		case failed[i] == nil && b.Action.Kind == settle.DeadLetter:
			l.dead[id]++
		case failed[i] != nil && !errors.Is(failed[i], broker.ErrLost):
			again = append(again, b)
		}
	}
	return again
}

func TestA9_Ledger(t *testing.T) {
	for _, c := range []struct {
		name  string
		fault func(t *testing.T, srv *testenv.RabbitMQServer, proxy *testenv.FaultProxy)
	}{
		{"cut", func(t *testing.T, _ *testenv.RabbitMQServer, proxy *testenv.FaultProxy) {
			for range 5 {
				time.Sleep(300 * time.Millisecond) // under load, not for something to happen
				proxy.Flap()
			}
		}},
		{"cut_in_the_middle_of_answers", func(t *testing.T, _ *testenv.RabbitMQServer, proxy *testenv.FaultProxy) {
			for n := range 5 {
				proxy.Restore()
				proxy.LimitData(int64(20_000 + 1_777*n))
				time.Sleep(400 * time.Millisecond)
			}
			proxy.Restore()
		}},
		{"server_killed", func(t *testing.T, srv *testenv.RabbitMQServer, _ *testenv.FaultProxy) {
			time.Sleep(500 * time.Millisecond)
			srv.Kill(t)
			srv.Restart(t)
		}},
		{"server_stopped", func(t *testing.T, srv *testenv.RabbitMQServer, _ *testenv.FaultProxy) {
			time.Sleep(500 * time.Millisecond)
			srv.Stop(t)
			srv.Restart(t)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			private := strings.HasPrefix(c.name, "server")
			var srv *testenv.RabbitMQServer
			if private {
				srv = testenv.StartRabbitMQ(t, rabbitserver.Options{})
			} else {
				shared := testenv.RabbitMQ(t)
				srv = &shared
			}
			v := srv.Vhost(t)
			proxy := testenv.Proxy(t, hostOf(t, v.URL))
			runLedger(t, benchOn(t, v, proxy.URL(v.URL)), func() { c.fault(t, srv, proxy) })
		})
	}
}

func runLedger(t *testing.T, b *bench, fault func()) {
	d := b.declare(topology.Spec{Queue: "orders", Holds: []time.Duration{100 * time.Millisecond}, DeadLetter: true}, "")
	time.Sleep(settleAge)
	l := newLedger()
	producing, stopProducing := context.WithCancel(t.Context())
	consuming, stopConsuming := context.WithCancel(t.Context())
	defer stopProducing()
	defer stopConsuming()
	p := b.publisher(d)
	var producers, consumers sync.WaitGroup
	producers.Go(func() { l.produce(producing, p) })
	for range 2 {
		consumers.Go(func() { l.consume(consuming, b.client, d) })
	}
	fault()
	pause(t.Context(), 300*time.Millisecond)
	stopProducing()
	producers.Wait()
	testenv.Eventually(t, 60*time.Second, func() error {
		if m := l.missing(); len(m) > 0 {
			return fmt.Errorf("%d confirmed messages did not end, such as %s", len(m), m[0])
		}
		return nil
	})
	stopConsuming()
	consumers.Wait()
	l.check(t)
}

// check explains every duplicate: a message ends twice only if a copy or an acknowledgement of it was cut off, so
// that there are no more of them than were in flight at the faults.
func (l *ledger) check(t *testing.T) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.problems {
		t.Error(p)
	}
	twice := 0
	for _, n := range l.done {
		twice += n - 1
	}
	for id, n := range l.dead {
		if twice += n - 1; l.done[id] > 0 {
			twice++
		}
	}
	foreign := slices.DeleteFunc(slices.Collect(maps.Keys(l.done)), func(id string) bool { return l.confirmed[id] || l.unknown[id] })
	if len(foreign) > 0 {
		t.Errorf("%d messages ended that were said not to be stored, such as %s", len(foreign), foreign[0])
	}
	t.Logf("%d confirmed, %d unknown, %d done, %d dead, %d duplicates", len(l.confirmed), len(l.unknown), len(l.done), len(l.dead), twice)
	// Two consumers with 20 in flight each, and at most five faults.
	if most := 5 * 2 * 20; twice > most {
		t.Errorf("%d duplicates: more than the %d that were in flight at the faults", twice, most)
	}
	if len(l.confirmed) == 0 {
		t.Error("nothing was published")
	}
}

// The server takes back what is held for longer than its consumer timeout: up to 4.2 by closing the channel, from 4.3
// on by cancelling the consumer, which ignores a late acknowledgement without a word.
func TestConsumerTimeout(t *testing.T) {
	srv := testenv.StartRabbitMQ(t, rabbitserver.Options{ConsumerTimeout: 2 * time.Second})
	b := benchOn(t, srv.Vhost(t), "")
	d := b.declare(orders(), "")
	s := b.subscribe(d, 10)
	b.publish("orders", numbered(2)...)
	held := receive(t, s, 2)
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	if _, err := s.Receive(ctx); !errors.Is(err, broker.ErrLost) {
		t.Fatalf("Receive: %v, want ErrLost", err)
	}
	if err := settleItem(t, s.Settle(ctx, act(settle.Done, held[0])), 0); !errors.Is(err, broker.ErrLost) {
		t.Errorf("a late acknowledgement: %v, want ErrLost", err)
	}
	fresh := b.subscribe(d, 10)
	mustSettle(t, fresh, act(settle.Done, receive(t, fresh, 2)...))
}
