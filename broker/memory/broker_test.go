package memory_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/broker/memory"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// bed is a server with one topology.
type bed struct {
	t     *testing.T
	s     *memory.Server
	d     broker.Declaration
	admin broker.Admin
}

func newBed(t *testing.T, opts memory.Options, spec topology.Spec) *bed {
	s := memory.New(opts)
	d := newTopology(t, spec)
	return &bed{t: t, s: s, d: d, admin: declare(t, s, d)}
}

func (b *bed) subscribe(c broker.Client, prefetch int, lease time.Duration) broker.Subscription {
	b.t.Helper()
	sub, err := c.Subscribe(b.t.Context(), broker.Subscribe{Declaration: b.d, Prefetch: prefetch, Concurrency: 1, Lease: lease})
	if err != nil {
		b.t.Fatal(err)
	}
	return sub
}

func (b *bed) put(bodies ...string) {
	b.t.Helper()
	for _, body := range bodies {
		if err := b.s.Put(b.d.Topology.Queue, memory.Raw{Body: []byte(body), Key: body[:1]}); err != nil {
			b.t.Fatal(err)
		}
	}
}

func (b *bed) receive(sub broker.Subscription) []*broker.Delivery {
	b.t.Helper()
	ds, err := sub.Receive(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	return ds
}

// nothing checks that a subscription gets nothing within a minute.
func (b *bed) nothing(sub broker.Subscription) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), time.Minute)
	defer cancel()
	if ds, err := sub.Receive(ctx); !errors.Is(err, context.DeadlineExceeded) {
		b.t.Fatalf("received %d deliveries, %v", len(ds), err)
	}
}

func (b *bed) counts(queue string, ready, unsettled int) {
	b.t.Helper()
	if r, u := b.s.Counts(queue); r != ready || u != unsettled {
		b.t.Fatalf("queue %q has %d ready and %d unsettled, want %d and %d", queue, r, u, ready, unsettled)
	}
}

func act(d *broker.Delivery, a settle.Action) broker.Settlement {
	return broker.Settlement{Delivery: d, Action: a}
}

func one(d *broker.Delivery, k settle.Kind) []broker.Settlement {
	return []broker.Settlement{act(d, settle.Action{Kind: k})}
}

func bodies(ds []*broker.Delivery) (all []string) {
	for _, d := range ds {
		all = append(all, string(d.Body))
	}
	return all
}

func TestLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, memory.Options{}, topology.Spec{Queue: "q"})
		sub := b.subscribe(newClient(t, b.s, "c"), 10, time.Minute)
		b.put("a", "b")
		ds := b.receive(sub)
		time.Sleep(50 * time.Second)
		if err := sub.(broker.Extender).Extend(t.Context(), ds[:1], time.Minute); err != nil {
			t.Fatal(err)
		}
		time.Sleep(30 * time.Second)
		again := b.receive(sub) // b, whose lease ran out
		if len(again) != 1 || string(again[0].Body) != "b" || again[0].DeliveryCount != 2 || again[0].Crashes != 1 || !again[0].Redelivered {
			t.Fatalf("got %v: %+v", bodies(again), again[0])
		}
		if err := sub.Settle(t.Context(), one(ds[0], settle.Done)); err != nil {
			t.Errorf("settle the extended one: %v", err)
		}
		var failed *broker.SettleError
		err := sub.Settle(t.Context(), one(ds[1], settle.Done))
		if !errors.As(err, &failed) || !errors.Is(failed.Items[0].Err, broker.ErrLost) {
			t.Errorf("settle after the lease ran out: %v", err)
		}
		if err := sub.Settle(t.Context(), one(again[0], settle.Done)); err != nil {
			t.Error(err)
		}
		b.counts("q", 0, 0)
	})
}

func TestRedeliveryKeepsOrder(t *testing.T) {
	b := newBed(t, memory.Options{}, topology.Spec{Queue: "q"})
	sub := b.subscribe(newClient(t, b.s, "c"), 4, 0)
	b.put("1", "2", "3", "4", "5", "6")
	ds := b.receive(sub)
	for _, i := range []int{2, 0, 3} {
		if err := sub.Settle(t.Context(), one(ds[i], settle.Requeue)); err != nil {
			t.Fatal(err)
		}
	}
	got := bodies(b.receive(sub))
	if diff := cmp.Diff([]string{"1", "3", "4"}, got); diff != "" {
		t.Error(diff)
	}
}

