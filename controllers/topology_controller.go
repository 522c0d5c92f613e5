package controllers

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// topologyReconciler makes a Topology so on its broker: observe, compare, declare or repair. A pass is a list of
// phases that fill one status value, which is written once, and only if it changed.
type topologyReconciler struct {
	*deps
	quietSince emptiness
	checked    verifications
}

// +kubebuilder:rbac:groups=shove.dev,resources=topologies,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=shove.dev,resources=topologies/status,verbs=get;patch
// +kubebuilder:rbac:groups=shove.dev,resources=topologies/finalizers,verbs=update
// +kubebuilder:rbac:groups=shove.dev,resources=consumergroups,verbs=get;list;watch

// topologyScope is one pass over a Topology: what was read, and the status that it fills.
type topologyScope struct {
	topo   *v1alpha1.Topology
	status v1alpha1.TopologyStatus
	conds  *conditions
	notes  []note

	broker *v1alpha1.Broker
	kind   topology.Kind
	driver broker.Driver
	entry  *brokerEntry
	decl   broker.Declaration
	// unretired is decl before it was told to remove bindings.
	unretired broker.Declaration
	// observed is what the broker showed in this pass.
	observed broker.Observation
	// created says that this pass made every queue that there is.
	created bool

	// after is the soonest time to look again; zero: when something changes.
	after time.Duration
	// again asks for another pass at once, from the status that this one wrote.
	again bool
	// hold leaves the status as it is: the state of the broker is not known, and its Broker will tell.
	hold bool
}

func (s *topologyScope) key() client.ObjectKey { return client.ObjectKeyFromObject(s.topo) }

// within asks for another look after d at the latest.
func (s *topologyScope) within(d time.Duration) {
	if d > 0 && (s.after == 0 || d < s.after) {
		s.after = d
	}
}

// stop ends the pass with a summary.
func (s *topologyScope) stop(p progress, reason, message string) verdict {
	s.conds.summarise(p, reason, message)
	return stop
}

// verdict says whether the next phase may run.
type verdict bool

const (
	next verdict = true
	stop verdict = false
)

// topologyPhase is one step of a pass. Whatever is wrong with the world becomes a condition; an error is one of the
// API server's, and the pass is tried again.
type topologyPhase func(context.Context, *topologyScope) (verdict, error)

func (r *topologyReconciler) phases() []topologyPhase {
	return []topologyPhase{
		r.keepFinalizer,
		r.findBroker,
		r.derive,
		r.checkAccess,
		r.checkImmutable,
		r.warn,
		r.checkClaims,
		r.awaitBroker,
		r.recordNames,
		r.declare,
		r.retire,
		r.count,
	}
}

// maxPasses bounds the passes of one call: one that records the names, one that declares them.
const maxPasses = 3

// Reconcile makes one pass, or two where the first one had to be written before the second.
func (r *topologyReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	return again(r.reconcile(ctx, req))
}

func (r *topologyReconciler) reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	t := &v1alpha1.Topology{}
	if err := r.client.Get(ctx, req.NamespacedName, t); err != nil {
		if client.IgnoreNotFound(err) == nil {
			r.forget(req.NamespacedName)
			return ctrl.Result{}, nil
		}
		return ctrl.Result{}, err
	}
	if err := r.written.latest(ctx, r.live, t); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	var s *topologyScope
	for range maxPasses {
		s = r.scope(t)
		if err := r.pass(ctx, s); err != nil {
			return ctrl.Result{}, err
		}
		if s.hold {
			break
		}
		if err := r.write(ctx, s); err != nil {
			return ctrl.Result{}, ignoreGone(err)
		}
		if !s.again {
			break
		}
		t = t.DeepCopy()
		t.Status = s.status
	}
	return ctrl.Result{RequeueAfter: s.after}, nil
}

func (r *topologyReconciler) scope(t *v1alpha1.Topology) *topologyScope {
	return &topologyScope{topo: t, status: *t.Status.DeepCopy(), conds: newConditions(t.Status.Conditions, t.Generation, metav1.NewTime(r.clock.Now()))}
}

func (r *topologyReconciler) pass(ctx context.Context, s *topologyScope) error {
	if !s.topo.DeletionTimestamp.IsZero() {
		return r.reconcileDelete(ctx, s)
	}
	for _, phase := range r.phases() {
		v, err := phase(ctx, s)
		if err != nil {
			return err
		}
		if v == stop {
			return nil
		}
	}
	return nil
}

// topologyWarnings are the conditions whose appearance is an event.
var topologyWarnings = []string{
	v1alpha1.ConditionHoldWithoutDeadLetter, v1alpha1.ConditionDeadLetterWithoutHold, v1alpha1.ConditionMessagesAtRisk,
	v1alpha1.ConditionHeldMessagesStuck,
}

// foreign are the parts of a Topology's status that the injection of publishers writes, under a name of its own.
var foreign = map[string]bool{v1alpha1.ConditionInjected: true}

// write writes the status if it changed, then sends the events of what changed.
func (r *topologyReconciler) write(ctx context.Context, s *topologyScope) error {
	old := own(s.topo.Status)
	s.status.ObservedGeneration, s.status.Conditions = s.topo.Generation, s.conds.list
	status := own(s.status)
	if controllerutil.ContainsFinalizer(s.topo, v1alpha1.FinalizerTopology) || s.topo.DeletionTimestamp.IsZero() {
		if !equality.Semantic.DeepEqual(old, status) {
			version, err := applyStatus(ctx, r.client, s.topo, FieldOwner, &status)
			if err != nil {
				return err
			}
			r.written.record(s.topo, version)
			log.FromContext(ctx).V(1).Info("Wrote status")
		}
	}
	s.notes = append(s.notes, transitions(old.Conditions, status.Conditions, topologyWarnings)...)
	send(r.events, s.topo, s.notes)
	return nil
}

// own is the part of a status that this controller writes.
func own(st v1alpha1.TopologyStatus) v1alpha1.TopologyStatus {
	st = *st.DeepCopy()
	st.InjectedPublishers = nil
	var mine []metav1.Condition
	for _, c := range st.Conditions {
		if !foreign[c.Type] {
			mine = append(mine, c)
		}
	}
	st.Conditions = sorted(mine)
	return st
}

// forget drops what is kept for a Topology that is gone.
func (r *topologyReconciler) forget(key client.ObjectKey) {
	for _, e := range r.pool.all() {
		e.observer.untrack(key)
	}
	r.written.forget(&v1alpha1.Topology{}, key)
	r.metrics.forgetTopology(key)
	r.quietSince.forget(key)
	r.checked.forget(key)
}

// keepFinalizer has a finalizer where the deletion policy needs one: with Retain there is none at all, so that
// nothing can ever hold the object up.
func (r *topologyReconciler) keepFinalizer(ctx context.Context, s *topologyScope) (verdict, error) {
	return next, r.setFinalizer(ctx, s.topo, v1alpha1.FinalizerTopology, deletes(s.topo))
}

// deletes says whether the deletion policy may delete anything.
func deletes(t *v1alpha1.Topology) bool {
	return t.Spec.DeletionPolicy == v1alpha1.DeletionDelete || t.Spec.DeletionPolicy == v1alpha1.DeletionDeleteIfEmpty
}
