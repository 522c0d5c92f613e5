package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/redisserver"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// dies makes a subscription stop showing that it lives, and renewing, as a killed process does.
func (s *subscription) dies(t testing.TB) {
	t.Helper()
	if !s.end(errors.New("killed by the test")) {
		t.Fatal("it was over already")
	}
	<-s.tended
	<-s.fetched
	s.mu.Lock()
	s.closed = true // nothing is handed back
	s.mu.Unlock()
	s.client.remove(s)
	s.abort()
}

// watermill-redisstream#24: a consumer dies with pending entries, and its name is deleted. All of them are
// processed, whoever deletes the name.
func TestCase15_DeletedConsumer(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		bury func(b *bench, d broker.Declaration, name string)
	}{
		{"by_itself", func(*bench, broker.Declaration, string) {}},
		{"by_somebody", func(b *bench, d broker.Declaration, name string) {
			n, err := b.raw.XGroupDelConsumer(b.t.Context(), main(d), d.Topology.Queue, name).Result()
			if err != nil || n != 5 {
				b.t.Fatalf("deleted a consumer with %d pending entries, %v", n, err)
			}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			d := b.declare(orders(t))
			b.publish(d, messages("m", 8)...)
			s := b.subscribe(d, 5)
			receive(t, s, 5)
			s.dies(t)
			tc.bury(b, d, s.name)
			next := b.subscribe(d, 8)
			ctx, cancel := context.WithTimeout(t.Context(), bound)
			defer cancel()
			var got []string
			for len(got) < 8 {
				ds, err := next.Receive(ctx)
				if err != nil {
					t.Fatalf("got %v: %v", got, err)
				}
				got = append(got, bodies(ds)...)
				mustSettle(t, next, act(settle.Done, ds...))
			}
			slices.Sort(got)
			if fmt.Sprint(got) != "[m000 m001 m002 m003 m004 m005 m006 m007]" {
				t.Errorf("got %v", got)
			}
			testenv.Eventually(t, bound, func() error {
				consumers, err := b.raw.XInfoConsumers(t.Context(), main(d), d.Topology.Queue).Result()
				if err != nil {
					return err
				}
				for _, c := range consumers {
					if c.Name == s.name {
						return errors.New("the dead consumer's name is still there")
					}
				}
				return nil
			})
			if n := b.raw.XLen(t.Context(), main(d)).Val(); n != 0 {
				t.Errorf("%d entries are left", n)
			}
		})
	}
}

// A consumer whose name is deleted while it works: what it settles then is refused, and everything comes again.
func TestCase15_DeletedWhileItWorks(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	d := b.declare(orders(t))
	b.publish(d, messages("m", 3)...)
	s := b.subscribe(d, 3)
	ds := receive(t, s, 3)
	if err := b.raw.XGroupDelConsumer(t.Context(), main(d), d.Topology.Queue, s.name).Err(); err != nil {
		t.Fatal(err)
	}
	lostItems(t, s.Settle(t.Context(), act(settle.Done, ds...)), 0, 1, 2)
	again := receive(t, s, 3)
	if fmt.Sprint(bodies(again)) != fmt.Sprint(bodies(ds)) || !again[0].Redelivered {
		t.Errorf("got %v", bodies(again))
	}
	mustSettle(t, s, act(settle.Done, again...))
	if !b.log.has("level=ERROR", "deleted a consumer") {
		t.Error("it was not logged")
	}
}