func TestGiveBackIsUncounted(t *testing.T) {
	b := newBed(t, memory.Options{}, topology.Spec{Queue: "q"})
	sub := b.subscribe(newClient(t, b.s, "c"), 1, 0)
	b.put("a")
	for i, k := range []settle.Kind{settle.GiveBack, settle.Requeue, settle.GiveBack, settle.Done} {
		d := b.receive(sub)[0]
		if want := []uint32{1, 1, 2, 2}[i]; d.DeliveryCount != want || d.Crashes != 0 {
			t.Errorf("delivery %d: count %d, crashes %d; want count %d", i, d.DeliveryCount, d.Crashes, want)
		}
		if err := sub.Settle(t.Context(), one(d, k)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestOneReaderOfAnOrderedQueue: the next reader begins when the first one has nothing unsettled any more, so that it
// never overtakes.
func TestOneReaderOfAnOrderedQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, memory.Options{}, topology.Spec{Queue: "q", Sequenced: &topology.SequencedSpec{AllowMessageLoss: true}})
		c := newClient(t, b.s, "c")
		first, second := b.subscribe(c, 2, 0), b.subscribe(c, 10, 0)
		b.put("1", "2", "3", "4")
		ds := b.receive(first)
		b.nothing(second)
		if err := first.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		b.nothing(second)
		if err := first.Settle(t.Context(), one(ds[0], settle.Done)); err != nil {
			t.Fatal(err)
		}
		b.nothing(second)
		if err := first.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{"2", "3", "4"}, bodies(b.receive(second))); diff != "" {
			t.Error(diff)
		}
	})
}

func TestHold(t *testing.T) {
	held := topology.Spec{Queue: "q", Holds: []time.Duration{time.Minute}}
	hold := settle.Action{Kind: settle.Hold, Delay: time.Minute}
	t.Run("time_goes_on_while_the_broker_is_down", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newBed(t, memory.Options{}, held)
			c := newClient(t, b.s, "c")
			sub := b.subscribe(c, 1, 0)
			b.put("a")
			if err := sub.Settle(t.Context(), []broker.Settlement{act(b.receive(sub)[0], hold)}); err != nil {
				t.Fatal(err)
			}
			b.s.Stop()
			if _, err := sub.Receive(t.Context()); !errors.Is(err, broker.ErrLost) {
				t.Errorf("receive while the broker is down: %v", err)
			}
			if _, err := c.Subscribe(t.Context(), broker.Subscribe{Declaration: b.d, Prefetch: 1}); !errors.Is(err, broker.ErrUnavailable) {
				t.Errorf("subscribe while the broker is down: %v", err)
			}
			if _, err := b.admin.Depths(t.Context(), []string{"q"}); !errors.Is(err, broker.ErrUnavailable) {
				t.Errorf("depths while the broker is down: %v", err)
			}
			time.Sleep(2 * time.Minute)
			b.counts("q-hold-60s", 1, 0)
			b.s.Start()
			b.counts("q", 1, 0)
		})
	})
	t.Run("a_missing_target_keeps_what_is_due", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newBed(t, memory.Options{}, held)
			sub := b.subscribe(newClient(t, b.s, "c"), 2, 0)
			b.put("a", "b")
			for _, d := range b.receive(sub) {
				if err := sub.Settle(t.Context(), []broker.Settlement{act(d, hold)}); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := b.admin.Delete(t.Context(), []string{"q"}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * time.Minute)
			depths, err := b.admin.Depths(t.Context(), []string{"q-hold-60s"})
			if err != nil || depths[0].Ready.N != 2 || depths[0].Stuck.N != 2 {
				t.Errorf("%+v, %v", depths, err)
			}
			declare(t, b.s, b.d)
			b.counts("q", 2, 0)
			b.counts("q-hold-60s", 0, 0)
		})
	})
	t.Run("twenty_thousand_come_back_when_due", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			const n = 20_000
			b := newBed(t, memory.Options{}, held)
			c := newClient(t, b.s, "c")
			sub := b.subscribe(c, n, 0)
			for i := range n {
				b.put(fmt.Sprint(i))
			}
			var batch []broker.Settlement
			for _, d := range b.receive(sub) {
				batch = append(batch, act(d, hold))
			}
			if err := sub.Settle(t.Context(), batch); err != nil {
				t.Fatal(err)
			}
			b.counts("q-hold-60s", n, 0)
			time.Sleep(time.Minute - time.Nanosecond)
			b.counts("q", 0, 0)
			time.Sleep(time.Nanosecond)
			synctest.Wait()
			b.counts("q", n, 0)
		})
	})
}

