package brokertest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"go.uber.org/goleak"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// seamTests hold a backend to the contract that is written at the interfaces of package broker.
func seamTests() []rule {
	return []rule{
		{id: "declare_twice", test: declareTwice}, {id: "declare_concurrently", test: declareConcurrently}, {id: "declare_conflicting", test: declareConflicting},
		{id: "observe", test: observe}, {id: "delete", test: deleteQueues}, {id: "subscribe_to_nothing", test: subscribeToNothing}, {id: "prefetch", test: prefetchBounds},
		{id: "actions_keep_the_message", test: actionsKeepTheMessage}, {id: "settle_twice", test: settleTwice}, {id: "settle_what_is_not_ours", test: settleWhatIsNotOurs},
		{id: "stop", test: stopEndsFetching}, {id: "close", test: closeHandsBack}, {id: "context", test: contextEndsReceive}, {id: "depth", test: depthConverges},
		{id: "dead_letter_reader", test: deadLetterReader}, {id: "no_goroutine_left", test: noGoroutineLeft, serial: true},
	}
}

// declared checks that a declaration stands as it should.
func (w *world) declared(d broker.Declaration) {
	w.t.Helper()
	obs, err := w.admin.Observe(w.ctx(), []broker.Declaration{d})
	if err != nil {
		w.t.Fatalf("observe: %v", err)
	}
	if len(obs) != 1 || !obs[0].UpToDate() {
		w.t.Fatalf("after declaring: %s", asJSON(obs))
	}
	objects, err := w.inst.Driver.Objects(d)
	if err != nil {
		w.t.Fatalf("objects: %v", err)
	}
	if len(obs[0].Objects) != len(objects) {
		w.t.Errorf("observed %d objects, the declaration leads to %d", len(obs[0].Objects), len(objects))
	}
}

func declareTwice(w *world) {
	r := w.rig()
	r.publish("m")
	r.declare(r.decl)
	w.declared(r.decl)
	r.holds(r.main(), 1, 0)
}

