package controllers

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/controllers/render"
)

func roles(t *v1alpha1.Topology) []string {
	var out []string
	for _, q := range t.Status.Queues {
		out = append(out, q.Name+" "+string(q.Role))
	}
	slices.Sort(out)
	return out
}

func TestTopology_DeclaresAndSaysSo(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	b := s.connected("rabbit")
	topo := s.declared(orders("orders", "rabbit"))

	if diff := cmp.Diff([]string{"orders", "orders-dlq", "orders-hold-30s", "orders-hold-5s"}, f.names()); diff != "" {
		t.Errorf("queues on the broker (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"orders Main", "orders-dlq DeadLetter", "orders-hold-30s Hold", "orders-hold-5s Hold"}, roles(topo)); diff != "" {
		t.Errorf("queues in the status (-want +got):\n%s", diff)
	}
	for kind, want := range map[string]string{
		v1alpha1.ConditionReady: "True/Ready", v1alpha1.ConditionBrokerReady: "True/BrokerReady",
		v1alpha1.ConditionDeclared: "True/Declared", v1alpha1.ConditionDrift: "False/InSync",
	} {
		if got := state(topo, kind); got != want {
			t.Errorf("%s is %s, want %s", kind, got, want)
		}
	}
	want := &v1alpha1.DeclaredRecord{Broker: v1alpha1.ObjectIdentity{Namespace: s.ns, Name: "rabbit", UID: b.UID}, Kind: v1alpha1.BrokerRabbitMQ, ServerID: "cluster-a"}
	if diff := cmp.Diff(want, topo.Status.Declared); diff != "" {
		t.Errorf("record (-want +got):\n%s", diff)
	}
	zero := int64(0)
	if diff := cmp.Diff(&v1alpha1.MessageCounts{Ready: &zero, InFlight: &zero, Held: &zero, Dead: &zero}, topo.Status.Counts); diff != "" {
		t.Errorf("counts (-want +got):\n%s", diff)
	}
	if topo.Status.ObservedGeneration != topo.Generation || topo.Status.Queue != "orders" {
		t.Errorf("status: %+v", topo.Status)
	}
	if got := s.notes.take(v1alpha1.ReasonReady); len(got) != 2 { // Broker and Topology
		t.Errorf("events: %q", got)
	}
	if len(topo.Finalizers) != 0 {
		t.Errorf("deletion policy Retain, and finalizers %v", topo.Finalizers)
	}
	writes, declares, notes := s.writes.count(), f.count("Declare"), s.notes.count()
	if after := s.topology(topo); after != 0 {
		t.Errorf("all is well, and yet it is looked at again in %s", after)
	}
	if s.writes.count() != writes || f.count("Declare") != declares || s.notes.count() != notes {
		t.Error("a pass that changed nothing wrote something")
	}
}

// Existing queues are adopted as they are, with what is in them.
func TestTopology_AdoptsExistingQueues(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.connected("rabbit")
	topo := orders("orders", "rabbit")
	topo.Namespace = s.ns
	d, err := render.Declaration(topo, "rabbitmq")
	if err != nil {
		t.Fatal(err)
	}
	objs, err := fakeObjects(d)
	if err != nil {
		t.Fatal(err)
	}
	f.change(func() {
		for _, o := range objs {
			f.queues[o.Name] = &fakeQueue{arguments: argumentsOf(o), ready: 3}
		}
	})
	s.declared(topo)
	if got := state(topo, v1alpha1.ConditionReady); got != "True/Ready" || f.count("Declare") != 0 {
		t.Errorf("Ready is %s after %d declarations", got, f.count("Declare"))
	}
	if got := *topo.Status.Counts.Held; got != 6 {
		t.Errorf("%d messages held, want 6", got)
	}
}

// The operator never writes spec: a GitOps tool has no difference to show.
func TestCase26_SpecIsNeverWritten(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	b := s.connected("rabbit")
	topo := orders("orders", "rabbit")
	topo.Spec.DeletionPolicy = v1alpha1.DeletionDelete
	s.create(topo)
	specB, specT := b.Spec.DeepCopy(), topo.Spec.DeepCopy()
	genB, genT := b.Generation, topo.Generation
	s.topology(topo)
	s.broker(b)
	if diff := cmp.Diff(*specB, b.Spec); diff != "" || b.Generation != genB {
		t.Errorf("the Broker's spec changed:\n%s", diff)
	}
	if diff := cmp.Diff(*specT, topo.Spec); diff != "" || topo.Generation != genT {
		t.Errorf("the Topology's spec changed:\n%s", diff)
	}
	for _, o := range []metav1.Object{b, topo} {
		for _, m := range o.GetManagedFields() {
			if m.Manager == FieldOwner && m.Subresource == "" && strings.Contains(m.FieldsV1.GetRawString(), "f:spec") {
				t.Errorf("the operator owns a part of the spec of %s", o.GetName())
			}
		}
	}
}

func TestTopology_WaitsForItsBroker(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	topo := s.declared(orders("orders", "rabbit"))
	if got := state(topo, v1alpha1.ConditionReady); got != "False/BrokerNotFound" {
		t.Fatalf("Ready is %s%s", got, describe(topo))
	}
	f.breaks("Open", broker.ErrUnavailable)
	b := s.connected("rabbit")
	s.topology(topo)
	if got := state(topo, v1alpha1.ConditionReady); got != "False/BrokerNotReady" {
		t.Fatalf("Ready is %s%s", got, describe(topo))
	}
	if n := f.count("Observe") + f.count("Declare"); n != 0 {
		t.Errorf("%d calls to a broker that is down", n)
	}
	f.breaks("Open", nil)
	s.broker(b)
	s.topology(topo)
	if got := state(topo, v1alpha1.ConditionReady); got != "True/Ready" {
		t.Fatalf("Ready is %s%s", got, describe(topo))
	}
}

// A lost connection is found once; nobody calls again until the Broker is connected, and a connection that comes back
// at once changes no object.
func TestTopology_LostConnectionIsNotHammered(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	b := s.connected("rabbit")
	one, two := s.declared(orders("one", "rabbit")), s.declared(orders("two", "rabbit"))
	f.breaks("*", broker.ErrUnavailable)
	writes, calls := s.writes.count(), f.total()
	for range 5 {
		s.topology(one)
		s.topology(two)
	}
	observer := s.deps.pool.entry(b.UID).observer
	observer.countAll(t.Context())
	observer.resyncAll(t.Context())
	if n := f.total() - calls; n != 1 {
		t.Errorf("%d calls to a broker that is down, want the one that found out", n)
	}
	if s.writes.count() != writes || state(one, v1alpha1.ConditionReady) != "True/Ready" {
		t.Error("a Topology changed before the Broker said so")
	}
	f.breaks("*", nil)
	s.broker(b)
	s.topology(one)
	if got := f.count("Open"); got != 2 {
		t.Errorf("%d connections were made", got)
	}
	s.broker(b) // the dependents' count
	f.breaks("*", broker.ErrUnavailable)
	s.broker(b)
	if s.topology(one); state(one, v1alpha1.ConditionReady) != "False/BrokerNotReady" {
		t.Errorf("the Broker is not ready, and the Topology says%s", describe(one))
	}
	if got := state(one, v1alpha1.ConditionDeclared); got != "True/Declared" {
		t.Errorf("what was declared last is not shown any more: %s", got)
	}
}

// Somebody deletes a queue by hand: it is declared again, with a condition and an event.
func TestCase22_DeletedQueueComesBack(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	b := s.connected("rabbit")
	s.edit(b, func() { b.Spec.ResyncInterval = &metav1.Duration{Duration: time.Minute} })
	s.broker(b)
	topo := s.declared(orders("orders", "rabbit"))
	told := s.told()
	observer := s.deps.pool.entry(b.UID).observer

	observer.resyncAll(t.Context())
	if got := told(); len(got) != 0 {
		t.Fatalf("all is well, and yet the resync asks for a look at %v", got)
	}
	f.change(func() { delete(f.queues, "orders-hold-5s") })
	observer.resyncAll(t.Context())
	if got := told(); !cmp.Equal(got, []string{s.ns + "/orders"}) {
		t.Fatalf("the resync asks for a look at %v", got)
	}
	after := s.topology(topo)
	if !slices.Contains(f.names(), "orders-hold-5s") {
		t.Fatal("the queue is not there again")
	}
	if got := state(topo, v1alpha1.ConditionDrift); got != "False/Repaired" || !strings.Contains(condition(topo, v1alpha1.ConditionDrift).Message, `queue "orders-hold-5s" was missing`) {
		t.Errorf("Drift: %s%s", got, describe(topo))
	}
	if got := s.notes.take(EventDrifted); len(got) != 1 || !strings.Contains(got[0], "orders-hold-5s") {
		t.Errorf("events: %q", got)
	}
	if after <= 0 || after > 2*time.Minute {
		t.Errorf("the condition is looked at again in %s", after)
	}
	if s.topology(topo); state(topo, v1alpha1.ConditionDrift) != "False/InSync" || state(topo, v1alpha1.ConditionReady) != "True/Ready" {
		t.Errorf("all is well again, and it says%s", describe(topo))
	}
}

// told gives the Topologies that a look was asked for since the last call.
func (s *stepper) told() func() []string {
	s.t.Helper()
	q := newTestQueue(s.t)
	if err := s.deps.topologies.start(s.t.(*testing.T).Context(), q); err != nil {
		s.t.Fatal(err)
	}
	return func() []string {
		var out []string
		for q.Len() > 0 {
			r, _ := q.Get()
			q.Done(r)
			out = append(out, r.String())
		}
		slices.Sort(out)
		return out
	}
}

func TestTopology_Conflict(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	b := s.connected("rabbit")
	told := s.told()
	f.change(func() { f.queues["orders"] = &fakeQueue{arguments: "other", ready: 7} })
	topo := s.declared(orders("orders", "rabbit"))
	message := condition(topo, v1alpha1.ConditionReady).Message
	if got := state(topo, v1alpha1.ConditionStalled); got != "True/ImmutableField" || !strings.Contains(message, `queue "orders" exists with another arguments: it has other, the manifest asks for map[`) {
		t.Fatalf("Stalled: %s%s", got, describe(topo))
	}
	if got := state(topo, v1alpha1.ConditionDrift); got != "True/Drifted" {
		t.Errorf("Drift: %s", got)
	}
	if f.count("Declare") != 0 || f.queues["orders"].ready != 7 {
		t.Error("something was declared or deleted")
	}
	observer := s.deps.pool.entry(b.UID).observer
	writes := s.writes.count()
	for range 3 {
		observer.resyncAll(t.Context())
	}
	if got := told(); len(got) != 0 || s.writes.count() != writes {
		t.Errorf("the conflict is looked at again and again: %v", got)
	}
	// Its owner drains and deletes it: the next resync finds out.
	f.change(func() { delete(f.queues, "orders") })
	observer.resyncAll(t.Context())
	if got := told(); len(got) != 1 {
		t.Fatal("the end of the conflict is not noticed")
	}
	if s.topology(topo); state(topo, v1alpha1.ConditionReady) != "True/Ready" {
		t.Errorf("the conflict is over, and it says%s", describe(topo))
	}
}

func TestTopology_BrokerRefuses(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.connected("rabbit")
	for name, tc := range map[string]struct {
		err     error
		spec    func(*v1alpha1.TopologySpec)
		want    string
		stalled bool
	}{
		"conflict found by declaring": {err: &broker.ConflictError{Object: `queue "x"`, Diff: broker.Diff{Property: "x-queue-type", Want: "quorum", Have: "classic"}}, want: v1alpha1.ReasonImmutableField, stalled: true},
		"no right":                    {err: fmt.Errorf("configure: %w", broker.ErrUnauthorized), want: v1alpha1.ReasonAccessRefused, stalled: true},
		"no exchange":                 {spec: bindTo("nowhere"), want: v1alpha1.ReasonExchangeNotFound},
		"unsupported by the server":   {err: fmt.Errorf("classic: %w", broker.ErrUnsupported), want: v1alpha1.ReasonUnsupported, stalled: true},
		"something else":              {err: fmt.Errorf("odd"), want: v1alpha1.ReasonDeclareFailed},
	} {
		t.Run(name, func(t *testing.T) {
			f.breaks("Declare", tc.err)
			defer f.breaks("Declare", nil)
			topo := orders("t-"+strings.ReplaceAll(name, " ", "-"), "rabbit")
			if tc.spec != nil {
				tc.spec(&topo.Spec)
			}
			s.create(topo)
			after := s.topology(topo)
			if got := state(topo, v1alpha1.ConditionReady); got != "False/"+tc.want {
				t.Fatalf("Ready is %s, want %s%s", got, tc.want, describe(topo))
			}
			if got := state(topo, v1alpha1.ConditionStalled) != ""; got != tc.stalled {
				t.Errorf("stalled: %v", got)
			}
			if after != 0 && after < 20*time.Second {
				t.Errorf("it is tried again in %s: too soon", after)
			}
			writes := s.writes.count()
			if s.topology(topo); s.writes.count() != writes {
				t.Error("the second look wrote")
			}
		})
	}
}

func bindTo(exchange string) func(*v1alpha1.TopologySpec) {
	return func(s *v1alpha1.TopologySpec) {
		s.RabbitMQ = &v1alpha1.RabbitMQTopology{Bindings: []v1alpha1.RabbitMQBinding{{Exchange: exchange, RoutingKey: "order.*"}}}
	}
}

// A binding that somebody removed comes back in the same pass as its queue.
func TestTopology_OwnsItsBindings(t *testing.T) {
	f := newFakeServer("cluster-a")
	f.exchanges["shop"] = true
	s := step(t, f.driver())
	s.connected("rabbit")
	topo := orders("orders", "rabbit")
	bindTo("shop")(&topo.Spec)
	s.declared(topo)
	if got := state(topo, v1alpha1.ConditionReady); got != "True/Ready" {
		t.Fatal(describe(topo))
	}
	f.change(func() { clear(f.bindings); delete(f.queues, "orders") })
	s.topology(topo)
	if !f.bindings["shop -> orders (order.*)"] || f.queues["orders"] == nil {
		t.Errorf("queue or binding did not come back: %v", f.bindings)
	}
	if diff := cmp.Diff([]v1alpha1.RabbitMQBinding{{Exchange: "shop", RoutingKey: "order.*"}}, topo.Status.Declared.Bindings); diff != "" {
		t.Errorf("recorded bindings (-want +got):\n%s", diff)
	}
}

// A binding that leaves the list is removed, once; what others bind is theirs.
func TestTopology_RemovesItsBindings(t *testing.T) {
	for _, blind := range []bool{false, true} {
		t.Run(fmt.Sprintf("blind=%v", blind), func(t *testing.T) {
			f := newFakeServer("cluster-a")
			f.exchanges["shop"], f.blind = true, blind
			s := step(t, f.driver())
			b := s.connected("rabbit")
			topo := orders("orders", "rabbit")
			bindTo("shop")(&topo.Spec)
			s.declared(topo)
			const ours, theirs = "shop -> orders (order.*)", "shop -> orders (theirs)"
			f.change(func() { f.bindings[theirs] = true })
			s.edit(topo, func() { topo.Spec.RabbitMQ.Bindings = nil })
			f.breaks("Declare", broker.ErrUnauthorized)
			s.topology(topo)
			if len(topo.Status.Declared.Bindings) != 1 {
				t.Error("a binding that is still there is off the record")
			}
			f.breaks("Declare", nil)
			s.topology(topo)
			if f.bindings[ours] || !f.bindings[theirs] || len(topo.Status.Declared.Bindings) != 0 {
				t.Fatalf("bindings %v, on record %v%s", f.bindings, topo.Status.Declared.Bindings, describe(topo))
			}
			f.change(func() { f.bindings[ours] = true }) // by hand
			s.deps.pool.entry(b.UID).observer.resyncAll(t.Context())
			s.topology(topo)
			if !f.bindings[ours] {
				t.Error("a binding that somebody made by hand was removed")
			}
		})
	}
}

func TestTopology_RefusedBeforeTheBrokerIsAsked(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.connected("rabbit")
	for name, tc := range map[string]struct {
		spec func(*v1alpha1.TopologySpec)
		want string
		says string
	}{
		"sequenced": {func(s *v1alpha1.TopologySpec) { s.Sequenced = &v1alpha1.Sequenced{OnFailure: v1alpha1.SequenceSkip} }, v1alpha1.ReasonUnsupported, "not supported yet"},
		"kafka":     {func(s *v1alpha1.TopologySpec) { s.Kafka = &v1alpha1.KafkaTopology{Partitions: 3} }, v1alpha1.ReasonBrokerKindMismatch, "remove this section"},
	} {
		t.Run(name, func(t *testing.T) {
			topo := orders("t-"+name, "rabbit")
			tc.spec(&topo.Spec)
			s.declared(topo)
			if got := state(topo, v1alpha1.ConditionStalled); got != "True/"+tc.want || !strings.Contains(condition(topo, v1alpha1.ConditionReady).Message, tc.says) {
				t.Errorf("Stalled: %s, want %s%s", got, tc.want, describe(topo))
			}
			if f.count("Observe") != 0 {
				t.Error("the broker was asked")
			}
		})
	}
}

// B6: two different warnings, as conditions and events.
func TestB6_Warnings(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.connected("rabbit")
	for name, tc := range map[string]struct {
		spec func(*v1alpha1.TopologySpec)
		want string
	}{
		"hold-only": {func(s *v1alpha1.TopologySpec) { s.DeadLetter = nil }, v1alpha1.ConditionHoldWithoutDeadLetter},
		"dead-only": {func(s *v1alpha1.TopologySpec) { s.HoldQueues = nil }, v1alpha1.ConditionDeadLetterWithoutHold},
		"both":      {func(*v1alpha1.TopologySpec) {}, ""},
		"neither":   {func(s *v1alpha1.TopologySpec) { s.HoldQueues, s.DeadLetter = nil, nil }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			topo := orders(name, "rabbit")
			tc.spec(&topo.Spec)
			s.declared(topo)
			if got := state(topo, v1alpha1.ConditionReady); got != "True/Ready" {
				t.Fatalf("a warning makes it unready%s", describe(topo))
			}
			for _, kind := range []string{v1alpha1.ConditionHoldWithoutDeadLetter, v1alpha1.ConditionDeadLetterWithoutHold} {
				want, notes := "", 0
				if kind == tc.want {
					want, notes = "True/"+kind, 1
				}
				if got := state(topo, kind); got != want {
					t.Errorf("%s is %q, want %q", kind, got, want)
				}
				if got := s.notes.take(kind); len(got) != notes {
					t.Errorf("events %s: %q", kind, got)
				}
			}
			s.topology(topo)
			if got := s.notes.take(tc.want); len(got) != 0 {
				t.Errorf("the second look sent %q", got)
			}
		})
	}
}