func TestFaults(t *testing.T) {
	boom := errors.New("boom")
	spec := topology.Spec{Queue: "q", Holds: []time.Duration{time.Minute}, DeadLetter: true}
	hold := settle.Action{Kind: settle.Hold, Delay: time.Minute}
	settleErr := func(t *testing.T, err error) error {
		t.Helper()
		var failed *broker.SettleError
		if !errors.As(err, &failed) || len(failed.Items) != 1 {
			t.Fatalf("got %v, want one failed item", err)
		}
		return failed.Items[0].Err
	}
	start := func(t *testing.T) (*bed, broker.Client, broker.Subscription, *broker.Delivery) {
		b := newBed(t, memory.Options{}, spec)
		c := newClient(t, b.s, "victim")
		sub := b.subscribe(c, 1, 0)
		b.put("a")
		return b, c, sub, b.receive(sub)[0]
	}
	t.Run("A10_failed_copy_can_be_tried_again", func(t *testing.T) {
		b, _, sub, d := start(t)
		b.s.FailCopies(1, boom)
		if err := settleErr(t, sub.Settle(t.Context(), []broker.Settlement{act(d, hold)})); !errors.Is(err, boom) {
			t.Error(err)
		}
		b.counts("q", 0, 1)
		b.counts("q-hold-60s", 0, 0)
		if err := sub.Settle(t.Context(), []broker.Settlement{act(d, hold)}); err != nil {
			t.Error(err)
		}
		b.counts("q-hold-60s", 1, 0)
		b.counts("q", 0, 0)
	})
	t.Run("A9_lost_confirm_leaves_the_original", func(t *testing.T) {
		b, _, sub, d := start(t)
		b.s.DropCopyConfirms(1)
		if err := settleErr(t, sub.Settle(t.Context(), []broker.Settlement{act(d, hold)})); !errors.Is(err, broker.ErrUnknown) {
			t.Error(err)
		}
		b.counts("q", 0, 1)
		b.counts("q-hold-60s", 1, 0)
	})
	t.Run("A9_killed_at_each_step", func(t *testing.T) {
		for _, step := range memory.Steps() {
			b := newBed(t, memory.Options{}, spec)
			c := newClient(t, b.s, "victim")
			sub := b.subscribe(c, 1, 0)
			b.put("a")
			b.s.KillAt(step)
			d := b.receive(sub)[0]
			err := sub.Settle(t.Context(), []broker.Settlement{act(d, hold)})
			held, _ := b.s.Counts("q-hold-60s")
			ready, unsettled := b.s.Counts("q")
			total := held + ready + unsettled
			switch step {
			case memory.StepReceived, memory.StepBeforeCopy:
				if err == nil || total != 1 || held != 0 {
					t.Errorf("%s: %v, %d held, %d in all", step, err, held, total)
				}
			case memory.StepCopied, memory.StepBeforeAck:
				if err == nil || held != 1 || ready != 1 {
					t.Errorf("%s: %v, %d held, %d ready; want the copy and the original", step, err, held, ready)
				}
			case memory.StepAcked:
				if err != nil || held != 1 || total != 1 {
					t.Errorf("%s: %v, %d held, %d in all", step, err, held, total)
				}
			}
			if _, err := c.Subscribe(t.Context(), broker.Subscribe{Declaration: b.d, Prefetch: 1}); !errors.Is(err, broker.ErrUnavailable) {
				t.Errorf("%s: a killed client subscribed: %v", step, err)
			}
		}
	})
	t.Run("M3_cut_by_name_and_connect_again", func(t *testing.T) {
		b, c, sub, d := start(t)
		if n := b.s.Cut("somebody else"); n != 0 {
			t.Errorf("cut %d clients", n)
		}
		if n := b.s.Cut("victim"); n != 1 {
			t.Errorf("cut %d clients", n)
		}
		if _, err := sub.Receive(t.Context()); !errors.Is(err, broker.ErrLost) {
			t.Error(err)
		}
		again := b.subscribe(c, 1, 0)
		d2 := b.receive(again)[0]
		if d2.DeliveryCount != 2 || d2.Crashes != 1 {
			t.Errorf("count %d, crashes %d", d2.DeliveryCount, d2.Crashes)
		}
		for _, s := range []broker.Subscription{sub, again} { // the late outcome touches nobody
			if err := settleErr(t, s.Settle(t.Context(), one(d, settle.Done))); !errors.Is(err, broker.ErrLost) {
				t.Error(err)
			}
		}
		b.counts("q", 0, 1)
	})
	t.Run("publishes_fail_and_confirms_get_lost", func(t *testing.T) {
		b, c, _, _ := start(t)
		p, err := c.Publisher(t.Context(), b.d)
		if err != nil {
			t.Fatal(err)
		}
		b.s.FailPublishes(1, broker.ErrRejected)
		b.s.DropPublishConfirms(1)
		err = p.Publish(t.Context(), []broker.Message{{ID: "0"}, {ID: "1"}, {ID: "2"}})
		var failed *broker.PublishError
		if !errors.As(err, &failed) || len(failed.Items) != 2 || !errors.Is(failed.Items[0].Err, broker.ErrRejected) || !errors.Is(failed.Items[1].Err, broker.ErrUnknown) {
			t.Fatalf("%v", err)
		}
		b.counts("q", 2, 1)
	})
	t.Run("slow_confirms", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b, c, sub, d := start(t)
			b.s.SlowConfirms(time.Second)
			began := time.Now()
			if err := sub.Settle(t.Context(), []broker.Settlement{act(d, hold)}); err != nil || time.Since(began) != time.Second {
				t.Errorf("%v after %s", err, time.Since(began))
			}
			p, err := c.Publisher(t.Context(), b.d)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			err = p.Publish(ctx, []broker.Message{{ID: "0"}})
			var failed *broker.PublishError
			if !errors.As(err, &failed) || !errors.Is(failed.Items[0].Err, broker.ErrUnknown) {
				t.Errorf("a context that ends before the confirm: %v", err)
			}
		})
	})
}

