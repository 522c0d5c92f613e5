package controllers

import (
	"context"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/controllers/render"
)

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// specOrDeletion passes what changes what is wanted; not what the operator itself wrote into the status.
func specOrDeletion() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		return e.ObjectOld.GetGeneration() != e.ObjectNew.GetGeneration() ||
			e.ObjectOld.GetDeletionTimestamp().IsZero() != e.ObjectNew.GetDeletionTimestamp().IsZero()
	}}
}

// brokerMatters passes what matters to Topologies: whether the Broker can be used, by whom, and which server it is.
func brokerMatters() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		was, is := e.ObjectOld.(*v1alpha1.Broker), e.ObjectNew.(*v1alpha1.Broker)
		return was.Generation != is.Generation || was.DeletionTimestamp.IsZero() != is.DeletionTimestamp.IsZero() ||
			was.Status.ServerID != is.Status.ServerID || readiness(was) != readiness(is)
	}}
}

// readyCondition is Ready without its times, to compare.
func readyCondition(o v1alpha1.ConditionedObject) string {
	if c := meta.FindStatusCondition(o.GetConditions(), v1alpha1.ConditionReady); c != nil {
		return string(c.Status) + " " + c.Reason
	}
	return ""
}

func readiness(o v1alpha1.ConditionedObject) string {
	if c := meta.FindStatusCondition(o.GetConditions(), v1alpha1.ConditionReady); c != nil {
		return string(c.Status)
	}
	return ""
}

// topologyEvents looks at deletions first, so that nothing that is wrong with a broker starves them.
func topologyEvents() handler.EventHandler {
	add := func(o client.Object, q queue) {
		if !o.GetDeletionTimestamp().IsZero() {
			addWithPriority(q, client.ObjectKeyFromObject(o), priorityDeletion)
			return
		}
		q.Add(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(o)})
	}
	return handler.Funcs{
		CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) { add(e.Object, q) },
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) { add(e.ObjectNew, q) },
		DeleteFunc: func(_ context.Context, e event.DeleteEvent, q queue) { add(e.Object, q) },
	}
}

// rivalEvents looks again at Topologies that share a queue name with one that came, changed or went.
func (d *deps) rivalEvents() handler.EventHandler {
	add := func(ctx context.Context, o client.Object, q queue) {
		keys, err := d.rivals(ctx, o.(*v1alpha1.Topology))
		if err != nil {
			log.FromContext(ctx).Error(err, "Could not look up rivals", "topology", client.ObjectKeyFromObject(o))
			return
		}
		for _, k := range keys {
			q.Add(reconcile.Request{NamespacedName: k})
		}
	}
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, q queue) {
			if !e.IsInInitialList { // then everything is looked at in any case
				add(ctx, e.Object, q)
			}
		},
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) {
			was, is := e.ObjectOld.(*v1alpha1.Topology), e.ObjectNew.(*v1alpha1.Topology)
			if was.Generation != is.Generation || was.DeletionTimestamp.IsZero() != is.DeletionTimestamp.IsZero() || serverOf(was) != serverOf(is) {
				add(ctx, is, q)
			}
		},
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) { add(ctx, e.Object, q) },
	}
}

func serverOf(t *v1alpha1.Topology) string {
	if t.Status.Declared == nil {
		return ""
	}
	return t.Status.Declared.ServerID
}

// dependentEvents looks at a Broker when its first Topology comes, and when one goes that it waits for. The number in
// its status follows at its own pace.
func (d *deps) dependentEvents() handler.EventHandler {
	add := func(ctx context.Context, o client.Object, q queue, when func(*v1alpha1.Broker) bool) {
		key := render.BrokerKey(o.(*v1alpha1.Topology))
		if b, err := d.getBroker(ctx, key); err == nil && b != nil && when(b) {
			addWithPriority(q, key, priorityLater)
		}
	}
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, q queue) {
			add(ctx, e.Object, q, func(b *v1alpha1.Broker) bool { return !controllerutil.ContainsFinalizer(b, v1alpha1.FinalizerBroker) })
		},
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) {
			add(ctx, e.Object, q, func(b *v1alpha1.Broker) bool { return !b.DeletionTimestamp.IsZero() })
		},
	}
}

// brokersOfSecret are the Brokers whose connection needs a Secret.
func (d *deps) brokersOfSecret(ctx context.Context, o client.Object) []reconcile.Request {
	var list v1alpha1.BrokerList
	key := client.ObjectKeyFromObject(o).String()
	if err := d.client.List(ctx, &list, client.MatchingFields{indexBrokerSecret: key}, client.UnsafeDisableDeepCopy); err != nil {
		log.FromContext(ctx).Error(err, "Could not look up the Brokers of a Secret", "secret", key)
		return nil
	}
	return requests(list.Items, func(b *v1alpha1.Broker) client.Object { return b })
}

func (d *deps) topologiesOfBroker(ctx context.Context, o client.Object) []reconcile.Request {
	topologies, err := d.dependents(ctx, client.ObjectKeyFromObject(o))
	if err != nil {
		log.FromContext(ctx).Error(err, "Could not look up the Topologies of a Broker", "broker", client.ObjectKeyFromObject(o))
		return nil
	}
	return requests(topologies, func(t *v1alpha1.Topology) client.Object { return t })
}

// topologyOfGroup is the Topology of a ConsumerGroup where it waits for one: to be deleted, or to delete a retired
// queue.
func (d *deps) topologyOfGroup(ctx context.Context, o client.Object) []reconcile.Request {
	key := types.NamespacedName{Namespace: o.GetNamespace(), Name: o.(*v1alpha1.ConsumerGroup).Spec.TopologyRef.Name}
	t := &v1alpha1.Topology{}
	if err := d.client.Get(ctx, key, t); err != nil {
		return nil // gone, or looked at again when it waits for something
	}
	if t.DeletionTimestamp.IsZero() && len(retiredIn(t.Status.Queues)) == 0 {
		return nil
	}
	return []reconcile.Request{{NamespacedName: key}}
}

func requests[T any](items []T, object func(*T) client.Object) []reconcile.Request {
	out := make([]reconcile.Request, len(items))
	for i := range items {
		out[i].NamespacedName = client.ObjectKeyFromObject(object(&items[i]))
	}
	return out
}

// delivered says whether every pod of a ConsumerGroup reports a configuration made from the present generation of
// its Topology; else what is waited for.
func (d *deps) delivered(g *v1alpha1.ConsumerGroup, t *v1alpha1.Topology) string {
	c := meta.FindStatusCondition(g.Status.Conditions, v1alpha1.ConditionConfigDelivered)
	switch {
	case c == nil:
		return "ConsumerGroup " + g.Name + " has not rendered its configuration yet"
	case c.Status == metav1.ConditionUnknown:
		return "the pods of ConsumerGroup " + g.Name + " do not report their configuration"
	case c.Status != metav1.ConditionTrue, g.Status.TopologyGeneration != t.Generation:
		return "not all pods of ConsumerGroup " + g.Name + " report the new configuration"
	}
	return ""
}
