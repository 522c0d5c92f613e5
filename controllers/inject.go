package controllers

import (
	"context"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/runtime/config"
)

// injectReconciler brings configuration to one workload, or to a ConsumerGroup without one. Its unit is the workload,
// not the ConsumerGroup: several of them share one file, one volume and one server-side apply, and a pass computes
// all of it from everything that there is. That also takes an injection back when its last reason is gone, without a
// finalizer on anybody's object.
//
// It writes no status. What it found is kept in outcomes, from which the ConsumerGroup's controller and the one of
// publishers make theirs.
type injectReconciler struct {
	*deps
	agentImage string
	report     podReporter
}

// +kubebuilder:rbac:groups=shove.dev,resources=consumergroups,verbs=get;list;watch
// +kubebuilder:rbac:groups=apps,resources=deployments;statefulsets,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups="",resources=pods,verbs=list;patch
// +kubebuilder:rbac:groups="",resources=configmaps,verbs=get;create;update;delete
// +kubebuilder:rbac:groups="",resources=secrets,verbs=get;list;watch;create;update;delete

// injectResync is when a target is looked at again though nothing happened: somebody may have deleted its ConfigMap.
const injectResync = 10 * time.Minute

func setupInject(mgr ctrl.Manager, d *deps, o Options) error {
	r := &injectReconciler{deps: d, agentImage: o.AgentImage, report: o.PodReporter}
	return builder.TypedControllerManagedBy[render.Target](mgr).
		Named("inject").
		Watches(&v1alpha1.ConsumerGroup{}, targetEvents(groupTargets), builder.WithPredicates(specOrDeletion())).
		Watches(&v1alpha1.Topology{}, targetEvents(d.topologyTargets), builder.WithPredicates(topologyMatters())).
		Watches(&v1alpha1.Broker{}, targetEvents(d.brokerTargets), builder.WithPredicates(specOrDeletion())).
		WatchesMetadata(&corev1.Secret{}, targetEvents(d.secretTargets)).
		WatchesMetadata(&appsv1.Deployment{}, targetEvents(d.workloadTargets(v1alpha1.WorkloadDeployment))).
		WatchesMetadata(&appsv1.StatefulSet{}, targetEvents(d.workloadTargets(v1alpha1.WorkloadStatefulSet))).
		WithOptions(controller.TypedOptions[render.Target]{MaxConcurrentReconciles: 8,
			RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[render.Target](100*time.Millisecond, time.Minute)}).
		Complete(r)
}

// injectScope is one pass over a target.
type injectScope struct {
	target   render.Target
	workload *workload // nil for a target that is only rendered
	plan     *render.Plan
	out      *outcome

	config *config.RuntimeConfig
	// token changes whenever pods should look at their files.
	token   string
	changed time.Time
	restart restartState
	secrets map[string][]byte
	after   time.Duration
}

func (s *injectScope) within(d time.Duration) {
	if s.after == 0 || d < s.after {
		s.after = d
	}
}

// Reconcile makes one pass.
func (r *injectReconciler) Reconcile(ctx context.Context, t render.Target) (ctrl.Result, error) {
	m, err := r.membersOf(ctx, t)
	if err != nil {
		return ctrl.Result{}, err
	}
	s := &injectScope{target: t, out: newOutcome(m)}
	if !t.Rendered() {
		if m.none() && !r.mayCarry(ctx, t) {
			r.forgetTarget(t)
			return ctrl.Result{}, nil
		}
		if s.workload, err = r.getWorkload(ctx, t); err != nil {
			return ctrl.Result{}, err
		}
	}
	if m.none() {
		r.forgetTarget(t)
		return ctrl.Result{}, r.takeBack(ctx, s)
	}
	s.within(jitter(injectResync))
	if err := r.serve(ctx, s, m); err != nil {
		return ctrl.Result{}, err
	}
	r.outcomes.put(t, s.out)
	r.wakeMembers(ctx, m)
	return ctrl.Result{RequeueAfter: s.after}, nil
}

// serve renders and injects for the members that can be served, and finds out what keeps the others.
func (r *injectReconciler) serve(ctx context.Context, s *injectScope, m *membersFound) error {
	switch {
	case s.target.Rendered():
	case s.workload == nil:
		s.out.injected(metaFalse, v1alpha1.ReasonWorkloadNotFound, fmt.Sprintf("%s does not exist: create it, or correct the reference", s.target))
		return nil
	case !s.workload.optedIn():
		s.out.injected(metaFalse, v1alpha1.ReasonInjectionNotAllowed,
			fmt.Sprintf("%s does not allow injection: set the annotation %s: \"true\" on it", s.target, v1alpha1.AnnotationInject))
		return r.takeBack(ctx, s)
	}
	var containers []string
	if s.workload != nil {
		s.out.scale(s.workload)
		containers = s.workload.containers()
	}
	existing, err := r.renderedSecret(ctx, s.target)
	if err != nil {
		return err
	}
	s.plan = render.NewPlan(s.target, containers, m.consumers, m.publishers)
	facts, err := r.gather(ctx, s, existing)
	if err != nil {
		return err
	}
	if s.config, err = render.Config(s.plan, func(c render.Connection) render.Facts { return facts[c.Name] }); err != nil {
		s.out.injected(metaFalse, v1alpha1.ReasonInvalidSpec, plain(err))
		return nil
	}
	if ok, err := r.writeObjects(ctx, s, existing); err != nil || !ok {
		return err
	}
	s.out.served(s.plan, s.config.Generation)
	if s.target.Rendered() {
		s.out.injected(metaTrue, v1alpha1.ReasonRenderedOnly, fmt.Sprintf("ConfigMap and Secret %q are rendered; mount them at %s", s.target.ObjectName(), render.MountPath))
		s.out.delivered(metaUnknown, v1alpha1.ReasonNotReported, "there is no workloadRef, so nobody is asked")
		return nil
	}
	if ok, err := r.inject(ctx, s); err != nil || !ok {
		return err
	}
	return r.bringToPods(ctx, s)
}

// mayCarry says whether a workload without members may carry an injection that has to be taken back: by its metadata
// in the cache, so that other people's workloads cost nothing.
func (r *injectReconciler) mayCarry(ctx context.Context, t render.Target) bool {
	w := metadataOf(t)
	if err := r.client.Get(ctx, types.NamespacedName{Namespace: t.Namespace, Name: t.Name}, w); err != nil {
		return false // gone with everything in it, or asked again at its next event
	}
	_, injected := w.GetAnnotations()[render.AnnotationInjected]
	return injected
}

func (r *injectReconciler) forgetTarget(t render.Target) {
	if old := r.outcomes.drop(t); old != nil {
		for _, k := range old.topologyKeys() {
			r.publishers.addNow(k)
		}
	}
}

func (r *injectReconciler) wakeMembers(ctx context.Context, m *membersFound) {
	for _, c := range m.consumers {
		r.groups.addNow(client.ObjectKeyFromObject(c.Group))
		if c.Driver.Capabilities == nil || !c.Driver.Capabilities(c.Declaration.Options).TimeoutLeavesPending {
			continue
		}
		for _, beside := range r.groupsOfTopology(ctx, c.Topology) { // they compare their timeouts with this one (H10)
			r.groups.addNow(beside.NamespacedName)
		}
	}
	for _, p := range m.publishers {
		r.publishers.addNow(client.ObjectKeyFromObject(p.Topology))
	}
}
