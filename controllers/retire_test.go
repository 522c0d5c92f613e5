package controllers

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
)

// retiring is a Topology whose tier of 5 s left the spec.
func retiring(s *stepper) *v1alpha1.Topology {
	s.t.Helper()
	topo := s.declared(orders("orders", "rabbit"))
	s.notes.take(v1alpha1.ReasonReady)
	s.edit(topo, func() { topo.Spec.HoldQueues = holds(10*time.Second, 30*time.Second) })
	return topo
}

func TestRetire_DeletedWhenProvenEmpty(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.connected("rabbit")
	topo := retiring(s)
	after := s.topology(topo)
	want := []string{"orders Main", "orders-dlq DeadLetter", "orders-hold-10s Hold", "orders-hold-30s Hold", "orders-hold-5s Retired"}
	if diff := cmp.Diff(want, roles(topo)); diff != "" {
		t.Errorf("queues in the status (-want +got):\n%s", diff)
	}
	for _, q := range topo.Status.Queues {
		if q.Role == v1alpha1.QueueRoleRetired && (q.RetiredGeneration == nil || *q.RetiredGeneration != topo.Generation || q.RetiredAt == nil || q.Delay == nil || q.Delay.Duration != 5*time.Second) {
			t.Errorf("the retired queue says %+v", q)
		}
	}
	if got := state(topo, v1alpha1.ConditionReady); got != "True/Ready" {
		t.Errorf("Ready is %s", got)
	}
	if got := condition(topo, v1alpha1.ConditionRetiredQueues); !strings.Contains(got.Message, `"orders-hold-5s" (empty`) {
		t.Errorf("RetiredQueues: %+v", got)
	}
	if got := s.notes.take(EventTierRetired); len(got) != 1 {
		t.Errorf("events: %q", got)
	}
	if after <= 0 || after > 2*proofPoll {
		t.Errorf("the proof is collected in steps of %s", after)
	}
	s.clock.Step(5*time.Second + proofTime - time.Second)
	if s.topology(topo); !slices.Contains(f.names(), "orders-hold-5s") {
		t.Fatal("deleted before its delay and 15 s")
	}
	f.change(func() { f.queues["orders-hold-5s"].ready = 1 })
	s.clock.Step(2 * time.Second)
	s.topology(topo)
	if got := condition(topo, v1alpha1.ConditionRetiredQueues); !strings.Contains(got.Message, "(it holds messages)") {
		t.Errorf("RetiredQueues: %+v", got)
	}
	f.change(func() { f.queues["orders-hold-5s"].ready = 0 })
	s.topology(topo)
	s.clock.Step(5*time.Second + proofTime)
	s.topology(topo)
	if slices.Contains(f.names(), "orders-hold-5s") || state(topo, v1alpha1.ConditionRetiredQueues) != "" {
		t.Errorf("proven empty, and yet: %v%s", f.names(), describe(topo))
	}
	if got := s.notes.take(EventTierDeleted); len(got) != 1 {
		t.Errorf("events: %q", got)
	}
	if diff := cmp.Diff([]string{"orders Main", "orders-dlq DeadLetter", "orders-hold-10s Hold", "orders-hold-30s Hold"}, roles(topo)); diff != "" {
		t.Errorf("queues in the status (-want +got):\n%s", diff)
	}
}

func TestRetire_WaitsForEveryPod(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.connected("rabbit")
	group := &v1alpha1.ConsumerGroup{ObjectMeta: metav1.ObjectMeta{Name: "worker"}}
	group.Spec.TopologyRef.Name = "orders"
	s.create(group)
	s.sync(group)
	topo := retiring(s)
	pods := func(status metav1.ConditionStatus, reason string, generation int64) {
		t.Helper()
		s.get(group)
		meta.SetStatusCondition(&group.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionConfigDelivered, Status: status, Reason: reason, Message: "of a test"})
		group.Status.TopologyGeneration = generation
		if err := s.client.Status().Update(t.Context(), group); err != nil {
			t.Fatal(err)
		}
		s.sync(group)
	}
	kept := func(why string) {
		t.Helper()
		s.topology(topo)
		s.clock.Step(time.Hour)
		s.topology(topo)
		if !slices.Contains(f.names(), "orders-hold-5s") {
			t.Fatalf("deleted while %s", why)
		}
		if got := condition(topo, v1alpha1.ConditionRetiredQueues); !strings.Contains(got.Message, why) {
			t.Errorf("message %q, want one with %q", got.Message, why)
		}
	}
	kept("has not rendered its configuration yet")
	pods(metav1.ConditionUnknown, v1alpha1.ReasonNotReported, topo.Generation)
	kept("do not report their configuration")
	pods(metav1.ConditionFalse, v1alpha1.ReasonWaitingForPods, topo.Generation)
	kept("not all pods")
	pods(metav1.ConditionTrue, v1alpha1.ReasonDelivered, topo.Generation-1)
	kept("not all pods")
	pods(metav1.ConditionTrue, v1alpha1.ReasonDelivered, topo.Generation)
	if got := s.deps.topologyOfGroup(t.Context(), group); len(got) != 1 {
		t.Errorf("the group leads to %v", got)
	}
	s.topology(topo)
	if !slices.Contains(f.names(), "orders-hold-5s") {
		t.Fatal("deleted before it was seen empty with every pod on the new generation")
	}
	s.clock.Step(5*time.Second + proofTime)
	if s.topology(topo); slices.Contains(f.names(), "orders-hold-5s") {
		t.Errorf("not deleted%s", describe(topo))
	}
}

