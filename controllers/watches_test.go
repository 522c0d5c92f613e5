package controllers

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/shove-dev/shove/api/v1alpha1"
)

// Deletions go before everything else, and what a person changed before what the operator found out by itself.
func TestWatches_DeletionsGoFirst(t *testing.T) {
	q := priorityqueue.New[ctrl.Request]("test")
	t.Cleanup(q.ShutDown)
	topo := func(name string, deleted bool) *v1alpha1.Topology {
		o := &v1alpha1.Topology{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, ResourceVersion: name}}
		if deleted {
			now := metav1.Now()
			o.DeletionTimestamp = &now
		}
		return o
	}
	e := &enqueuer{}
	if err := e.start(t.Context(), q); err != nil {
		t.Fatal(err)
	}
	h := topologyEvents()
	e.addLater(requestFor(topo("drifted", false)).NamespacedName)
	h.Create(context.Background(), event.CreateEvent{Object: topo("after-restart", false), IsInInitialList: true}, q)
	h.Update(context.Background(), event.UpdateEvent{ObjectOld: topo("x", false), ObjectNew: topo("edited", false)}, q)
	h.Update(context.Background(), event.UpdateEvent{ObjectOld: topo("y", false), ObjectNew: topo("doomed", true)}, q)
	h.Create(context.Background(), event.CreateEvent{Object: topo("doomed-long-ago", true), IsInInitialList: true}, q)
	for deadline := time.Now().Add(patience); q.Len() < 5 && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	got := map[string]int{}
	var order []int
	for range 5 {
		r, priority, _ := q.GetWithPriority()
		q.Done(r)
		got[r.Name] = priority
		order = append(order, priority)
	}
	want := map[string]int{"doomed": priorityDeletion, "doomed-long-ago": priorityDeletion, "edited": 0, "drifted": priorityLater, "after-restart": priorityLater}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("priorities (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]int{priorityDeletion, priorityDeletion, 0, priorityLater, priorityLater}, order); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}

func TestWatches_OwnStatusWritesWakeNobody(t *testing.T) {
	old := &v1alpha1.Topology{ObjectMeta: metav1.ObjectMeta{Generation: 1}}
	change := func(c func(*v1alpha1.Topology)) event.UpdateEvent {
		o := old.DeepCopy()
		c(o)
		return event.UpdateEvent{ObjectOld: old, ObjectNew: o}
	}
	now := metav1.Now()
	for name, tc := range map[string]struct {
		e    event.UpdateEvent
		want bool
	}{
		"status":     {change(func(t *v1alpha1.Topology) { t.Status.Queue = "orders" }), false},
		"finalizers": {change(func(t *v1alpha1.Topology) { t.Finalizers = []string{"x"} }), false},
		"spec":       {change(func(t *v1alpha1.Topology) { t.Generation = 2 }), true},
		"deletion":   {change(func(t *v1alpha1.Topology) { t.DeletionTimestamp = &now }), true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := specOrDeletion().Update(tc.e); got != tc.want {
				t.Errorf("got %v", got)
			}
		})
	}
	ready := func(s metav1.ConditionStatus, id string) *v1alpha1.Broker {
		b := &v1alpha1.Broker{}
		b.Status.ServerID = id
		b.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: s}}
		return b
	}
	for name, tc := range map[string]struct {
		from, to *v1alpha1.Broker
		want     bool
	}{
		"nothing that matters": {ready("True", "a"), ready("True", "a"), false},
		"becomes ready":        {ready("False", "a"), ready("True", "a"), true},
		"another server":       {ready("True", "a"), ready("True", "b"), true},
	} {
		t.Run("broker "+name, func(t *testing.T) {
			if got := brokerMatters().Update(event.UpdateEvent{ObjectOld: tc.from, ObjectNew: tc.to}); got != tc.want {
				t.Errorf("got %v", got)
			}
		})
	}
}
