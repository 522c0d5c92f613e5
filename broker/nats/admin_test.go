package nats

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// writes notes the requests that change streams or consumers.
func (b *bench) writes() (list func() []string) {
	b.t.Helper()
	var mu sync.Mutex
	var all []string
	for _, subject := range []string{"$JS.API.STREAM.CREATE.>", "$JS.API.STREAM.UPDATE.>", "$JS.API.STREAM.DELETE.>", "$JS.API.STREAM.PURGE.>",
		"$JS.API.CONSUMER.CREATE.>", "$JS.API.CONSUMER.DURABLE.CREATE.>", "$JS.API.CONSUMER.DELETE.>"} {
		if _, err := b.raw.conn.Subscribe(subject, func(m *natsgo.Msg) {
			mu.Lock()
			defer mu.Unlock()
			all = append(all, m.Subject)
		}); err != nil {
			b.t.Fatal(err)
		}
	}
	if err := b.raw.conn.Flush(); err != nil {
		b.t.Fatal(err)
	}
	return func() []string {
		if err := b.raw.conn.Flush(); err != nil { // what was sent before has come
			b.t.Fatal(err)
		}
		mu.Lock()
		defer mu.Unlock()
		out := all
		all = nil
		slices.Sort(out)
		return out
	}
}

func (b *bench) observe(d broker.Declaration) broker.Observation {
	b.t.Helper()
	o, err := b.admin.Observe(b.t.Context(), []broker.Declaration{d})
	if err != nil {
		b.t.Fatal(err)
	}
	return o[0]
}

// differences lists what is missing or differs.
func differences(o broker.Observation) []string {
	var out []string
	for _, obj := range o.Objects {
		if obj.Missing {
			out = append(out, obj.Kind+" "+obj.Name+" is missing")
		}
		for _, d := range obj.Diffs {
			out = append(out, fmt.Sprintf("%s %s %s: want %s, have %s, repairable %v", obj.Kind, obj.Name, d.Property, d.Want, d.Have, d.Repairable))
		}
	}
	return out
}

