package kafka

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

func TestCase06_CommitsTheLowest(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bench) {
		d := b.declare(1)
		b.put(d.Topology.Queue, 0, "0", "1", "2", "3", "4", "5", "6", "7")
		s := b.subscribe(d, 8)
		ds := receive(t, s, 8)
		must(t, settleAll(s, done, ds[3], ds[4], ds[5], ds[7], ds[0], ds[1], ds[2]))
		b.eventuallyCommitted(d, 0, 6)
		closeBounded(t, s)
		next := b.subscribe(d, 8)
		if got := bodies(receive(t, next, 1)); !slices.Equal(got, []string{"6"}) {
			t.Errorf("the next owner gets %v, want 6 alone", got)
		}
		nothing(t, next, 500*time.Millisecond)
	})
}

// redpanda-data/connect PR#4477: an outcome comes after the partition went to another consumer: it is refused, and
// nothing is committed for it. The franz-go client would commit it and rewind the new owner.
func TestCase07_LateOutcomeAfterRevocation(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bench) {
		b.mode.revoke = 300 * time.Millisecond
		d := b.declare(2)
		for p := range int32(2) {
			b.put(d.Topology.Queue, p, "0", "1", "2")
		}
		a := b.subscribe(d, 10)
		ds := receive(t, a, 6) // nothing of it is settled in time
		other := b.subscribe(d, 10)
		b.owns(map[*subscription]int{a: 1, other: 1})
		again := receive(t, other, 3)
		must(t, settleAll(other, done, again...))
		moved := again[0].Partition
		b.eventuallyCommitted(d, moved, 3)
		for _, one := range ds {
			err := settleAll(a, done, one)
			if late := one.Partition == moved; late != (err != nil) {
				t.Errorf("settle %s of partition %d: %v", one.Body, one.Partition, err)
			}
			var failed *broker.SettleError
			if err != nil && (!errors.As(err, &failed) || !errors.Is(failed.Items[0].Err, broker.ErrLost)) {
				t.Errorf("the late outcome got %v, want ErrLost", err)
			}
		}
		b.eventuallyCommitted(d, 1-moved, 3)
		b.eventuallyCommitted(d, moved, 3)
		for _, one := range again {
			if !one.Redelivered {
				t.Errorf("%s came to its new owner as never delivered before", one.Body)
			}
		}
	})
}

// What is handled when a partition moves may finish, and is then not handled again.
func TestRevocationWaitsForWhatRuns(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bench) {
		d := b.declare(2)
		for p := range int32(2) {
			b.put(d.Topology.Queue, p, "0", "1")
		}
		a := b.subscribe(d, 10)
		ds := receive(t, a, 4)
		told := make(chan struct{}, 8)
		a.NotifyRevoke(func() { told <- struct{}{} })
		other := b.subscribe(d, 10)
		select {
		case <-told:
		case <-time.After(bound):
			t.Fatal("nobody was told that a partition moves")
		}
		b.owns(map[*subscription]int{other: 0})
		must(t, settleAll(a, done, ds...))
		b.owns(map[*subscription]int{a: 1, other: 1})
		nothing(t, other, 500*time.Millisecond)
		for p := range int32(2) {
			b.eventuallyCommitted(d, p, 2)
		}
	})
}

// redpanda-data/connect PR#4009: the group is balanced anew while records are buffered.
func TestCase08_RebalanceWhileBuffered(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bench) {
		d := b.declare(4)
		const each = 50
		want := map[string]bool{}
		for p := range int32(4) {
			var all []string
			for i := range each {
				id := fmt.Sprintf("%d-%d", p, i)
				all, want[id] = append(all, id), true
			}
			b.put(d.Topology.Queue, p, all...)
		}
		got := map[string]int{}
		a := b.subscribe(d, 5)
		note := func(s *subscription, ds []*broker.Delivery) {
			must(t, settleAll(s, done, ds...))
			for _, one := range ds {
				got[string(one.Body)]++
			}
		}
		note(a, receive(t, a, 5)) // the rest of what was fetched stays buffered
		other := b.subscribe(d, 5)
		b.owns(map[*subscription]int{a: 2, other: 2})
		for len(got) < len(want) {
			for _, s := range []*subscription{a, other} {
				s.mu.Lock()
				some := s.backlog > 0
				s.mu.Unlock()
				if some {
					note(s, receive(t, s, 1))
				}
			}
		}
		for id, n := range got {
			if n > 1 {
				t.Errorf("%s was handled %d times", id, n)
			}
		}
	})
}