func declareConcurrently(w *world) {
	d := w.derive(w.spec())
	w.owned(d)
	var wg sync.WaitGroup
	errs := make([]error, 4)
	for i := range errs {
		wg.Go(func() { errs[i] = w.admin.Declare(w.ctx(), d) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		w.t.Fatalf("declare concurrently: %v", err)
	}
	w.declared(d)
}

func declareConflicting(w *world) {
	if w.b.ConflictingOptions == nil {
		w.t.Log("this broker has no fixed property to disagree about")
		return
	}
	r := w.rig()
	r.publish("m")
	other := r.decl
	other.Options = w.b.ConflictingOptions
	err := w.admin.Declare(w.ctx(), other)
	w.want(err, broker.ErrConflict, "declare a queue with other fixed properties")
	var conflict *broker.ConflictError
	if !errors.As(err, &conflict) || conflict.Diff.Property == "" || conflict.Diff.Want == conflict.Diff.Have {
		w.t.Errorf("the conflict does not say what differs: %v", err)
	}
	r.holds(r.main(), 1, 0)
	w.declared(r.decl)
}

func observe(w *world) {
	there, missing := w.rig(), w.derive(w.spec())
	obs, err := w.admin.Observe(w.ctx(), []broker.Declaration{missing, there.decl})
	if err != nil {
		w.t.Fatalf("observe: %v", err)
	}
	if len(obs) != 2 || obs[0].UpToDate() || !obs[1].UpToDate() {
		w.t.Fatalf("the missing one, then the declared one: %s", asJSON(obs))
	}
	for _, o := range obs[0].Objects {
		if !o.Missing {
			w.t.Errorf("%s %q is there although nothing was declared", o.Kind, o.Name)
		}
	}
	again, err := w.admin.Observe(w.ctx(), []broker.Declaration{missing})
	if err != nil || again[0].UpToDate() {
		w.t.Errorf("observing declared something: %s, %v", asJSON(again), err)
	}
	server, err := w.admin.Server(w.ctx())
	if err != nil || server.ID == "" || server.Version == "" {
		w.t.Errorf("server %+v, %v", server, err)
	}
}

func (r *rig) physical(q topology.Queue) string {
	return r.decl.Topology.Physical(r.inst.Driver.Kind, q.Name)
}

func deleteQueues(w *world) {
	r := w.rig()
	r.publish("0", "1", "2")
	r.holds(r.main(), 3, 0)
	absent := r.physical(topology.Queue{Name: r.decl.Topology.Queue + ".absent"})
	got, err := w.admin.Delete(w.ctx(), []string{absent, r.physical(r.main())})
	if err != nil {
		w.t.Fatalf("delete an absent queue and one with messages: %v", err)
	}
	if len(got) != 2 || got[1].Messages.Known && got[1].Messages.N != 3 {
		w.t.Errorf("deleted %+v, want 3 messages in the second", got)
	}
	depths, err := w.admin.Depths(w.ctx(), []string{r.physical(r.main()), absent})
	if err != nil || len(depths) != 2 || !depths[0].Missing || !depths[1].Missing {
		w.t.Errorf("after deleting: %+v, %v", depths, err)
	}
	if _, err := w.admin.Delete(w.ctx(), []string{r.physical(r.main())}); err != nil {
		w.t.Errorf("delete twice: %v", err)
	}
}

// subscribe opens a subscription on the rig.
func (r *rig) subscribe(role broker.Role, prefetch int) broker.Subscription {
	r.t.Helper()
	s, err := r.client().Subscribe(r.ctx(), broker.Subscribe{Declaration: r.decl, Role: role, Prefetch: prefetch, Concurrency: 1, Consumer: "seam"})
	if err != nil {
		r.t.Fatalf("subscribe: %v", err)
	}
	r.defers(func() {
		ctx, cancel := context.WithTimeout(context.Background(), r.b.Patience)
		defer cancel()
		if err := s.Close(ctx); err != nil {
			r.t.Logf("close a subscription: %v", err)
		}
	})
	return s
}

// receive takes exactly n deliveries.
func (r *rig) receive(s broker.Subscription, n int) []*broker.Delivery {
	r.t.Helper()
	var all []*broker.Delivery
	for len(all) < n {
		ds, err := s.Receive(r.ctx())
		if err != nil {
			r.t.Fatalf("receive after %d of %d: %v", len(all), n, err)
		}
		all = append(all, ds...)
	}
	if len(all) != n {
		r.t.Fatalf("received %d, want %d", len(all), n)
	}
	return all
}

// nothingComes checks that a subscription gets nothing for a moment.
func (r *rig) nothingComes(s broker.Subscription) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), r.moment())
	defer cancel()
	ds, err := s.Receive(ctx)
	if !errors.Is(err, context.DeadlineExceeded) {
		r.t.Fatalf("received %d deliveries and %v, want nothing", len(ds), err)
	}
}

// settle settles deliveries with one action each.
func (r *rig) settle(s broker.Subscription, k settle.Kind, ds ...*broker.Delivery) error {
	batch := make([]broker.Settlement, len(ds))
	for i, d := range ds {
		batch[i] = broker.Settlement{Delivery: d, Action: settle.Action{Kind: k}}
	}
	return s.Settle(r.ctx(), batch)
}

func (r *rig) must(err error, what string) {
	r.t.Helper()
	if err != nil {
		r.t.Fatalf("%s: %v", what, err)
	}
}

func subscribeToNothing(w *world) {
	d := w.derive(w.spec())
	_, err := w.client().Subscribe(w.ctx(), broker.Subscribe{Declaration: d, Prefetch: 1, Concurrency: 1})
	w.want(err, broker.ErrNotFound, "subscribe to a queue that does not exist")
}

func prefetchBounds(w *world) {
	r := w.rig()
	r.publish(numbered(10)...)
	s := r.subscribe(broker.ReadMain, 3)
	ds := r.receive(s, 3)
	r.nothingComes(s)
	r.must(r.settle(s, settle.Done, ds[1]), "settle one out of order")
	r.receive(s, 1)
	r.nothingComes(s)
	r.holds(r.main(), 6, 3)
}