// TestDeclare_WritesOnlyDifferences (nats-server#5526).
func TestDeclare_WritesOnlyDifferences(t *testing.T) {
	b := newestBench(t)
	writes := b.writes()
	d := b.declare(orders(), "")
	want := []string{
		"$JS.API.CONSUMER.DURABLE.CREATE.orders-dlq.orders-dlq", "$JS.API.CONSUMER.DURABLE.CREATE.orders.orders",
		"$JS.API.STREAM.CREATE.orders", "$JS.API.STREAM.CREATE.orders-dlq",
	}
	if diff := cmp.Diff(want, writes()); diff != "" {
		t.Fatal(diff)
	}
	for range 2 {
		if err := b.admin.Declare(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
	if got := differences(b.observe(d)); len(got) > 0 {
		t.Errorf("differences: %v", got)
	}
	if got := writes(); len(got) > 0 {
		t.Errorf("declaring what is there wrote %v", got)
	}
	// A tier more is one update, and what somebody set beside ours stays.
	stream, err := b.raw.js.Stream(t.Context(), "orders")
	if err != nil {
		t.Fatal(err)
	}
	cfg := stream.CachedInfo().Config
	cfg.Description = "theirs"
	if _, err := b.raw.js.UpdateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	writes()
	spec := orders()
	spec.Holds = append(spec.Holds, time.Minute)
	b.declare(spec, "")
	if diff := cmp.Diff([]string{"$JS.API.STREAM.UPDATE.orders"}, writes()); diff != "" {
		t.Error(diff)
	}
	if stream, err = b.raw.js.Stream(t.Context(), "orders"); err != nil {
		t.Fatal(err)
	}
	cfg = stream.CachedInfo().Config
	if cfg.Description != "theirs" || len(cfg.Subjects) != 4 || !cfg.AllowMsgSchedules {
		t.Errorf("after the update: %+v", cfg)
	}
	// The tier leaves the spec: it is observed as long as it is there, and never taken away by declaring.
	d.Retired = []topology.Queue{{Name: "orders-hold-60s", Role: topology.RoleRetired}}
	if err := b.admin.Declare(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	last := func() broker.ObservedObject { o := b.observe(d).Objects; return o[len(o)-1] }
	if got := last(); got.Role != topology.RoleRetired || got.Name != "orders-hold-60s" {
		t.Errorf("retired: %+v", got)
	}
	if _, err := b.admin.Delete(t.Context(), []string{"orders-hold-60s"}); err != nil {
		t.Fatal(err)
	}
	if got := last(); got.Role != topology.RoleHold {
		t.Errorf("the retired hold queue is still there: %+v", got)
	}
	if got := differences(b.observe(d)); len(got) > 0 {
		t.Errorf("differences: %v", got)
	}
}

// TestDrift changes one thing behind the operator's back and lets Declare mend it.
func TestDrift(t *testing.T) {
	b := newestBench(t)
	d := b.declare(orders(), `{"replicas": 1}`)
	b.publish(d, messages("m", 3)...)
	stream := func(change func(*jetstream.StreamConfig)) func() {
		return func() {
			s, err := b.raw.js.Stream(t.Context(), "orders")
			if err != nil {
				t.Fatal(err)
			}
			cfg := s.CachedInfo().Config
			change(&cfg)
			if _, err := b.raw.js.UpdateStream(t.Context(), cfg); err != nil {
				t.Fatal(err)
			}
		}
	}
	consumer := func(change func(*jetstream.ConsumerConfig)) func() {
		return func() {
			cfg := b.consumerInfo("orders", "orders").Config
			change(&cfg)
			if _, err := b.raw.js.UpdateConsumer(t.Context(), "orders", cfg); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, tc := range map[string]struct {
		change func()
		want   string
	}{
		"duplicate_window": {stream(func(c *jetstream.StreamConfig) { c.Duplicates = time.Minute }), "stream orders duplicate_window: want 2m0s, have 1m0s, repairable true"},
		"main_subject": {stream(func(c *jetstream.StreamConfig) {
			c.Subjects = slices.DeleteFunc(c.Subjects, func(s string) bool { return s == "orders" })
			slices.Sort(c.Subjects)
		}), "stream orders subjects: want orders, have orders-hold-100ms.>,orders-hold-2s.>, repairable true"},
		"hold_subject": {stream(func(c *jetstream.StreamConfig) {
			c.Subjects = slices.DeleteFunc(c.Subjects, func(s string) bool { return s == "orders-hold-2s.>" })
		}), "subject orders-hold-2s is missing"},
		"ack_wait":        {consumer(func(c *jetstream.ConsumerConfig) { c.AckWait = 7 * time.Second }), "consumer orders > orders ack_wait: want 30s, have 7s, repairable true"},
		"max_ack_pending": {consumer(func(c *jetstream.ConsumerConfig) { c.MaxAckPending = 2 }), "consumer orders > orders max_ack_pending: want -1, have 2, repairable true"},
		"max_deliver":     {consumer(func(c *jetstream.ConsumerConfig) { c.MaxDeliver = 3 }), "consumer orders > orders max_deliver: want -1, have 3, repairable true"},
		"filter":          {consumer(func(c *jetstream.ConsumerConfig) { c.FilterSubject = "orders-hold-2s.>" }), "consumer orders > orders filter_subject: want orders, have orders-hold-2s.>, repairable true"},
		"consumer_is_gone": {func() {
			if err := b.raw.js.DeleteConsumer(t.Context(), "orders", "orders"); err != nil {
				t.Fatal(err)
			}
		}, "consumer orders > orders is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			tc.change()
			got := differences(b.observe(d))
			if len(got) != 1 || got[0] != tc.want {
				t.Errorf("differences: %v, want %s", got, tc.want)
			}
			if err := b.admin.Declare(t.Context(), d); err != nil {
				t.Fatal(err)
			}
			if got := differences(b.observe(d)); len(got) > 0 {
				t.Errorf("after declaring: %v", got)
			}
		})
	}
	if n := len(b.stored("orders", "orders")); n != 3 {
		t.Errorf("%d messages are left of 3", n)
	}
}

func TestConflicts(t *testing.T) {
	for name, tc := range map[string]struct {
		theirs  jetstream.StreamConfig
		options string
		want    broker.Diff
		object  string
	}{
		"retention": {jetstream.StreamConfig{Name: "orders", Subjects: []string{"orders"}}, "", broker.Diff{Property: "retention", Want: "workqueue", Have: "limits"}, `stream "orders"`},
		"storage": {jetstream.StreamConfig{Name: "orders", Subjects: []string{"orders"}, Retention: jetstream.WorkQueuePolicy, Storage: jetstream.MemoryStorage},
			`{"storage": "File"}`, broker.Diff{Property: "storage", Want: "file", Have: "memory"}, `stream "orders"`},
		"discard": {jetstream.StreamConfig{Name: "orders", Subjects: []string{"orders"}, Retention: jetstream.WorkQueuePolicy, Discard: jetstream.DiscardNew, MaxMsgs: 10},
			"", broker.Diff{Property: "discard", Want: "old", Have: "new"}, `stream "orders"`},
		"subject_is_taken": {jetstream.StreamConfig{Name: "everything", Subjects: []string{"orders.>", "orders"}}, "", broker.Diff{Property: "stream", Want: "orders", Have: "everything"}, `subject "orders"`},
		"hold_subject_is_taken": {jetstream.StreamConfig{Name: "everything", Subjects: []string{"orders-hold-2s.at.*"}}, "",
			broker.Diff{Property: "stream", Want: "orders", Have: "everything"}, `subject "orders-hold-2s.>"`},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			if _, err := b.raw.js.CreateStream(t.Context(), tc.theirs); err != nil {
				t.Fatal(err)
			}
			err := b.admin.Declare(t.Context(), declaration(t, orders(), tc.options))
			c, ok := errors.AsType[*broker.ConflictError](err)
			if !ok || !errors.Is(err, broker.ErrConflict) {
				t.Fatalf("got %v, want a conflict", err)
			}
			if diff := cmp.Diff(tc.want, c.Diff); diff != "" || c.Object != tc.object {
				t.Errorf("%s: %s", c.Object, diff)
			}
		})
	}
	t.Run("replicas_on_one_server", func(t *testing.T) {
		err := newBench(t).admin.Declare(t.Context(), declaration(t, orders(), `{"replicas": 3}`))
		if !errors.Is(err, broker.ErrUnsupported) || !strings.Contains(err.Error(), "replicas") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("a_pushing_consumer", func(t *testing.T) {
		b := newBench(t)
		if _, err := b.raw.js.CreateStream(t.Context(), logStream); err != nil {
			t.Fatal(err)
		}
		if _, err := b.raw.js.CreatePushConsumer(t.Context(), "orders-log", jetstream.ConsumerConfig{Durable: "billing", DeliverSubject: "x", AckPolicy: jetstream.AckExplicitPolicy}); err != nil {
			t.Fatal(err)
		}
		err := b.admin.Declare(t.Context(), declaration(t, topology.Spec{Queue: "billing", Source: "orders-log", External: true}, ""))
		if !errors.Is(err, broker.ErrConflict) || !strings.Contains(err.Error(), "deliver_subject") {
			t.Errorf("got %v", err)
		}
	})
}

func TestWarnings(t *testing.T) {
	b := newBench(t)
	d := b.declare(orders(), "")
	s, err := b.raw.js.Stream(t.Context(), "orders")
	if err != nil {
		t.Fatal(err)
	}
	cfg := s.CachedInfo().Config
	cfg.MaxAge, cfg.MaxMsgs, cfg.MaxBytes, cfg.MaxMsgsPerSubject, cfg.MaxMsgSize = time.Hour, 10, 1<<20, 5, 1000
	if _, err := b.raw.js.UpdateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	o := b.observe(d)
	if len(o.Warnings) != 5 || !o.UpToDate() {
		t.Errorf("warnings %q, differences %v", o.Warnings, differences(o))
	}
	for _, w := range o.Warnings {
		if !strings.Contains(w, `"orders"`) || !strings.Contains(w, "take the limit away") {
			t.Errorf("%q says not what to do", w)
		}
	}
	spec := orders()
	spec.External = true
	if _, err := b.raw.js.UpdateConsumer(t.Context(), "orders", jetstream.ConsumerConfig{Durable: "orders", FilterSubject: "orders", AckPolicy: jetstream.AckExplicitPolicy, MaxDeliver: 5, MaxAckPending: 7}); err != nil {
		t.Fatal(err)
	}
	external := b.declare(spec, "")
	o = b.observe(external)
	if len(o.Warnings) != 2 || !strings.Contains(o.Warnings[0], "max_deliver 5") || !strings.Contains(o.Warnings[1], "max_ack_pending 7") || !o.UpToDate() {
		t.Errorf("warnings %q, differences %v", o.Warnings, differences(o))
	}
}

func TestServer(t *testing.T) {
	b := newestBench(t)
	before, err := b.admin.Server(t.Context())
	if err != nil || before.ID != "test/$G" || before.Version == "" || len(before.Warnings) > 0 {
		t.Errorf("server %+v, %v", before, err)
	}
	b.server.restart()
	after, err := b.admin.Server(t.Context())
	if err != nil || after.ID != before.ID {
		t.Errorf("after a restart %+v, %v", after, err)
	}
	old := benchOn(t, b.server, mode{park: true})
	if got, err := old.admin.Server(t.Context()); err != nil || len(got.Warnings) != 1 || !strings.Contains(got.Warnings[0], "2.12") {
		t.Errorf("without scheduled messages: %+v, %v", got, err)
	}
	_, err = Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: endpointOf(t, "nats://127.0.0.1:1")})
	if !errors.Is(err, broker.ErrUnavailable) {
		t.Errorf("nobody there: %v", err)
	}
	_, err = Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: endpointOf(t)})
	if !errors.Is(err, broker.ErrUnsupported) {
		t.Errorf("no address: %v", err)
	}
	plain := startServer(t, withoutJetStream)
	_, err = Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: endpointOf(t, "nats://"+plain.addr())})
	if !errors.Is(err, broker.ErrUnavailable) || !strings.Contains(err.Error(), "not enabled") {
		t.Errorf("without JetStream: %v", err)
	}
}