func TestLimits(t *testing.T) {
	t.Run("a_full_queue_refuses", func(t *testing.T) {
		s := memory.New(memory.Options{})
		d := newTopology(t, topology.Spec{Queue: "q"})
		d.Options = json.RawMessage(`{"maxLength": 2}`)
		declare(t, s, d)
		p, err := newClient(t, s, "c").Publisher(t.Context(), d)
		if err != nil {
			t.Fatal(err)
		}
		err = p.Publish(t.Context(), []broker.Message{{ID: "0"}, {ID: "1"}, {ID: "2"}})
		var failed *broker.PublishError
		if !errors.As(err, &failed) || len(failed.Items) != 1 || failed.Items[0].Index != 2 || !errors.Is(failed.Items[0].Err, broker.ErrRejected) {
			t.Errorf("%v", err)
		}
	})
	t.Run("options_that_make_no_sense", func(t *testing.T) {
		for _, raw := range []string{`{"maxLength": -1}`, `{"maxLength": "x"}`, `[`} {
			d := newTopology(t, topology.Spec{Queue: "q"})
			d.Options = json.RawMessage(raw)
			var field *topology.FieldError
			if _, err := memory.Objects(d); !errors.As(err, &field) {
				t.Errorf("%s: %v, want a field error", raw, err)
			}
		}
		if _, err := memory.Objects(newTopology(t, topology.Spec{Queue: "q", Source: "log"})); !errors.Is(err, broker.ErrUnsupported) {
			t.Errorf("a source of its own: %v", err)
		}
	})
	t.Run("a_hold_queue_is_no_main_queue", func(t *testing.T) {
		b := newBed(t, memory.Options{}, topology.Spec{Queue: "q", Holds: []time.Duration{time.Second}})
		err := b.admin.Declare(t.Context(), newTopology(t, topology.Spec{Queue: "q-hold-1s"}))
		var conflict *broker.ConflictError
		if !errors.As(err, &conflict) || conflict.Diff.Property != "role" {
			t.Errorf("%v", err)
		}
	})
	t.Run("C8_no_identity_of_its_own_where_anonymous", func(t *testing.T) {
		for _, anonymous := range []bool{false, true} {
			b := newBed(t, memory.Options{Anonymous: anonymous}, topology.Spec{Queue: "q"})
			sub := b.subscribe(newClient(t, b.s, "c"), 1, 0)
			b.put("a")
			first := b.receive(sub)[0]
			if err := sub.Settle(t.Context(), one(first, settle.Requeue)); err != nil {
				t.Fatal(err)
			}
			second := b.receive(sub)[0]
			if first.Native.MessageID() != second.Native.MessageID() || (first.Native.MessageID() == "") != anonymous {
				t.Errorf("anonymous %v: ids %q and %q", anonymous, first.Native.MessageID(), second.Native.MessageID())
			}
			if first.Native.DeliveryID() == second.Native.DeliveryID() {
				t.Error("two deliveries with one id")
			}
		}
	})
	t.Run("E3_a_death_that_the_broker_recorded", func(t *testing.T) {
		b := newBed(t, memory.Options{}, topology.Spec{Queue: "q"})
		sub := b.subscribe(newClient(t, b.s, "c"), 2, 0)
		want := header.Death{Reason: settle.Expired, OriginalQueue: "p", Count: 1}
		if err := b.s.Put("q", memory.Raw{Death: &want}, memory.Raw{}); err != nil {
			t.Fatal(err)
		}
		ds := b.receive(sub)
		if ds[0].Native.Death() != want || ds[1].Native.Death() != (header.Death{}) {
			t.Errorf("%+v, %+v", ds[0].Native.Death(), ds[1].Native.Death())
		}
	})
}