// actionsKeepTheMessage carries out every action on messages with typed headers and looks at what became of them.
func actionsKeepTheMessage(w *world) {
	r := w.rig()
	kept := header.Map{}
	for name, v := range typed {
		kept[name] = v
	}
	r.put(foreign("m", kept))
	before := r.inst.Raw.Take(w.t, r.decl, r.main())[0]
	tier, held := 0, r.main()
	if w.caps.ConsumersMoveHeld { // and none runs
		tier = len(w.b.Tiers) - 1
		held = r.hold(tier)
	}
	if w.caps.ReadsHolds {
		held = r.hold(tier)
	}
	stamp := []header.Field{{Name: header.RetryCount, Value: int64(4)}, {Name: header.MessageID, Value: "id"}}
	for _, tc := range []struct {
		action settle.Action
		target topology.Queue
		copied bool
	}{
		{settle.Action{Kind: settle.Done}, topology.Queue{}, false},
		{settle.Action{Kind: settle.Drop}, topology.Queue{}, false},
		{settle.Action{Kind: settle.Requeue}, r.main(), false},
		{settle.Action{Kind: settle.GiveBack}, r.main(), false},
		{settle.Action{Kind: settle.Copy, Retries: 4}, r.main(), true},
		{settle.Action{Kind: settle.DeadLetter, Retries: 4, Reason: settle.Rejected}, r.dead(), true},
		{settle.Action{Kind: settle.Hold, Tier: tier, Retries: 4, Delay: w.tier(tier)}, held, true},
	} {
		r.put(foreign("m", kept))
		s := r.subscribe(broker.ReadMain, 1)
		d := r.receive(s, 1)[0]
		st := broker.Settlement{Delivery: d, Action: tc.action}
		if tc.copied {
			st.Stamp = stamp
		}
		r.must(s.Settle(w.ctx(), []broker.Settlement{st}), tc.action.Kind.String())
		r.must(s.Close(w.ctx()), "close")
		if tc.target.Name == "" {
			r.empty()
			continue
		}
		r.holds(tc.target, 1, 0)
		got := r.inst.Raw.Take(w.t, r.decl, tc.target)
		if len(got) != 1 {
			w.t.Fatalf("%s: took %d messages", tc.action.Kind, len(got))
		}
		for _, name := range names(typed) {
			if !reflect.DeepEqual(got[0].Headers[name], before.Headers[name]) {
				w.t.Errorf("%s: header %s: %#v became %#v", tc.action.Kind, name, before.Headers[name], got[0].Headers[name])
			}
		}
		if string(got[0].Body) != "m" || got[0].ContentType != before.ContentType || got[0].Key != before.Key {
			w.t.Errorf("%s: body %q, content type %q, key %q", tc.action.Kind, got[0].Body, got[0].ContentType, got[0].Key)
		}
		if n, _ := header.Int(got[0].Headers[header.RetryCount]); tc.copied && (n != 4 || got[0].text(header.MessageID) != "id") {
			w.t.Errorf("%s: the stamp is not on the copy: %v", tc.action.Kind, got[0].Headers)
		}
		r.empty()
	}
}

// settleTwice: the second time is an error, and hurts nobody else.
func settleTwice(w *world) {
	r := w.rig()
	r.publish("0", "1")
	s := r.subscribe(broker.ReadMain, 2)
	ds := r.receive(s, 2)
	r.must(r.settle(s, settle.Done, ds[0]), "settle")
	err := r.settle(s, settle.Done, ds[0])
	var failed *broker.SettleError
	if !errors.As(err, &failed) || len(failed.Items) != 1 || failed.Items[0].Index != 0 {
		w.t.Errorf("settle twice: %v, want a *SettleError for it", err)
	}
	err = r.settle(s, settle.Done, ds[0], ds[1])
	if !errors.As(err, &failed) || len(failed.Items) != 1 || failed.Items[0].Index != 0 {
		w.t.Errorf("one settled and one unsettled delivery: %v, want an error for the first", err)
	}
	r.holds(r.main(), 0, 0)
	r.publish("2")
	r.must(r.settle(s, settle.Done, r.receive(s, 1)...), "the subscription goes on")
	r.holds(r.main(), 0, 0)
}