func TestDepthsAndDelete(t *testing.T) {
	b := newBench(t)
	d := b.declare(orders(), "")
	b.publish(d, messages("m", 6)...)
	s := b.subscribe(d, 4)
	ds := receive(t, s, 4)
	mustSettle(t, s, copying(ds[0], holdFor(1, 1)), copying(ds[1], holdFor(1, 1)), copying(ds[2], settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected}))
	closeBounded(t, s)
	names := []string{"orders", "orders-hold-100ms", "orders-hold-2s", "orders-dlq", "absent", "no such > name"}
	depths, err := b.admin.Depths(t.Context(), names)
	if err != nil {
		t.Fatal(err)
	}
	count := func(n int64) broker.Count { return broker.Known(n) }
	for i, want := range []broker.Depth{
		{Ready: count(2), InFlight: count(1)}, // handed back, and not fetched again
		{Ready: count(0), InFlight: count(0)}, {Ready: count(2), InFlight: count(0)}, {Ready: count(1), InFlight: count(0)}, {Missing: true}, {Missing: true},
	} {
		want.Queue = names[i]
		if !want.Missing {
			want.Stuck = count(0)
		}
		got := depths[i]
		if i == 0 { // those that were fetched and not received are back, too
			got.Ready, got.InFlight = count(got.Ready.N+got.InFlight.N-1), count(1)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	}
	if err := b.raw.js.DeleteConsumer(t.Context(), "orders-dlq", "orders-dlq"); err != nil {
		t.Fatal(err)
	}
	if depths, err = b.admin.Depths(t.Context(), []string{"orders-dlq"}); err != nil || depths[0].Ready != count(1) {
		t.Errorf("without its consumer: %+v, %v", depths, err)
	}
	deleted, err := b.admin.Delete(t.Context(), []string{"orders-hold-2s", "orders-hold-2s", "orders", "orders-dlq", "absent", "no such > name"})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []int64{2, 0, 3, 1, 0, 0} {
		if got := deleted[i].Messages; got != count(want) {
			t.Errorf("deleting %q: %+v, want %d", deleted[i].Queue, got, want)
		}
	}
	if _, err := b.raw.js.Stream(t.Context(), "orders"); !errors.Is(err, jetstream.ErrStreamNotFound) {
		t.Errorf("the stream is still there: %v", err)
	}
}