func TestPublisherKeepsNothingOfTheCaller(t *testing.T) {
	b := newBed(t, memory.Options{}, topology.Spec{Queue: "q"})
	p, err := newClient(t, b.s, "c").Publisher(t.Context(), b.d)
	if err != nil {
		t.Fatal(err)
	}
	body, raw, h := []byte("body"), []byte("raw"), header.Map{}
	h["raw"] = raw
	if err := p.Publish(t.Context(), []broker.Message{{ID: "id", Key: "k", Body: body, Headers: h, ContentType: "text/plain"}}); err != nil {
		t.Fatal(err)
	}
	body[0], raw[0] = 'X', 'X'
	h["more"] = 1
	want := []memory.Raw{{Body: []byte("body"), Key: "k", ContentType: "text/plain", Headers: header.Map{"raw": []byte("raw"), header.MessageID: "id"}}}
	if diff := cmp.Diff(want, b.s.Peek("q")); diff != "" {
		t.Error(diff)
	}
	b.counts("q", 1, 0)
}

// TestReceiveAndSettleAllocateByBatch: what a message costs the broker itself has to stay below what is measured of
// the loop on top of it.
func TestReceiveAndSettleAllocateByBatch(t *testing.T) {
	b := newBed(t, memory.Options{}, topology.Spec{Queue: "q"})
	sub := b.subscribe(newClient(t, b.s, "c"), 100, 0)
	settlements := make([]broker.Settlement, 0, 100)
	n := testing.AllocsPerRun(10, func() {
		b.put("a", "b", "c", "d", "e", "f", "g", "h", "i", "j")
	})
	both := testing.AllocsPerRun(10, func() {
		b.put("a", "b", "c", "d", "e", "f", "g", "h", "i", "j")
		settlements = settlements[:0]
		for _, d := range b.receive(sub) {
			settlements = append(settlements, act(d, settle.Action{Kind: settle.Done}))
		}
		if err := sub.Settle(t.Context(), settlements); err != nil {
			t.Fatal(err)
		}
	})
	if both-n > 4 {
		t.Errorf("receiving and settling a batch of ten takes %v allocations", both-n)
	}
}
