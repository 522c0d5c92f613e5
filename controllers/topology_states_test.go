package controllers

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/internal/testenv/kubeenv"
)

func TestTopology_Paused(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.connected("rabbit")
	topo := s.declared(orders("orders", "rabbit"))
	s.edit(topo, func() {
		topo.Spec.Paused = true
		topo.Spec.DeletionPolicy = v1alpha1.DeletionDelete
		topo.Spec.HoldQueues = holds(time.Second, 5*time.Second)
	})
	f.change(func() { delete(f.queues, "orders-dlq"); f.written = nil })
	s.topology(topo)
	for kind, want := range map[string]string{v1alpha1.ConditionPaused: "True/Paused", v1alpha1.ConditionReady: "False/Paused", v1alpha1.ConditionDrift: "True/Drifted"} {
		if got := state(topo, kind); got != want {
			t.Errorf("%s is %s, want %s%s", kind, got, want, describe(topo))
		}
	}
	if len(f.written) != 0 {
		t.Errorf("paused, and yet: %v", f.written)
	}
	s.delete(topo)
	s.topology(topo)
	if !s.gone(topo) || slices.Contains(f.names(), "orders") {
		t.Errorf("deletion does not work while paused: %v", f.names())
	}
}

// What a restart of the operator finds as it was it leaves as it is: no object changes while connections are made.
func TestTopology_RestartChangesNothing(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	b := s.connected("rabbit")
	topo := s.declared(orders("orders", "rabbit"))
	s.broker(b)
	after := s.stepper(Options{Drivers: []broker.Driver{f.driver()}, Namespaces: []string{s.ns}})
	again := after.topology(topo)
	if after.writes.count() != 0 || again <= 0 {
		t.Errorf("%d writes before the connection stands; looked at again in %s", after.writes.count(), again)
	}
	told := after.told()
	after.broker(b)
	if got := told(); len(got) != 1 {
		t.Errorf("the connection stands, and %v are looked at", got)
	}
	after.topology(topo)
	if after.writes.count() != 0 || f.count("Declare") != 1 {
		t.Errorf("%d writes, %d declarations after a restart", after.writes.count(), f.count("Declare")-1)
	}
}

// Without a management API arguments are unknown: they are verified once by declaring, then no more, and Drift is
// Unknown.
func TestTopology_BlindBroker(t *testing.T) {
	f := newFakeServer("cluster-a")
	f.blind = true
	s := step(t, f.driver())
	s.connected("rabbit")
	topo := s.declared(orders("orders", "rabbit"))
	if got := state(topo, v1alpha1.ConditionDrift); got != "Unknown/DriftUnknown" {
		t.Errorf("Drift is %s", got)
	}
	if topo.Status.Counts.InFlight != nil || topo.Status.Counts.Ready == nil {
		t.Errorf("unknown is not zero: %+v", topo.Status.Counts)
	}
	declares := f.count("Declare")
	for range 3 {
		s.topology(topo)
	}
	if n := f.count("Declare") - declares; n != 0 {
		t.Errorf("passes that change nothing declare %d times", n)
	}
}

func TestTopology_MessagesAtRisk(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	b := s.connected("rabbit")
	topo := s.declared(orders("orders", "rabbit"))
	told := s.told()
	f.change(func() { f.risks = []string{`policy "short" sets max-length on queue "orders"`} })
	s.deps.pool.entry(b.UID).observer.resyncAll(t.Context())
	if got := told(); len(got) != 1 {
		t.Fatalf("the resync asks for a look at %v", got)
	}
	s.topology(topo)
	if got := state(topo, v1alpha1.ConditionMessagesAtRisk); got != "True/MessagesAtRisk" || state(topo, v1alpha1.ConditionReady) != "True/Ready" {
		t.Errorf("MessagesAtRisk is %s%s", got, describe(topo))
	}
	if got := s.notes.take(v1alpha1.ConditionMessagesAtRisk); len(got) != 1 {
		t.Errorf("events: %q", got)
	}
	s.deps.pool.entry(b.UID).observer.resyncAll(t.Context())
	if got := told(); len(got) != 0 {
		t.Errorf("the risk is known, and yet a look at %v is asked for", got)
	}
}

// The net under the CRD's rules: the stored status says where the queues are.
func TestTopology_ImmutableBackup(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.connected("rabbit")
	topo := s.declared(orders("orders", "rabbit"))
	moved := topo.DeepCopy()
	moved.Spec.Queue = "elsewhere"
	scope := s.topologies.scope(moved)
	if err := s.topologies.pass(t.Context(), scope); err != nil {
		t.Fatal(err)
	}
	got := newConditionsOf(scope)
	if got := state(got, v1alpha1.ConditionStalled); got != "True/ImmutableField" {
		t.Errorf("Stalled: %s", got)
	}
	if message := condition(got, v1alpha1.ConditionReady).Message; !strings.Contains(message, `it was "orders" when the queues were declared and is now "elsewhere"`) {
		t.Errorf("message: %s", message)
	}
	if slices.Contains(f.names(), "elsewhere") {
		t.Error("the queue was declared all the same")
	}
}

func newConditionsOf(s *topologyScope) *v1alpha1.Topology {
	t := s.topo.DeepCopy()
	t.Status.Conditions = s.conds.list
	return t
}

func TestTopology_AllowedNamespaces(t *testing.T) {
	f := newFakeServer("cluster-a")
	c := connect(t)
	other := kubeenv.Namespace(t, c.cfg)
	s := c.stepper(Options{Drivers: []broker.Driver{f.driver()}, Namespaces: []string{c.ns, other}})
	b := s.connected("rabbit")
	topo := orders("orders", "rabbit")
	topo.Namespace = other
	topo.Spec.BrokerRef.Namespace = s.ns
	s.declared(topo)
	if got := state(topo, v1alpha1.ConditionStalled); got != "True/NamespaceNotAllowed" {
		t.Fatalf("Stalled: %s%s", got, describe(topo))
	}
	allow := func(a *v1alpha1.AllowedNamespaces) {
		s.edit(b, func() { b.Spec.AllowedNamespaces = a })
		s.broker(b)
		s.clock.Step(keepLabels)
		s.topology(topo)
	}
	allow(&v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesSelector, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"team": "a"}}})
	if got := state(topo, v1alpha1.ConditionStalled); got != "True/NamespaceNotAllowed" {
		t.Fatalf("Stalled: %s%s", got, describe(topo))
	}
	if f.count("Observe") != 0 {
		t.Error("the broker was asked for a Topology that is not allowed")
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: other}}
	s.edit(ns, func() { ns.Labels = map[string]string{"team": "a"} })
	allow(b.Spec.AllowedNamespaces)
	if got := state(topo, v1alpha1.ConditionReady); got != "True/Ready" || topo.Status.Queue != other+".orders" {
		t.Fatalf("Ready is %s, queue %q%s", got, topo.Status.Queue, describe(topo))
	}
	allow(&v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesAll, Queues: []v1alpha1.QueuePattern{"shared-*"}})
	if got := state(topo, v1alpha1.ConditionStalled); got != "True/QueueNotAllowed" || !strings.Contains(condition(topo, v1alpha1.ConditionReady).Message, "shared-*") {
		t.Fatalf("Stalled: %s%s", got, describe(topo))
	}
	if !slices.Contains(f.names(), other+".orders") {
		t.Error("what is not allowed any more was deleted")
	}
}
