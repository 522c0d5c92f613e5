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
)

func withPolicy(name string, p v1alpha1.DeletionPolicy) *v1alpha1.Topology {
	t := orders(name, "rabbit")
	t.Spec.DeletionPolicy = p
	return t
}

// A GitOps prune removes the object: messages are kept, because Retain is the default, and nothing holds the object
// up for a moment.
func TestCase23_RetainIsTheDefault(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	b := s.connected("rabbit")
	topo := s.declared(orders("orders", "rabbit"))
	if topo.Spec.DeletionPolicy != v1alpha1.DeletionRetain || len(topo.Finalizers) != 0 {
		t.Fatalf("policy %s, finalizers %v", topo.Spec.DeletionPolicy, topo.Finalizers)
	}
	f.change(func() { f.queues["orders"].ready = 4 })
	s.delete(topo)
	if !s.gone(topo) {
		t.Fatal("it is not gone at once")
	}
	s.topology(topo)
	if len(f.names()) != 4 || f.queues["orders"].ready != 4 || f.count("Delete") != 0 {
		t.Errorf("queues: %v", f.names())
	}
	if got := s.deps.pool.entry(b.UID).observer.sample(requestFor(topo).NamespacedName); got != nil {
		t.Error("it is still looked after")
	}
}

func TestDeletion_FinalizerFollowsThePolicy(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.connected("rabbit")
	topo := s.declared(orders("orders", "rabbit"))
	for _, p := range []v1alpha1.DeletionPolicy{v1alpha1.DeletionDelete, v1alpha1.DeletionDeleteIfEmpty, v1alpha1.DeletionRetain} {
		s.edit(topo, func() { topo.Spec.DeletionPolicy = p })
		s.topology(topo)
		if got := len(topo.Finalizers) > 0; got != (p != v1alpha1.DeletionRetain) {
			t.Errorf("policy %s, finalizers %v", p, topo.Finalizers)
		}
	}
}

func TestDeletion_DeleteSaysHowMuch(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.connected("rabbit")
	topo := s.declared(withPolicy("orders", v1alpha1.DeletionDelete))
	f.change(func() { f.queues["orders"].ready, f.queues["orders-dlq"].ready, f.written = 4, 3, nil })
	s.delete(topo)
	s.topology(topo)
	if !s.gone(topo) {
		t.Fatalf("it is not gone%s", describe(topo))
	}
	want := []string{"delete orders-hold-30s", "delete orders-hold-5s", "delete orders", "delete orders-dlq"}
	if diff := cmp.Diff(want, f.written); diff != "" {
		t.Errorf("holds go before their targets (-want +got):\n%s", diff)
	}
	if got := s.notes.take(EventQueuesDeleted); len(got) != 1 || !strings.Contains(got[0], `deleted "orders-hold-30s", "orders-hold-5s", "orders", "orders-dlq", with 7 messages in them`) {
		t.Errorf("events: %q", got)
	}
}

func TestDeletion_DeleteIfEmptyNeedsProof(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.connected("rabbit")
	topo := s.declared(withPolicy("orders", v1alpha1.DeletionDeleteIfEmpty))
	group := &v1alpha1.ConsumerGroup{ObjectMeta: metav1.ObjectMeta{Name: "worker"}}
	group.Spec.TopologyRef.Name = "orders"
	s.create(group)
	s.sync(group)
	f.change(func() { f.queues["orders-hold-5s"].stuck = 1 })
	s.delete(topo)
	waiting := func(what string) {
		t.Helper()
		after := s.topology(topo)
		if s.gone(topo) || f.count("Delete") != 0 {
			t.Fatalf("it is gone while %s", what)
		}
		message := condition(topo, v1alpha1.ConditionReady).Message
		if got := state(topo, v1alpha1.ConditionReady); got != "False/Deleting" || !strings.Contains(message, what) {
			t.Errorf("Ready is %s, message %q, want one with %q", got, message, what)
		}
		if after <= 0 || after > deletionBound {
			t.Errorf("looked at again in %s", after)
		}
	}
	waiting(`ConsumerGroup "worker" refers to this Topology`)
	s.delete(group)
	s.sync(group)
	waiting(`queue "orders-hold-5s" is not empty`) // stuck ones count
	f.change(func() { f.queues["orders-hold-5s"].stuck, f.queues["orders"].inFlight = 0, 1 })
	waiting(`queue "orders" is not empty`)
	f.change(func() { f.queues["orders"].inFlight = 0 })
	waiting("for 15 s")
	s.clock.Step(proofTime - time.Second)
	waiting("for 15 s")
	f.change(func() { f.queues["orders-dlq"].ready = 1 })
	waiting(`queue "orders-dlq" is not empty`)
	f.change(func() { f.queues["orders-dlq"].ready = 0 })
	s.clock.Step(2 * time.Second)
	waiting("for 15 s") // a message in between begins it anew
	s.clock.Step(proofTime)
	s.topology(topo)
	if !s.gone(topo) || len(f.names()) != 0 {
		t.Errorf("proven empty for 15 s, and yet: gone %v, queues %v", s.gone(topo), f.names())
	}
	if got := s.notes.take(EventQueuesDeleted); len(got) != 1 || !strings.Contains(got[0], "0 messages") {
		t.Errorf("events: %q", got)
	}
}

