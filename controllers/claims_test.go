package controllers

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/internal/testenv/kubeenv"
)

// nextSecond waits until the API server's next creationTimestamp differs, which it keeps in whole seconds.
func (s *stepper) nextSecond(than *v1alpha1.Topology) {
	for time.Since(than.CreationTimestamp.Time) < 1100*time.Millisecond {
		time.Sleep(10 * time.Millisecond)
	}
}

// Two objects claim one queue: the older one keeps it, the other gets Conflict, and deleting the loser deletes
// nothing.
func TestCase25_TwoClaimants(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.connected("rabbit")
	first := orders("first", "rabbit")
	first.Spec.Queue, first.Spec.DeletionPolicy = "orders", v1alpha1.DeletionDelete
	second := orders("second", "rabbit")
	second.Spec.Queue, second.Spec.DeletionPolicy = "orders", v1alpha1.DeletionDelete
	s.create(first)
	s.nextSecond(first)
	s.create(second)
	s.sync(first)

	s.topology(second) // the younger one is looked at first
	message := condition(second, v1alpha1.ConditionReady).Message
	if got := state(second, v1alpha1.ConditionStalled); got != "True/Conflict" || !strings.Contains(message, s.ns+"/first") {
		t.Fatalf("Stalled: %s%s", got, describe(second))
	}
	if got := state(second, v1alpha1.ConditionConflict); got != "True/QueueClaimed" {
		t.Errorf("Conflict: %s", got)
	}
	if n := f.total(); n != 1 { // the connection
		t.Errorf("%d calls for the loser", n-1)
	}
	s.topology(first)
	if got := state(first, v1alpha1.ConditionReady); got != "True/Ready" {
		t.Fatal(describe(first))
	}
	f.change(func() { f.queues["orders"].ready = 9 })
	s.delete(second)
	s.topology(second)
	if !s.gone(second) || f.count("Delete") != 0 || f.queues["orders"].ready != 9 {
		t.Errorf("deleting the loser: gone %v, %d deletions", s.gone(second), f.count("Delete"))
	}

	// The loser of a new pair takes over once the winner is gone.
	third := orders("third", "rabbit")
	third.Spec.Queue = "orders"
	s.nextSecond(first)
	s.create(third)
	if s.topology(third); state(third, v1alpha1.ConditionStalled) != "True/Conflict" {
		t.Fatal(describe(third))
	}
	rivals, err := s.deps.rivals(t.Context(), first)
	if err != nil || len(rivals) != 1 || rivals[0].Name != "third" {
		t.Errorf("when the winner goes %v are looked at (%v)", rivals, err)
	}
	s.delete(first)
	s.topology(first)
	if f.count("Delete") != 0 || !s.gone(first) {
		t.Error("queues were deleted that another Topology claims")
	}
	if got := s.notes.take(EventQueuesLeft); len(got) != 1 || !strings.Contains(got[0], s.ns+"/third claims it too") {
		t.Errorf("events: %q", got)
	}
	if s.topology(third); state(third, v1alpha1.ConditionReady) != "True/Ready" {
		t.Errorf("the queue is free, and it says%s", describe(third))
	}
}

// Claims cover derived names: a queue that is named like another one's hold queue.
func TestClaims_DerivedNames(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.connected("rabbit")
	s.nextSecond(s.declared(orders("orders", "rabbit")))
	thief := s.declared(orders("orders-hold-5s", "rabbit"))
	if got := state(thief, v1alpha1.ConditionStalled); got != "True/Conflict" {
		t.Errorf("Stalled: %s%s", got, describe(thief))
	}
}

// Two Broker objects on one server share the claims; on two servers they do not.
func TestClaims_AcrossBrokerObjects(t *testing.T) {
	for name, tc := range map[string]struct {
		ids  [2]string
		want string
	}{"one server": {[2]string{"cluster-a", "cluster-a"}, "False/Conflict"}, "two servers": {[2]string{"cluster-a", "cluster-b"}, "True/Ready"}} {
		t.Run(name, func(t *testing.T) {
			f := newFakeServer("")
			s := step(t, f.driver())
			f.id = tc.ids[0]
			s.connected("a")
			f.id = tc.ids[1]
			s.connected("b")
			first := orders("first", "a")
			first.Spec.Queue = "orders"
			s.declared(first)
			second := orders("second", "b")
			second.Spec.Queue = "orders"
			s.nextSecond(first)
			s.declared(second)
			if got := state(second, v1alpha1.ConditionReady); got != tc.want {
				t.Errorf("Ready is %s, want %s%s", got, tc.want, describe(second))
			}
		})
	}
}