// redis#10198: delivered entries are deleted, then claimed. Nothing empty is dispatched, the list of pending entries
// empties, and two are counted as lost, loudly.
func TestCase16_DeletedEntries(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"dead_owner", "returned"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			d := b.declare(orders(t))
			b.publish(d, messages("m", 4)...)
			s := b.subscribe(d, 4)
			ds := receive(t, s, 4)
			if how == "returned" {
				mustSettle(t, s, act(settle.GiveBack, ds...))
				closeBounded(t, s)
			} else {
				s.dies(t)
			}
			for _, x := range ds[1:3] {
				if err := b.raw.XDel(t.Context(), main(d), x.Native.DeliveryID()).Err(); err != nil {
					t.Fatal(err)
				}
			}
			handled := make(chan string, 10)
			w := b.work(d, func(_ context.Context, m *runtime.Metadata) runtime.Outcome {
				handled <- string(m.Body())
				return runtime.Ack
			})
			var got []string
			for range 2 {
				select {
				case body := <-handled:
					got = append(got, body)
				case <-time.After(bound):
					t.Fatalf("handled %v", got)
				}
			}
			slices.Sort(got)
			if fmt.Sprint(got) != "[m000 m003]" {
				t.Errorf("handled %v", got)
			}
			testenv.Eventually(t, bound, func() error {
				p, err := b.raw.XPending(t.Context(), main(d), d.Topology.Queue).Result()
				if err != nil || p.Count != 0 {
					return fmt.Errorf("pending: %+v, %w", p, err)
				}
				if n := w.metric(t, "shove_messages_discarded_total", "reason", "lost"); n != 2 {
					return fmt.Errorf("%v messages counted as lost, want 2", n)
				}
				return nil
			})
			if n := w.metric(t, "shove_messages_failed_total", "reason", "lost"); n != 2 {
				t.Errorf("%v failures counted, want 2", n)
			}
			if !b.log.has("level=ERROR", "messages are lost") {
				t.Error("it was not logged")
			}
			if how == "dead_owner" { // found by the upkeep, which notes it for the operator
				obs, err := b.admin.Observe(t.Context(), []broker.Declaration{d})
				if err != nil || !strings.Contains(strings.Join(obs[0].Warnings, ";"), "are lost") {
					t.Errorf("observed %+v, %v", obs, err)
				}
			}
			if len(handled) > 0 {
				t.Errorf("also handled %s", <-handled)
			}
		})
	}
}

// A consumer that was silent for so long that it was taken for dead begins anew, and nothing of it is valid.
func TestFencedConsumer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	d := b.declare(orders(t))
	b.publish(d, messages("m", 2)...)
	s := b.subscribe(d, 2)
	ds := receive(t, s, 2)
	if err := b.raw.HDel(t.Context(), consumersKey(main(d), d.Topology.Queue), s.name).Err(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	if _, err := s.Receive(ctx); !errors.Is(err, broker.ErrLost) {
		t.Fatalf("received: %v", err)
	}
	lostItems(t, s.Settle(t.Context(), act(settle.Done, ds...)), 0, 1)
	next := b.subscribe(d, 2)
	mustSettle(t, next, act(settle.Done, receive(t, next, 2)...))
}

// The group is destroyed, or everything is: the consumer makes it anew, reports it, and goes on without spinning. What was
// not acknowledged and is still in the stream comes again.
func TestGroupIsMadeAnew(t *testing.T) {
	for _, tc := range []struct {
		name    string
		destroy func(b *bench, d broker.Declaration) error
		again   int
	}{
		{"group_destroyed", func(b *bench, d broker.Declaration) error {
			return b.raw.XGroupDestroy(b.t.Context(), main(d), d.Topology.Queue).Err()
		}, 3},
		{"stream_deleted", func(b *bench, d broker.Declaration) error { return b.raw.Del(b.t.Context(), main(d)).Err() }, 0},
		{"stream_renamed", func(b *bench, d broker.Declaration) error {
			return b.raw.Rename(b.t.Context(), main(d), main(d)+"-gone").Err()
		}, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := newBench(t)
			d := b.declare(orders(t))
			s := b.subscribe(d, 10)
			b.publish(d, messages("m", 3)...)
			var ds []*broker.Delivery
			for len(ds) < 3 {
				ds = append(ds, receiveSome(t, s)...)
			}
			if err := tc.destroy(b, d); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), bound)
			defer cancel()
			if _, err := s.Receive(ctx); !errors.Is(err, broker.ErrLost) {
				t.Fatalf("received: %v", err)
			}
			lostItems(t, s.Settle(t.Context(), act(settle.Done, ds...)), 0, 1, 2)
			next := b.subscribe(d, 10)
			b.publish(d, messages("n", 1)...)
			var got []string
			for len(got) < tc.again+1 {
				more := receiveSome(t, next)
				got = append(got, bodies(more)...)
				mustSettle(t, next, act(settle.Done, more...))
			}
			if len(got) != tc.again+1 {
				t.Errorf("got %v", got)
			}
			if !b.log.has("level=ERROR", "was destroyed") {
				t.Error("it was not logged")
			}
		})
	}
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