// J4: an external topology is only verified, and its dead-letter queue declared.
func TestJ4_ExternalIsVerified(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.connected("rabbit")
	topo := orders("legacy", "rabbit")
	topo.Spec.External = true
	topo.Spec.DeletionPolicy = v1alpha1.DeletionDelete
	s.create(topo)
	after := s.topology(topo)
	if got := state(topo, v1alpha1.ConditionReady); got != "False/ExternalNotFound" || after <= 0 || after > time.Minute {
		t.Fatalf("Ready is %s, looked for again in %s%s", got, after, describe(topo))
	}
	f.change(func() { f.queues["legacy"] = &fakeQueue{arguments: "theirs", ready: 5} })
	s.topology(topo)
	if got := state(topo, v1alpha1.ConditionDeclared); got != "True/Verified" {
		t.Fatalf("Declared is %s%s", got, describe(topo))
	}
	if diff := cmp.Diff([]string{"legacy", "legacy-dlq"}, f.names()); diff != "" {
		t.Errorf("queues on the broker (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"declare legacy-dlq"}, f.written); diff != "" {
		t.Errorf("what was written (-want +got):\n%s", diff)
	}
	s.delete(topo)
	s.topology(topo)
	if diff := cmp.Diff([]string{"legacy"}, f.names()); diff != "" || !s.gone(topo) {
		t.Errorf("after its deletion with policy Delete (-want +got):\n%s", diff)
	}
	if got := s.notes.take(EventQueuesDeleted); len(got) != 1 || !strings.Contains(got[0], `"legacy" (external)`) {
		t.Errorf("events: %q", got)
	}
}
