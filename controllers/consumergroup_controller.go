package controllers

import (
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/controllers/render"
)

// groupReconciler says in a ConsumerGroup's status what became of it. It changes nothing else: the workload belongs
// to the injection, which wakes this controller whenever it found something out.
type groupReconciler struct{ *deps }

// +kubebuilder:rbac:groups=shove.dev,resources=consumergroups/status,verbs=get;patch

func setupConsumerGroup(mgr ctrl.Manager, d *deps, _ Options) error {
	return ctrl.NewControllerManagedBy(mgr).
		Named("consumergroup").
		For(&v1alpha1.ConsumerGroup{}, builder.WithPredicates(specOrDeletion())).
		Watches(&v1alpha1.ConsumerGroup{}, handler.EnqueueRequestsFromMapFunc(d.groupsBeside), builder.WithPredicates(specOrDeletion())).
		Watches(&v1alpha1.Topology{}, handler.EnqueueRequestsFromMapFunc(d.groupsOfTopology), builder.WithPredicates(topologyStatusMatters())).
		WatchesRawSource(source.Func(d.groups.start)).
		WithOptions(controller.Options{MaxConcurrentReconciles: 8, RateLimiter: rateLimiter()}).
		Complete(&groupReconciler{d})
}

// topologyStatusMatters passes what a ConsumerGroup repeats of its Topology.
func topologyStatusMatters() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		was, is := e.ObjectOld.(*v1alpha1.Topology), e.ObjectNew.(*v1alpha1.Topology)
		return readyCondition(was) != readyCondition(is) || !equality.Semantic.DeepEqual(was.Status.Counts, is.Status.Counts)
	}}
}

func (d *deps) groupsOfTopology(ctx context.Context, o client.Object) []reconcile.Request {
	groups, err := d.groupsOf(ctx, client.ObjectKeyFromObject(o))
	if err != nil {
		log.FromContext(ctx).Error(err, "Could not look up the ConsumerGroups of a Topology", "topology", client.ObjectKeyFromObject(o))
		return nil
	}
	return requests(groups, func(g *v1alpha1.ConsumerGroup) client.Object { return g })
}

// groupsBeside are the ConsumerGroups that may scale the same workload or Topology.
func (d *deps) groupsBeside(ctx context.Context, o client.Object) []reconcile.Request {
	groups, err := d.rivalGroups(ctx, o.(*v1alpha1.ConsumerGroup))
	if err != nil {
		log.FromContext(ctx).Error(err, "Could not look up ConsumerGroups", "consumerGroup", client.ObjectKeyFromObject(o))
		return nil
	}
	return requests(groups, func(g *v1alpha1.ConsumerGroup) client.Object { return g })
}

func (d *deps) rivalGroups(ctx context.Context, g *v1alpha1.ConsumerGroup) ([]v1alpha1.ConsumerGroup, error) {
	groups, err := d.groupsOf(ctx, client.ObjectKey{Namespace: g.Namespace, Name: g.Spec.TopologyRef.Name})
	if err != nil {
		return nil, err
	}
	var list v1alpha1.ConsumerGroupList
	if err := d.client.List(ctx, &list, client.MatchingFields{indexGroupTarget: render.TargetOf(g).String()}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list consumer groups of %s: %w", render.TargetOf(g), err)
	}
	return append(groups, list.Items...), nil
}

// Reconcile makes one pass.
func (r *groupReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	g := &v1alpha1.ConsumerGroup{}
	if err := r.client.Get(ctx, req.NamespacedName, g); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if err := r.written.latest(ctx, r.live, g); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !g.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, nil // there is nothing to do: the injection goes by what there is
	}
	out := r.outcomes.get(render.TargetOf(g))
	if out == nil {
		return ctrl.Result{}, nil // the injection has not looked yet, and will say when it has
	}
	c := out.group(g)
	if c == nil {
		return ctrl.Result{}, nil
	}
	rivals, err := r.rivalGroups(ctx, g)
	if err != nil {
		return ctrl.Result{}, err
	}
	t, err := r.topologyOf(ctx, g)
	if err != nil {
		return ctrl.Result{}, err
	}
	conds := newConditions(g.Status.Conditions, g.Generation, metav1.NewTime(r.clock.Now()))
	facts := groupFacts{group: g, consumer: c, outcome: out, topology: t, scaling: render.ScalingConflict(g, rivals), timeouts: render.TimeoutsDiffer(c, r.assessed(rivals))}
	status := facts.status(conds)
	return ctrl.Result{}, r.write(ctx, g, &status)
}

// assessed are other ConsumerGroups as they were last assessed, as far as they were.
func (r *groupReconciler) assessed(groups []v1alpha1.ConsumerGroup) []*render.Consumer {
	var all []*render.Consumer
	for i := range groups {
		if out := r.outcomes.get(render.TargetOf(&groups[i])); out != nil {
			if c := out.group(&groups[i]); c != nil {
				all = append(all, c)
			}
		}
	}
	return all
}

// topologyOf is nil where there is none.
func (r *groupReconciler) topologyOf(ctx context.Context, g *v1alpha1.ConsumerGroup) (*v1alpha1.Topology, error) {
	t := &v1alpha1.Topology{}
	if err := r.client.Get(ctx, client.ObjectKey{Namespace: g.Namespace, Name: g.Spec.TopologyRef.Name}, t); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return t, nil
}

// groupWarnings are the conditions whose appearance is an event.
var groupWarnings = []string{
	v1alpha1.ConditionConflict, v1alpha1.ConditionGracePeriodTooShort, v1alpha1.ConditionRestartRequired,
	v1alpha1.ConditionHandlerTimeoutAboveBrokerLimit, v1alpha1.ConditionHandlerTimeoutsDiffer, v1alpha1.ConditionTimeoutAckLosesWork,
}

// write writes the status if it changed, then sends the events.
func (r *groupReconciler) write(ctx context.Context, g *v1alpha1.ConsumerGroup, status *v1alpha1.ConsumerGroupStatus) error {
	old := *g.Status.DeepCopy()
	sorted(old.Conditions)
	if !equality.Semantic.DeepEqual(old, *status) {
		version, err := applyStatus(ctx, r.client, g, FieldOwner, status)
		if err != nil {
			return ignoreGone(err)
		}
		r.written.record(g, version)
		log.FromContext(ctx).V(1).Info("Wrote status")
	}
	notes := transitions(old.Conditions, status.Conditions, groupWarnings)
	if r.clock.Now().Sub(g.CreationTimestamp.Time) < settling {
		notes = slices.DeleteFunc(notes, func(n note) bool { return waits[n.reason] })
	}
	send(r.events, g, notes)
	return nil
}

// settling is how long after its creation a ConsumerGroup may wait for other objects without an event: they are often
// applied together, in any order.
const settling = 30 * time.Second