func TestRetire_WithoutProofItStays(t *testing.T) {
	f := newFakeServer("cluster-a")
	f.blind = true
	s := step(t, f.driver())
	s.connected("rabbit")
	topo := retiring(s)
	for range 3 {
		s.topology(topo)
		s.clock.Step(time.Hour)
	}
	if !slices.Contains(f.names(), "orders-hold-5s") {
		t.Fatal("deleted without proof")
	}
	if got := condition(topo, v1alpha1.ConditionRetiredQueues); !strings.Contains(got.Message, "does not show whether it is empty") {
		t.Errorf("RetiredQueues: %+v", got)
	}
	writes := s.writes.count()
	s.topology(topo)
	if s.writes.count() != writes {
		t.Error("waiting for proof writes")
	}
}

// A tier that comes back is a tier again; one that somebody deleted by hand is forgotten.
func TestRetire_ComesBackOrGoes(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.connected("rabbit")
	topo := retiring(s)
	s.topology(topo)
	s.edit(topo, func() { topo.Spec.HoldQueues = holds(5*time.Second, 30*time.Second) })
	s.topology(topo)
	if got := roles(topo); !slices.Contains(got, "orders-hold-5s Hold") || !slices.Contains(got, "orders-hold-10s Retired") {
		t.Fatalf("queues: %v", got)
	}
	f.change(func() { delete(f.queues, "orders-hold-10s") })
	s.topology(topo)
	if got := roles(topo); slices.Contains(got, "orders-hold-10s Retired") || slices.Contains(f.names(), "orders-hold-10s") {
		t.Errorf("queues: %v, on the broker %v", got, f.names())
	}
}

func TestRetire_Paused(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.connected("rabbit")
	topo := retiring(s)
	s.topology(topo)
	s.edit(topo, func() { topo.Spec.Paused = true })
	s.topology(topo)
	s.clock.Step(time.Hour)
	s.topology(topo)
	if !slices.Contains(f.names(), "orders-hold-5s") {
		t.Error("deleted while paused")
	}
	if got := condition(topo, v1alpha1.ConditionRetiredQueues); !strings.Contains(got.Message, "spec.paused") {
		t.Errorf("RetiredQueues: %+v", got)
	}
}

func TestEmpty_UnknownIsNotZero(t *testing.T) {
	zero, one, unknown := broker.Known(0), broker.Known(1), broker.Count{}
	for name, tc := range map[string]struct {
		d    broker.Depth
		want bool
	}{
		"missing":         {broker.Depth{Missing: true}, true},
		"zero":            {broker.Depth{Ready: zero, InFlight: zero, Stuck: zero}, true},
		"ready":           {broker.Depth{Ready: one, InFlight: zero, Stuck: zero}, false},
		"in flight":       {broker.Depth{Ready: zero, InFlight: one, Stuck: zero}, false},
		"stuck":           {broker.Depth{Ready: zero, InFlight: zero, Stuck: one}, false},
		"unknown ready":   {broker.Depth{Ready: unknown, InFlight: zero, Stuck: zero}, false},
		"unknown flight":  {broker.Depth{Ready: zero, InFlight: unknown, Stuck: zero}, false},
		"unknown stuck":   {broker.Depth{Ready: zero, InFlight: zero, Stuck: unknown}, false},
		"nothing is told": {broker.Depth{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := empty(tc.d); got != tc.want {
				t.Errorf("got %v", got)
			}
		})
	}
}