// An external Topology takes part.
func TestClaims_External(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.connected("rabbit")
	first := s.declared(orders("orders", "rabbit"))
	s.nextSecond(first)
	second := orders("reader", "rabbit")
	second.Spec.Queue, second.Spec.External, second.Spec.DeadLetter, second.Spec.HoldQueues = "orders", true, nil, nil
	s.declared(second)
	if got := state(second, v1alpha1.ConditionReady); got != "False/Conflict" {
		t.Errorf("Ready is %s%s", got, describe(second))
	}
}

// A Topology that its Broker refuses blocks nobody's queue.
func TestClaims_TheRefusedClaimNothing(t *testing.T) {
	f := newFakeServer("cluster-a")
	c := connect(t)
	other := kubeenv.Namespace(t, c.cfg)
	s := c.stepper(Options{Drivers: []broker.Driver{f.driver()}, Namespaces: []string{c.ns, other}})
	s.connected("rabbit")
	foreign := orders("orders", "rabbit")
	foreign.Namespace, foreign.Spec.BrokerRef.Namespace, foreign.Spec.Queue = other, s.ns, "orders"
	s.declared(foreign)
	s.nextSecond(foreign)
	own := s.declared(orders("orders", "rabbit"))
	if got := state(own, v1alpha1.ConditionReady); got != "True/Ready" {
		t.Errorf("Ready is %s%s", got, describe(own))
	}
}

// A dead-letter queue may be shared within a namespace; then nobody deletes it. Across namespaces it may not.
func TestClaims_SharedDeadLetter(t *testing.T) {
	f := newFakeServer("cluster-a")
	c := connect(t)
	other := kubeenv.Namespace(t, c.cfg)
	s := c.stepper(Options{Drivers: []broker.Driver{f.driver()}, Namespaces: []string{c.ns, other}})
	b := s.connected("rabbit")
	s.edit(b, func() {
		b.Spec.AllowedNamespaces = &v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesAll, Queues: []v1alpha1.QueuePattern{"*"}}
	})
	s.broker(b)
	sharing := func(name, ns string) *v1alpha1.Topology {
		topo := orders(name, "rabbit")
		topo.Namespace, topo.Spec.BrokerRef.Namespace = ns, s.ns
		topo.Spec.DeadLetter.Queue, topo.Spec.DeletionPolicy = "dead", v1alpha1.DeletionDelete
		return topo
	}
	first, second := s.declared(sharing("first", s.ns)), s.declared(sharing("second", s.ns))
	if state(first, v1alpha1.ConditionReady) != "True/Ready" || state(second, v1alpha1.ConditionReady) != "True/Ready" {
		t.Fatalf("%s%s", describe(first), describe(second))
	}
	s.nextSecond(second)
	if third := s.declared(sharing("third", other)); state(third, v1alpha1.ConditionReady) != "False/Conflict" {
		t.Errorf("another namespace shares it:%s", describe(third))
	}
	s.delete(first)
	s.topology(first)
	if diff := cmp.Diff([]string{"dead", "second", "second-hold-30s", "second-hold-5s"}, f.names()); diff != "" || !s.gone(first) {
		t.Errorf("queues after one of them went (-want +got):\n%s", diff)
	}
	if got := s.notes.take(EventQueuesDeleted); len(got) != 1 || !strings.Contains(got[0], `"dead" (Topology `+s.ns+`/second claims it too)`) {
		t.Errorf("events: %q", got)
	}
}

func TestPrecedes(t *testing.T) {
	at := func(sec int64, uid string) *v1alpha1.Topology {
		return &v1alpha1.Topology{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.Unix(sec, 0), UID: types.UID(uid)}}
	}
	for _, tc := range []struct {
		name string
		a, b *v1alpha1.Topology
		want bool
	}{
		{"older", at(1, "z"), at(2, "a"), true},
		{"younger", at(2, "a"), at(1, "z"), false},
		{"same second, smaller UID", at(1, "a"), at(1, "b"), true},
		{"same second, larger UID", at(1, "b"), at(1, "a"), false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := precedes(tc.a, tc.b); got != tc.want {
				t.Errorf("got %v", got)
			}
		})
	}
}