// FLUSHALL under load: what it destroyed is counted, nothing else is lost, and consumers and publishers go on.
func TestA9_FlushAll(t *testing.T) {
	t.Parallel()
	srv := testenv.StartRedis(t, redisserver.Options{})
	b := benchOn(t, srv.Addr(), srv.Addr())
	d := b.declare(topology.Spec{Queue: "orders", Holds: []time.Duration{100 * time.Millisecond}, DeadLetter: true})
	l := newLedger()
	stop := l.run(t, b, d)
	l.grows(t, 100)
	// What is destroyed is counted in the same step: entries, held messages, dead letters.
	out, err := b.raw.Eval(t.Context(), `
		local n = {}
		for _, k in ipairs({KEYS[1], KEYS[2]}) do
			for _, e in ipairs(redis.call('XRANGE', k, '-', '+')) do
				for i = 1, #e[2], 2 do if e[2][i] == 'x-message-id' then n[#n + 1] = e[2][i + 1] end end
			end
		end
		for _, m in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
			local f = cmsgpack.unpack(string.sub(m, 18))
			for i = 1, #f, 2 do if f[i] == 'x-message-id' then n[#n + 1] = f[i + 1] end end
		end
		redis.call('FLUSHALL')
		return n`, []string{main(d), dead(d), holdKey(d, 0)}).StringSlice()
	if err != nil {
		t.Fatal(err)
	}
	l.destroyed(out)
	l.grows(t, 200) // publishing works again, without anybody declaring anything
	stop()
	t.Logf("%d destroyed", len(out))
}

// A hold queue that left the topology's spec is emptied all the same.
func TestRetiredHoldQueue(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	spec := orders(t)
	d := b.declare(spec)
	b.publish(d, messages("m", 1)...)
	s := b.subscribe(d, 1)
	ds := receive(t, s, 1)
	hold := settle.Action{Kind: settle.Hold, Tier: 1, Retries: 1, Delay: spec.Holds[1]}
	mustSettle(t, s, []broker.Settlement{copying(ds[0], hold)})
	closeBounded(t, s)
	spec.Holds = spec.Holds[:1]
	changed := b.declare(spec)
	next := b.subscribe(changed, 1)
	back := receive(t, next, 1)
	if got := header.Parse(back[0].Headers).Retries; string(back[0].Body) != "m000" || got != 1 {
		t.Errorf("%q came back with count %d", back[0].Body, got)
	}
	mustSettle(t, next, act(settle.Done, back...))
	retired := topology.Queue{Name: d.Topology.Holds[1].Queue, Role: topology.RoleRetired}
	changed.Retired = []topology.Queue{retired}
	obs, err := b.admin.Observe(t.Context(), []broker.Declaration{changed})
	if err != nil {
		t.Fatal(err)
	}
	last := obs[0].Objects[len(obs[0].Objects)-1]
	if last.Role != topology.RoleRetired || last.Name != holdKey(d, 1) {
		t.Errorf("observed %+v", obs[0].Objects)
	}
	if _, err := b.admin.Delete(t.Context(), []string{holdKey(d, 1)}); err != nil {
		t.Fatal(err)
	}
	obs, err = b.admin.Observe(t.Context(), []broker.Declaration{changed})
	if err != nil || len(obs[0].Objects) != 3 {
		t.Errorf("after deleting it: %+v, %v", obs, err)
	}
}

