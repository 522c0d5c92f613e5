package controllers

import (
	"context"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/controllers/render"
)

// publishersOwner owns the part of a Topology's status that is about its publishers; the rest is its controller's.
const publishersOwner = FieldOwner + "-publishers"

// publisherReconciler says in a Topology's status what became of the injection into its publishers.
type publisherReconciler struct{ *deps }

func setupPublishers(mgr ctrl.Manager, d *deps, _ Options) error {
	return ctrl.NewControllerManagedBy(mgr).
		Named("publishers").
		For(&v1alpha1.Topology{}, builder.WithPredicates(specOrDeletion())).
		WatchesRawSource(source.Func(d.publishers.start)).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4, RateLimiter: rateLimiter()}).
		Complete(&publisherReconciler{d})
}

// Reconcile makes one pass.
func (r *publisherReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	t := &v1alpha1.Topology{}
	if err := r.client.Get(ctx, req.NamespacedName, t); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	had := meta.FindStatusCondition(t.Status.Conditions, v1alpha1.ConditionInjected)
	if len(t.Spec.Publishers) == 0 && had == nil && len(t.Status.InjectedPublishers) == 0 || !t.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, nil
	}
	if err := r.written.latest(ctx, r.live, t); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	had = meta.FindStatusCondition(t.Status.Conditions, v1alpha1.ConditionInjected)
	conds := newConditions(t.Status.Conditions, t.Generation, metav1.NewTime(r.clock.Now()))
	injected, complete := r.publishersOf(t, conds)
	if !complete {
		return ctrl.Result{}, nil // the injection has not looked at all of them, and will say when it has
	}
	now := conds.get(v1alpha1.ConditionInjected)
	if equality.Semantic.DeepEqual(had, now) && equality.Semantic.DeepEqual(byName(t.Status.InjectedPublishers), injected) {
		return ctrl.Result{}, nil
	}
	status := struct {
		Conditions         []metav1.Condition           `json:"conditions,omitempty"`
		InjectedPublishers []v1alpha1.WorkloadReference `json:"injectedPublishers,omitempty"`
	}{conds.list, injected}
	version, err := applyStatus(ctx, r.client, t, publishersOwner, &status)
	if err != nil {
		return ctrl.Result{}, ignoreGone(err)
	}
	r.written.record(t, version)
	if now != nil && now.Status == metaFalse && (had == nil || had.Reason != now.Reason) && !waits[now.Reason] {
		send(r.events, t, []note{warning(now.Reason, actionReconcile, now.Message)})
	}
	return ctrl.Result{}, nil
}

// publishersOf sets the condition from the outcome of every publisher, the first problem by name winning, and lists
// those that are injected.
func (r *publisherReconciler) publishersOf(t *v1alpha1.Topology, conds *conditions) (injected []v1alpha1.WorkloadReference, complete bool) {
	if len(t.Spec.Publishers) == 0 {
		return nil, true
	}
	worst := finding{metaTrue, v1alpha1.ReasonInjected, "the pod templates of all publishers carry the configuration"}
	for _, ref := range byName(t.Spec.Publishers) {
		out := r.outcomes.get(render.PublisherTarget(t, ref))
		if out == nil {
			return nil, false
		}
		p := out.publisher(t)
		if p == nil {
			return nil, false
		}
		f := out.injection
		for _, n := range p.Findings {
			f = finding{metaFalse, n.Reason, n.Message}
			if n.Blocks {
				break
			}
		}
		if f.status == metaTrue {
			injected = append(injected, ref)
			continue
		}
		if worst.status == metaTrue {
			worst = f
		}
	}
	if worst.status == "" {
		worst = finding{metaUnknown, v1alpha1.ReasonProgressing, "the injection has not been tried yet"}
	}
	conds.set(v1alpha1.ConditionInjected, worst.status, worst.reason, worst.message)
	return injected, true
}

func byName(refs []v1alpha1.WorkloadReference) []v1alpha1.WorkloadReference {
	out := slices.Clone(refs)
	slices.SortFunc(out, func(a, b v1alpha1.WorkloadReference) int {
		return slices.Compare([]string{string(a.Kind), a.Name}, []string{string(b.Kind), b.Name})
	})
	return out
}