// settleWhatIsNotOurs: a delivery of another subscription, and one of a subscription that is closed.
func settleWhatIsNotOurs(w *world) {
	r := w.rig()
	r.publish("0", "1")
	a, b := r.subscribe(broker.ReadMain, 1), r.subscribe(broker.ReadMain, 1)
	if shared := w.inst.Shared; shared != nil {
		shared(w.t)
	}
	da, db := r.receive(a, 1)[0], r.receive(b, 1)[0]
	if err := r.settle(a, settle.Done, db); err == nil {
		w.t.Error("a subscription settled another one's delivery")
	}
	r.must(r.settle(b, settle.Done, db), "settle one's own delivery")
	r.must(a.Close(w.ctx()), "close")
	if err := r.settle(a, settle.Done, da); err == nil {
		w.t.Error("a closed subscription settled a delivery")
	}
	again := r.receive(b, 1)
	if string(again[0].Body) != string(da.Body) || !again[0].Redelivered {
		w.t.Errorf("got %q, redelivered %v; want %q again", again[0].Body, again[0].Redelivered, da.Body)
	}
	r.must(r.settle(b, settle.Done, again...), "settle")
	r.holds(r.main(), 0, 0)
}

func stopEndsFetching(w *world) {
	r := w.rig()
	r.publish(numbered(10)...)
	s := r.subscribe(broker.ReadMain, 5)
	ds, err := s.Receive(w.ctx())
	r.must(err, "receive")
	r.must(s.Stop(w.ctx()), "stop")
	for { // what was on its way may still come; then it is over
		more, err := s.Receive(w.ctx())
		if err != nil {
			w.want(err, broker.ErrClosed, "receive after Stop")
			break
		}
		ds = append(ds, more...)
	}
	r.holds(r.main(), 10-len(ds), len(ds))
	r.must(r.settle(s, settle.Done, ds...), "settle after Stop")
	r.must(s.Close(w.ctx()), "close after Stop")
	r.must(s.Close(w.ctx()), "close twice")
	r.holds(r.main(), 10-len(ds), 0)
}

func closeHandsBack(w *world) {
	r := w.rig()
	r.publish(numbered(5)...)
	s := r.subscribe(broker.ReadMain, 5)
	ds := r.receive(s, 5)
	r.must(r.settle(s, settle.Done, ds[0]), "settle")
	waiting := make(chan error, 1)
	go func() { _, err := s.Receive(w.ctx()); waiting <- err }()
	r.must(s.Close(w.ctx()), "close without Stop")
	select {
	case err := <-waiting:
		w.want(err, broker.ErrClosed, "a Receive that waits while the subscription is closed")
	case <-time.After(w.b.Patience):
		w.t.Fatal("Receive did not return after Close")
	}
	r.holds(r.main(), 4, 0)
	next := r.subscribe(broker.ReadMain, 5)
	before, after := inOrder(ds[1:]), inOrder(r.receive(next, 4))
	if !maps.EqualFunc(before, after, slices.Equal[[]string]) {
		w.t.Errorf("by partition, %v came as %v: want them in the order of before", before, after)
	}
}

// inOrder is the bodies of deliveries by partition: on a log there is no order between partitions. Elsewhere there is
// one partition.
func inOrder(ds []*broker.Delivery) map[int32][]string {
	m := map[int32][]string{}
	for _, d := range ds {
		m[d.Partition] = append(m[d.Partition], string(d.Body))
	}
	return m
}

func contextEndsReceive(w *world) {
	r := w.rig()
	s := r.subscribe(broker.ReadMain, 1)
	r.nothingComes(s)
	ctx, cancel := context.WithCancel(context.Background())
	result := make(chan error, 1)
	go func() { _, err := s.Receive(ctx); result <- err }()
	cancel()
	select {
	case err := <-result:
		w.want(err, context.Canceled, "receive")
	case <-time.After(w.b.Patience):
		w.t.Fatal("Receive did not return after its context ended")
	}
	r.publish("m")
	r.must(r.settle(s, settle.Done, r.receive(s, 1)...), "the subscription goes on")
}