// What two groups read is trimmed only where both have acknowledged it, and a second group loses nothing.
func TestTrimming(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	d := b.declare(orders(t))
	if err := b.raw.XGroupCreate(t.Context(), main(d), "audit", "0").Err(); err != nil {
		t.Fatal(err)
	}
	b.publish(d, messages("m", 10)...)
	s := b.subscribe(d, 10)
	mustSettle(t, s, act(settle.Done, receive(t, s, 10)...))
	// It is trimmed every second or so, to below what the other group has not acknowledged.
	read, err := b.raw.XReadGroup(t.Context(), &goredis.XReadGroupArgs{Group: "audit", Consumer: "a", Streams: []string{main(d), ">"}, Count: 6}).Result()
	if err != nil || len(read[0].Messages) != 6 {
		t.Fatalf("the other group read %+v, %v", read, err)
	}
	for _, m := range read[0].Messages[:4] {
		if err := b.raw.XAck(t.Context(), main(d), "audit", m.ID).Err(); err != nil {
			t.Fatal(err)
		}
	}
	testenv.Eventually(t, bound, func() error {
		if n := b.raw.XLen(t.Context(), main(d)).Val(); n != 6 {
			return fmt.Errorf("%d entries, want the 6 that the other group has not acknowledged", n)
		}
		return nil
	})
	testenv.Consistently(t, 3*time.Second, func() error {
		if n := b.raw.XLen(t.Context(), main(d)).Val(); n != 6 {
			return fmt.Errorf("%d entries, want 6", n)
		}
		return nil
	})
	// Without the other group entries go away when they are acknowledged.
	if err := b.raw.XGroupDestroy(t.Context(), main(d), "audit").Err(); err != nil {
		t.Fatal(err)
	}
	b.publish(d, messages("n", 3)...)
	before := b.raw.XLen(t.Context(), main(d)).Val()
	mustSettle(t, s, act(settle.Done, receive(t, s, 3)...))
	if n := b.raw.XLen(t.Context(), main(d)).Val(); n != before-3 {
		t.Errorf("%d entries, want %d", n, before-3)
	}
}

// Acknowledged entries are cut off together, but never one that nobody has, nor one that waits below them.
func TestCuttingOff(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	d := b.declare(orders(t))
	left := func() string {
		t.Helper()
		all, err := b.raw.XRange(t.Context(), main(d), "-", "+").Result()
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, x := range all {
			out = append(out, x.Values[payloadField].(string))
		}
		return strings.Join(out, " ")
	}
	s := b.subscribe(d, 40)
	b.publish(d, messages("a", 40)...)
	ds := receive(t, s, 40)
	mustSettle(t, s, act(settle.Done, ds[20:40]...)) // all of it behind what is pending
	mustSettle(t, s, act(settle.Done, append(append([]*broker.Delivery{}, ds[:10]...), ds[11:20]...)...))
	if got := left(); got != "a010" {
		t.Errorf("left: %s, want a010", got)
	}
	b.publish(d, messages("b", 20)...)
	more := receive(t, s, 20)
	hold := settle.Action{Kind: settle.Hold, Tier: 1, Retries: 1, Delay: time.Hour}
	var copies []broker.Settlement
	for _, x := range more[:10] {
		copies = append(copies, copying(x, hold))
	}
	mustSettle(t, s, copies)
	if got := left(); got != "a010 b010 b011 b012 b013 b014 b015 b016 b017 b018 b019" {
		t.Errorf("left: %s", got)
	}
	// Somebody deletes a consumer that has a message: nobody has it, and it lies below the others.
	mustSettle(t, s, act(settle.Done, ds[10]))
	b.steal(d, more[10])
	if err := b.raw.XGroupDelConsumer(t.Context(), main(d), d.Topology.Queue, "thief").Err(); err != nil {
		t.Fatal(err)
	}
	mustSettle(t, s, act(settle.Done, more[11:]...))
	if got := left(); got != "b010" {
		t.Errorf("left: %s, want b010", got)
	}
	if b.log.has("messages are lost") {
		t.Error("something was lost")
	}
}