// TestParking: on servers without scheduled messages, and when such a server is upgraded.
func TestParking(t *testing.T) {
	t.Parallel()
	s := newestServer(t)
	old := benchOn(t, s, mode{park: true})
	d := old.declare(orders(), "")
	if got := differences(old.observe(d)); len(got) > 0 {
		t.Errorf("differences: %v", got)
	}
	old.publish(d, messages("m", 3)...)
	sub := old.subscribe(d, 3)
	for _, x := range receive(t, sub, 3) {
		mustSettle(t, sub, copying(x, holdFor(1, 1)))
	}
	closeBounded(t, sub)
	old.eventually("orders", "orders-hold-2s.parked.*", 3) // they wait, although nobody runs
	if err := old.raw.js.DeleteConsumer(t.Context(), "orders", parkedConsumer); err != nil {
		t.Fatal(err)
	}
	if got := differences(old.observe(d)); len(got) != 1 || !strings.Contains(got[0], parkedConsumer) {
		t.Errorf("without the consumer of parked messages: %v", got)
	}
	spec := orders()
	spec.Holds = append(spec.Holds, time.Minute)
	old.declare(spec, "")
	if k := old.consumerInfo("orders", parkedConsumer).Config; len(k.FilterSubjects) != 3 {
		t.Errorf("filters %v", k.FilterSubjects)
	}

	// The server can schedule from here on: the stream learns it, and what is parked still comes.
	upgraded := benchOn(t, s, mode{})
	if got := differences(upgraded.observe(d)); len(got) != 1 || !strings.Contains(got[0], "allow_msg_schedules") {
		t.Errorf("after the upgrade: %v", got)
	}
	d = upgraded.declare(spec, "")
	sub = upgraded.subscribe(d, 10)
	upgraded.publish(d, messages("new", 1)...)
	seen := map[string]int{}
	for len(seen) < 4 {
		for _, x := range receiveSome(t, sub, 4) {
			body := string(x.Body)
			if strings.HasPrefix(body, "new") && header.Parse(x.Headers).Retries == 0 {
				mustSettle(t, sub, copying(x, holdFor(0, 1)))
				continue
			}
			seen[body]++
			mustSettle(t, sub, act(settle.Done, x)...)
		}
	}
	upgraded.eventually("orders", ">", 0)
	for body, n := range seen {
		if n != 1 {
			t.Errorf("%q came %d times", body, n)
		}
	}
}