// spring-kafka#2542: handlers that take far longer than the group's session, and a delay.
func TestCase09_LongHandlersStayInTheGroup(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bench) {
		b.mode.sessionTimeout, b.mode.heartbeat = time.Second, 100*time.Millisecond
		const delay = 2500 * time.Millisecond
		d := b.declare(1, delay)
		b.put(d.Topology.Queue, 0, "slow", "held")
		s := b.subscribe(d, 2)
		ds := receive(t, s, 2)
		id, generation := s.member.GroupMetadata()
		began := time.Now()
		must(t, settleAll(s, hold(delay), ds[1]))
		back := receive(t, s, 1)[0] // meanwhile "slow" is being handled
		if waited := time.Since(began); waited < delay || waited > delay+time.Second {
			t.Errorf("held for %s, want %s", waited, delay)
		}
		must(t, settleAll(s, done, ds[0], back))
		if now, g := s.member.GroupMetadata(); now != id || g != generation {
			t.Errorf("member %s of generation %d became %s of %d", id, generation, now, g)
		}
		b.eventuallyCommitted(d, 0, 2)
	})
}

// parallel-consumer#894: an idle partition, the group balanced again and again, one completion: nothing beyond the end
// of the log is committed.
func TestCase10_NeverBeyondTheEnd(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bench) {
		d := b.declare(2)
		b.put(d.Topology.Queue, 0, "only")
		a := b.subscribe(d, 10)
		only := receive(t, a, 1)
		must(t, settleAll(a, done, only...))
		for range 3 {
			other := b.subscribe(d, 10)
			b.owns(map[*subscription]int{a: 1, other: 1})
			closeBounded(t, other)
			b.owns(map[*subscription]int{a: 2})
		}
		closeBounded(t, a)
		for p := range int32(2) {
			if at, end := b.committed(b.queue, d.Topology.Queue, p), b.end(d.Topology.Queue, p); at > end {
				t.Errorf("committed %d of partition %d, whose log ends at %d", at, p, end)
			}
		}
	})
}

// A second group on the main topic sees each message once, whatever the first one retries.
func TestSecondGroupNeverSeesARetry(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bench) {
		const delay = 100 * time.Millisecond
		d := b.declare(2, delay)
		other := d
		other.Options = []byte(`{"partitions": 2, "groupId": "` + b.queue + `-other"}`)
		b.put(d.Topology.Queue, 0, "0", "1", "2")
		s := b.subscribe(d, 10)
		must(t, settleAll(s, hold(delay), receive(t, s, 3)...))
		back := receive(t, s, 3)
		for _, one := range back {
			if header.Parse(one.Headers).Retries != 1 || one.Native.(*entry).record.Topic == d.Topology.Queue {
				t.Errorf("%s came back from %s with headers %v", one.Body, one.Native.DeliveryID(), one.Headers)
			}
		}
		must(t, settleAll(s, done, back...))
		bystander := b.subscribe(broker.Declaration{Topology: withoutHolds(d), Options: other.Options}, 10)
		if got := bodies(receive(t, bystander, 3)); len(got) != 3 {
			t.Errorf("the other group got %v", got)
		}
		nothing(t, bystander, 500*time.Millisecond)
		if end := b.end(d.Topology.Queue, 0) + b.end(d.Topology.Queue, 1); end != 3 {
			t.Errorf("the main topic has %d records, want the 3 that were published", end)
		}
	})
}

// What is held in a tier that left the spec is handled all the same when it is due.
func TestRetiredTierIsRead(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bench) {
		const delay = 200 * time.Millisecond
		before := b.declare(2, delay)
		b.put(before.Topology.Queue, 0, "0", "1")
		s := b.subscribe(before, 10)
		must(t, settleAll(s, hold(delay), receive(t, s, 2)...))
		must(t, s.Close(t.Context()))
		after := broker.Declaration{Topology: withoutHolds(before), Options: before.Options}
		for _, h := range before.Topology.Holds {
			after.Retired = append(after.Retired, topology.Queue{Name: h.Queue, Role: topology.RoleRetired, Delay: h.Delay})
		}
		s = b.subscribe(after, 10)
		back := receive(t, s, 2)
		for _, one := range back {
			if header.Parse(one.Headers).Retries != 1 {
				t.Errorf("%s came back with headers %v", one.Body, one.Headers)
			}
		}
		must(t, settleAll(s, done, back...))
	})
}

// Compaction and transactions leave gaps and markers: the position gets over them, to the end of the log.
func TestMarkersAndAbortedRecords(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bench) {
		d := b.declare(1)
		c, err := kgo.NewClient(kgo.SeedBrokers(b.raw.servers...), kgo.TransactionalID(b.queue), kgo.DefaultProduceTopic(d.Topology.Queue), kgo.DisableClientMetrics())
		must(t, err)
		defer c.Close()
		ctx, cancel := short()
		defer cancel()
		for i, commit := range []kgo.TransactionEndTry{kgo.TryCommit, kgo.TryAbort, kgo.TryCommit} {
			must(t, c.BeginTransaction())
			for j := range 3 {
				must(t, c.ProduceSync(ctx, kgo.StringRecord(strconv.Itoa(i)+"-"+strconv.Itoa(j))).FirstErr())
			}
			must(t, c.EndTransaction(ctx, commit))
		}
		s := b.subscribe(d, 4)
		var got []string
		for len(got) < 6 {
			ds := receive(t, s, 1)
			got = append(got, bodies(ds)...)
			must(t, settleAll(s, done, ds...))
		}
		if want := []string{"0-0", "0-1", "0-2", "2-0", "2-1", "2-2"}; !slices.Equal(got, want) {
			t.Errorf("got %v, want %v: nothing that was taken back", got, want)
		}
		b.eventuallyCommitted(d, 0, b.end(d.Topology.Queue, 0))
	})
}