func TestDeletion_DeleteIfEmptyGivesUp(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*fakeServer)
		says   string
	}{
		"messages": {func(f *fakeServer) { f.queues["orders"].ready = 2 }, `queue "orders" is not empty`},
		"blind":    {func(f *fakeServer) { f.blind = true }, "does not show whether queue"},
		"down":     {func(f *fakeServer) { f.fail["*"] = broker.ErrUnavailable }, "the queues cannot be counted"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFakeServer("cluster-a")
			s := step(t, f.driver())
			s.connected("rabbit")
			topo := s.declared(withPolicy("orders", v1alpha1.DeletionDeleteIfEmpty))
			f.change(func() { tc.change(f) })
			s.delete(topo)
			s.topology(topo)
			if s.gone(topo) || !strings.Contains(condition(topo, v1alpha1.ConditionReady).Message, tc.says) {
				t.Fatalf("gone %v%s", s.gone(topo), describe(topo))
			}
			s.clock.Step(deletionBound + time.Second)
			s.topology(topo)
			if !s.gone(topo) || f.count("Delete") != 0 {
				t.Fatalf("after two minutes: gone %v, %d deletions", s.gone(topo), f.count("Delete"))
			}
			got := s.notes.take(EventQueuesLeft)
			if len(got) != 1 || !strings.Contains(got[0], `"orders"`) || !strings.Contains(got[0], `"orders-dlq"`) || !strings.Contains(got[0], "Broker "+s.ns+"/rabbit") {
				t.Errorf("events: %q", got)
			}
		})
	}
}

// Broker, Secret or server go before the object: the deletion ends within a bounded time, and an event says what was
// left behind.
func TestCase20_DeletionAlwaysEnds(t *testing.T) {
	for name, tc := range map[string]struct {
		before func(*stepper, *fakeServer, *v1alpha1.Broker)
		atOnce bool
		left   string // "": everything is deleted
	}{
		"server down": {before: func(s *stepper, f *fakeServer, b *v1alpha1.Broker) {
			f.breaks("*", broker.ErrUnavailable)
			s.broker(b)
		}, left: "the broker is not reachable"},
		"rights lost": {before: func(_ *stepper, f *fakeServer, _ *v1alpha1.Broker) {
			f.breaks("Delete", fmt.Errorf("configure: %w", broker.ErrUnauthorized))
		}, left: "not authorized"},
		"Secret gone, connection up": {before: func(s *stepper, _ *fakeServer, b *v1alpha1.Broker) {
			s.delete(secretOf(s, "rabbit-admin"))
			s.broker(b)
		}, atOnce: true},
		"Broker object gone": {before: func(s *stepper, _ *fakeServer, b *v1alpha1.Broker) {
			s.edit(b, func() { b.Finalizers = nil })
			s.delete(b)
			s.broker(b)
			s.sync(b)
		}, atOnce: true, left: "its Broker is gone"},
		"Broker being deleted": {before: func(s *stepper, _ *fakeServer, b *v1alpha1.Broker) {
			s.broker(b)
			s.delete(b)
			s.broker(b)
		}, atOnce: true},
		"another server behind the Broker": {before: func(s *stepper, f *fakeServer, b *v1alpha1.Broker) {
			f.change(func() { f.id = "cluster-z" })
			s.broker(b)
		}, atOnce: true, left: "connected to another server"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFakeServer("cluster-a")
			s := step(t, f.driver())
			b := s.connected("rabbit")
			topo := s.declared(withPolicy("orders", v1alpha1.DeletionDelete))
			s.broker(b)
			tc.before(s, f, b)
			s.delete(topo)
			after := s.topology(topo)
			if tc.atOnce != s.gone(topo) {
				t.Fatalf("gone at once: %v%s", s.gone(topo), describe(topo))
			}
			if !tc.atOnce {
				if after <= 0 || after > deletionBound {
					t.Errorf("looked at again in %s", after)
				}
				s.clock.Step(deletionBound + time.Second)
				s.topology(topo)
			}
			if !s.gone(topo) {
				t.Fatalf("not gone after two minutes%s", describe(topo))
			}
			if tc.left == "" {
				if len(f.names()) != 0 {
					t.Errorf("left: %v", f.names())
				}
				return
			}
			if got := s.notes.take(EventQueuesLeft); len(got) != 1 || !strings.Contains(got[0], tc.left) || !strings.Contains(got[0], `"orders-hold-5s"`) {
				t.Errorf("events: %q", got)
			}
			if !slices.Contains(f.names(), "orders") {
				t.Error("the queue is gone all the same")
			}
		})
	}
}

// What never was declared is gone at once, without a broker.
func TestDeletion_NothingDeclared(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	topo := s.declared(withPolicy("orders", v1alpha1.DeletionDelete))
	s.delete(topo)
	s.topology(topo)
	if !s.gone(topo) || s.notes.take(EventQueuesLeft) != nil {
		t.Error("it is not gone, or left something behind")
	}
}

// The operator was down for longer than the bound: the deletion is tried all the same.
func TestDeletion_AfterTheOperatorWasDown(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	b := s.connected("rabbit")
	topo := s.declared(withPolicy("orders", v1alpha1.DeletionDelete))
	s.delete(topo)
	after := s.stepper(Options{Drivers: []broker.Driver{f.driver()}, Namespaces: []string{s.ns}})
	after.clock.Step(time.Hour)
	after.deps.started = after.clock.Now()
	if after.topology(topo); after.gone(topo) {
		t.Fatal("the queues were given up before the connection was made")
	}
	after.broker(b)
	after.topology(topo)
	if !after.gone(topo) || len(f.names()) != 0 {
		t.Errorf("gone %v, queues %v", after.gone(topo), f.names())
	}
}

// A queue is recorded before it is declared, so that a deletion right after a crash knows it.
func TestDeletion_NamesAreRecordedFirst(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.connected("rabbit")
	topo := withPolicy("orders", v1alpha1.DeletionDelete)
	s.create(topo)
	f.breaks("Declare", fmt.Errorf("crash"))
	s.topology(topo)
	if topo.Status.Declared == nil || len(topo.Status.Queues) != 4 {
		t.Errorf("recorded: %+v", topo.Status.Queues)
	}
}