func TestJ4_External(t *testing.T) {
	b := newBench(t)
	spec := topology.Spec{Queue: "billing", Source: "orders-log", External: true, DeadLetter: true, Holds: orders().Holds}
	d := declaration(t, spec, "")
	if err := b.admin.Declare(t.Context(), d); !errors.Is(err, broker.ErrNotFound) || !strings.Contains(err.Error(), "orders-log") {
		t.Fatalf("a source that is missing: %v", err)
	}
	if _, err := b.raw.js.CreateStream(t.Context(), logStream); err != nil {
		t.Fatal(err)
	}
	writes := b.writes()
	d = b.declare(spec, "")
	want := []string{"$JS.API.CONSUMER.DURABLE.CREATE.billing-dlq.billing-dlq", "$JS.API.CONSUMER.DURABLE.CREATE.orders-log.billing", "$JS.API.STREAM.CREATE.billing-dlq"}
	if diff := cmp.Diff(want, writes()); diff != "" {
		t.Error(diff)
	}
	if _, err := b.client.Publisher(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	err := b.publisher(d).Publish(t.Context(), messages("m", 1))
	if e, ok := errors.AsType[*broker.PublishError](err); !ok || !errors.Is(e.Items[0].Err, broker.ErrUnsupported) {
		t.Errorf("publishing to a stream without a subject of its own: %v", err)
	}
	b.put("log.eu", nil, "m")
	s := b.subscribe(d, 1)
	mustSettle(t, s, act(settle.Done, receive(t, s, 1)...)...)
	if n := len(b.stored("orders-log", "log.>")); n != 1 {
		t.Errorf("%d messages in the log", n)
	}
	// Somebody who deletes the durable: it is made by declaring only, because it would start from the beginning.
	if err := b.raw.js.DeleteConsumer(t.Context(), "orders-log", "billing"); err != nil {
		t.Fatal(err)
	}
	if _, err := b.client.Subscribe(t.Context(), broker.Subscribe{Declaration: d, Prefetch: 1}); !errors.Is(err, broker.ErrNotFound) {
		t.Errorf("subscribing without the durable: %v", err)
	}
}

func TestClosed(t *testing.T) {
	b := newBench(t)
	d := b.declare(orders(), "")
	p := b.publisher(d)
	s := b.subscribe(d, 1)
	closeBounded(t, b.client)
	if err := p.Publish(t.Context(), messages("m", 2)); err == nil {
		t.Error("published on a closed client")
	}
	if _, err := s.Receive(t.Context()); !errors.Is(err, broker.ErrClosed) {
		t.Errorf("receive: %v", err)
	}
	if _, err := b.client.Subscribe(t.Context(), broker.Subscribe{Declaration: d, Prefetch: 1}); !errors.Is(err, broker.ErrClosed) {
		t.Errorf("subscribe: %v", err)
	}
	if _, err := b.client.Publisher(t.Context(), d); !errors.Is(err, broker.ErrClosed) {
		t.Errorf("publisher: %v", err)
	}
	closeBounded(t, b.admin)
	if err := b.admin.Declare(context.Background(), d); !errors.Is(err, broker.ErrClosed) {
		t.Errorf("declare: %v", err)
	}
}