// A deleted topic, and one that was made anew under its name, end a subscription; the next one reads the new topic.
func TestDeletedAndMadeAnew(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bench) {
		d := b.declare(1)
		b.put(d.Topology.Queue, 0, "before")
		s := b.subscribe(d, 4)
		must(t, settleAll(s, done, receive(t, s, 1)...))
		b.deleteTopics(d.Topology.Queue)
		b.admin(func(ctx ctxt, a broker.Admin) error { return a.Declare(ctx, d) })
		b.put(d.Topology.Queue, 0, "after")
		ctx, cancel := short()
		defer cancel()
		if ds, err := s.Receive(ctx); !errors.Is(err, broker.ErrLost) {
			t.Fatalf("got %v and %v, want the subscription to be lost", bodies(ds), err)
		}
		next := b.subscribe(d, 4)
		if got := bodies(receive(t, next, 1)); !slices.Equal(got, []string{"after"}) {
			t.Errorf("got %v from the new topic", got)
		}
	})
}

// New partitions are read.
func TestPartitionsGrow(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bench) {
		d := b.declare(1)
		s := b.subscribe(d, 4)
		b.owns(map[*subscription]int{s: 1})
		d.Options = []byte(`{"partitions": 3}`)
		b.admin(func(ctx ctxt, a broker.Admin) error { return a.Declare(ctx, d) })
		b.put(d.Topology.Queue, 2, "new")
		if got := bodies(receive(t, s, 1)); !slices.Equal(got, []string{"new"}) {
			t.Errorf("got %v", got)
		}
	})
}

// A connection that is cut for a moment costs nothing: the member stays in its group, and nothing is handled twice.
func TestShortCutIsNoLoss(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bench) {
		d := b.declare(2)
		s := b.subscribe(d, 10)
		b.owns(map[*subscription]int{s: 2})
		b.put(d.Topology.Queue, 0, "0", "1")
		ds := receive(t, s, 2)
		b.raw.network.breakConns()
		b.put(d.Topology.Queue, 1, "2")
		ds = append(ds, receive(t, s, 1)...)
		must(t, settleAll(s, done, ds...))
		b.eventuallyCommitted(d, 0, 2)
		b.eventuallyCommitted(d, 1, 1)
		nothing(t, s, 500*time.Millisecond)
	})
}

// A record that is handled for ever stops its partition at a bounded distance, and no other.
func TestSpanIsBounded(t *testing.T) {
	b := newFakeBench(t)
	d := b.declare(2)
	const n = maxSpan + 500
	b.fill(d.Topology.Queue, 0, n)
	b.put(d.Topology.Queue, 1, "other")
	s := b.subscribe(d, 500)
	var stuck *broker.Delivery
	got := 0
	take := func() {
		var settleNow []*broker.Delivery
		for _, one := range receive(t, s, 1) {
			if one.Partition == 0 && one.Offset == 0 {
				stuck = one
				continue
			}
			got++
			settleNow = append(settleNow, one)
		}
		must(t, settleAll(s, done, settleNow...))
	}
	for got < maxSpan { // the other partition's one is among them
		take()
	}
	nothing(t, s, 300*time.Millisecond)
	b.put(d.Topology.Queue, 1, "later")
	if one := receive(t, s, 1); string(one[0].Body) != "later" {
		t.Fatalf("got %q", one[0].Body)
	}
	must(t, settleAll(s, done, stuck))
	for got < n {
		take()
	}
	b.eventuallyCommitted(d, 0, n)
}

// Nothing but a copy that is known to be stored lets its original go (A9): the target is missing.
func TestA9_CopyThatIsNotStored(t *testing.T) {
	onBoth(t, func(t *testing.T, b *bench) {
		d := b.declare(1, time.Minute)
		b.put(d.Topology.Queue, 0, "m")
		s := b.subscribe(d, 4)
		ds := receive(t, s, 1)
		b.deleteTopics(d.Topology.DeadLetter)
		err := settleAll(s, settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected}, ds...)
		var failed *broker.SettleError
		if !errors.As(err, &failed) || !errors.Is(failed.Items[0].Err, broker.ErrUnroutable) {
			t.Fatalf("dead-letter without the topic: %v, want unroutable", err)
		}
		if at := b.committed(b.queue, d.Topology.Queue, 0); at > 0 {
			t.Errorf("committed %d although no copy was stored", at)
		}
		b.admin(func(ctx ctxt, a broker.Admin) error { return a.Declare(ctx, d) })
		b.eventually("the copy, when its topic is back", func() error {
			return settleAll(s, settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected}, ds...)
		})
		b.eventuallyCommitted(d, 0, 1)
	})
}