// depthConverges: the admin's counts come to what the queues hold, and what is unknown is not zero.
func depthConverges(w *world) {
	r := w.rig()
	r.publish(numbered(8)...)
	s := r.subscribe(broker.ReadMain, 3)
	ds := r.receive(s, 3)
	last := len(w.b.Tiers) - 1
	st := broker.Settlement{Delivery: ds[0], Action: settle.Action{Kind: settle.Hold, Tier: last, Delay: w.tier(last)}, Stamp: []header.Field{{Name: header.RetryCount, Value: int64(1)}}}
	r.must(s.Stop(w.ctx()), "stop")
	r.must(s.Settle(w.ctx(), []broker.Settlement{st}), "hold")
	queues := []string{r.physical(r.main()), r.physical(r.dead()), r.physical(topology.Queue{Name: r.decl.Topology.Queue + ".absent"})}
	w.eventually("the depths", func() error {
		got, err := w.admin.Depths(w.ctx(), queues)
		if err != nil {
			return err
		}
		if len(got) != 3 || got[0].Queue != queues[0] || got[1].Queue != queues[1] || !got[2].Missing || got[0].Missing || got[1].Missing {
			return fmt.Errorf("%+v", got)
		}
		moved := int64(0)
		if got[0].Ready.N == 6 { // the held one is back
			moved = 1
		}
		if main := got[0]; !main.Ready.Known || main.Ready.N != 5+moved || main.InFlight.Known && main.InFlight.N != 2 {
			return fmt.Errorf("main queue: %+v", main)
		}
		if dead := got[1]; !dead.Ready.Known || dead.Ready.N != 0 {
			return fmt.Errorf("dead-letter queue: %+v", dead)
		}
		return nil
	})
	empty, err := w.admin.Depths(w.ctx(), nil)
	if err != nil || len(empty) != 0 {
		w.t.Errorf("depths of nothing: %v, %v", empty, err)
	}
}

// deadLetterReader: reading dead letters knows Done, Requeue and GiveBack.
func deadLetterReader(w *world) {
	r := w.rig()
	main := r.subscribe(broker.ReadMain, 2)
	r.publish("0", "1")
	for _, d := range r.receive(main, 2) {
		st := broker.Settlement{Delivery: d, Action: settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected}, Stamp: []header.Field{{Name: header.DeathReason, Value: "rejected"}}}
		r.must(main.Settle(w.ctx(), []broker.Settlement{st}), "dead-letter")
	}
	s := r.subscribe(broker.ReadDeadLetter, 1)
	d := r.receive(s, 1)[0]
	r.must(r.settle(s, settle.Requeue, d), "requeue")
	d = r.receive(s, 1)[0]
	r.must(r.settle(s, settle.GiveBack, d), "give back")
	for range 2 {
		r.must(r.settle(s, settle.Done, r.receive(s, 1)...), "done")
	}
	r.holds(r.dead(), 0, 0)

	bare := &rig{world: w, decl: w.derive(w.spec(noDeadLetter))}
	bare.declare(bare.decl)
	_, err := w.client().Subscribe(w.ctx(), broker.Subscribe{Declaration: bare.decl, Role: broker.ReadDeadLetter, Prefetch: 1, Concurrency: 1})
	if err == nil {
		w.t.Error("subscribed to the dead letters of a topology that has none")
	}
}

// noGoroutineLeft opens everything, works, closes everything, and looks for what is still running.
func noGoroutineLeft(w *world) {
	if w.b.Virtual {
		w.t.Log("the end of a bubble waits for every goroutine in it, in every subtest")
	}
	before := goleak.IgnoreCurrent()
	r := w.rig()
	c, err := w.inst.Driver.OpenClient(w.ctx(), w.inst.Client)
	r.must(err, "open a client")
	p, err := c.Publisher(w.ctx(), r.decl)
	r.must(err, "open a publisher")
	msgs, _ := messages("0", "1", "2")
	r.must(p.Publish(w.ctx(), msgs), "publish")
	s, err := c.Subscribe(w.ctx(), broker.Subscribe{Declaration: r.decl, Prefetch: 2, Concurrency: 1, Lease: time.Minute})
	r.must(err, "subscribe")
	_, err = s.Receive(w.ctx())
	r.must(err, "receive")
	r.must(c.Close(w.ctx()), "close the client with everything open on it")
	r.must(c.Close(w.ctx()), "close the client twice")
	if _, err := s.Receive(w.ctx()); err == nil {
		w.t.Error("received from a closed client")
	}
	if err := p.Publish(w.ctx(), msgs); err == nil {
		w.t.Error("published on a closed client")
	}
	r.holds(r.main(), 3, 0)
	if w.b.Virtual {
		return
	}
	w.eventually("no goroutine is left", func() error { return goleak.Find(append(w.b.Goroutines, before)...) })
}
