package controllers

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/shove-dev/shove/api/v1alpha1"
)

const (
	// probeInterval is the time between two questions to a broker that answers.
	probeInterval = 30 * time.Second
	// firstBackoff doubles up to lastBackoff while a broker does not answer.
	firstBackoff, lastBackoff = time.Second, 30 * time.Second
	// deletionBound ends every deletion.
	deletionBound = 2 * time.Minute
)

// brokerReconciler keeps one connection per Broker, asks the server how it is, and says so in the Broker's status,
// which is what everything on that Broker waits for.
type brokerReconciler struct {
	*deps
	failures counters
}

// +kubebuilder:rbac:groups=shove.dev,resources=brokers,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=shove.dev,resources=brokers/status,verbs=get;patch
// +kubebuilder:rbac:groups=shove.dev,resources=brokers/finalizers,verbs=update

// brokerScope is one pass over a Broker.
type brokerScope struct {
	broker *v1alpha1.Broker
	status v1alpha1.BrokerStatus
	conds  *conditions
	notes  []note
	// after is when to look again; zero: when something changes.
	after time.Duration
}

// Reconcile makes one pass.
func (r *brokerReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	return again(r.reconcile(ctx, req))
}

func (r *brokerReconciler) reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	b := &v1alpha1.Broker{}
	if err := r.client.Get(ctx, req.NamespacedName, b); err != nil {
		if client.IgnoreNotFound(err) != nil {
			return ctrl.Result{}, err
		}
		r.pool.removeOthers(req.NamespacedName, "")
		r.written.forget(b, req.NamespacedName)
		r.failures.forget(req.NamespacedName)
		return ctrl.Result{}, nil
	}
	if err := r.written.latest(ctx, r.live, b); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	r.pool.removeOthers(req.NamespacedName, b.UID)
	s := &brokerScope{broker: b, status: *b.Status.DeepCopy(), conds: newConditions(b.Status.Conditions, b.Generation, metav1.NewTime(r.clock.Now()))}
	if !b.DeletionTimestamp.IsZero() {
		return r.reconcileDelete(ctx, s)
	}
	if err := r.keepDependents(ctx, s); err != nil {
		return ctrl.Result{}, err
	}
	if err := r.connect(ctx, s); err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{RequeueAfter: s.after}, r.write(ctx, s)
}

// write writes the status if it changed, then sends the events.
func (r *brokerReconciler) write(ctx context.Context, s *brokerScope) error {
	old := s.broker.Status.Conditions
	s.status.ObservedGeneration, s.status.Conditions = s.broker.Generation, s.conds.list
	r.metrics.setUp(client.ObjectKeyFromObject(s.broker), r.pool.entry(s.broker.UID).up())
	if !equality.Semantic.DeepEqual(sorted(s.broker.Status.DeepCopy().Conditions), s.status.Conditions) || !sameBrokerStatus(s.broker.Status, s.status) {
		version, err := applyStatus(ctx, r.client, s.broker, FieldOwner, &s.status)
		if err != nil {
			return ignoreGone(err)
		}
		r.written.record(s.broker, version)
		log.FromContext(ctx).V(1).Info("Wrote status")
	}
	s.notes = append(s.notes, transitions(old, s.conds.list, []string{
		v1alpha1.ConditionServerWarning, v1alpha1.ConditionInUse, v1alpha1.ConditionSingleReplica, v1alpha1.ConditionUpdateAvailable, v1alpha1.ConditionVolumeDiffers,
	})...)
	send(r.events, s.broker, s.notes)
	return nil
}

// sameBrokerStatus compares all but the conditions.
func sameBrokerStatus(a, b v1alpha1.BrokerStatus) bool {
	a.Conditions, b.Conditions = nil, nil
	return equality.Semantic.DeepEqual(a, b)
}

// sorted sorts conditions by type, in place, as conditions are kept here.
func sorted(c []metav1.Condition) []metav1.Condition {
	slices.SortFunc(c, func(a, b metav1.Condition) int { return strings.Compare(a.Type, b.Type) })
	return c
}

// keepDependents counts the Topologies on a Broker, and has a finalizer only while there are any: a Broker that nobody
// uses goes at once, also when the operator is not there any more.
func (r *brokerReconciler) keepDependents(ctx context.Context, s *brokerScope) error {
	topologies, err := r.dependents(ctx, client.ObjectKeyFromObject(s.broker))
	if err != nil {
		return err
	}
	n := int32(min(len(topologies), 1<<30)) //nolint:gosec // bounded
	s.status.Dependents = &n
	return r.setFinalizer(ctx, s.broker, v1alpha1.FinalizerBroker, n > 0)
}

// dependents are the Topologies that refer to a Broker, read-only.
func (d *deps) dependents(ctx context.Context, key types.NamespacedName) ([]v1alpha1.Topology, error) {
	var list v1alpha1.TopologyList
	if err := d.client.List(ctx, &list, client.MatchingFields{indexTopologyBroker: key.String()}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list topologies of broker %s: %w", key, err)
	}
	return list.Items, nil
}

// reconcileDelete lets a Broker go when nothing refers to it, and after two minutes in any case. Until then its
// connection is kept, so that Topologies that are deleted at the same time can do as their policy says.
func (r *brokerReconciler) reconcileDelete(ctx context.Context, s *brokerScope) (ctrl.Result, error) {
	b := s.broker
	if !controllerutil.ContainsFinalizer(b, v1alpha1.FinalizerBroker) {
		r.pool.remove(b.UID)
		return ctrl.Result{}, nil
	}
	dependents, err := r.dependents(ctx, client.ObjectKeyFromObject(b))
	if err != nil {
		return ctrl.Result{}, err
	}
	left := b.DeletionTimestamp.Add(deletionBound).Sub(r.clock.Now())
	if len(dependents) == 0 || left <= 0 {
		if len(dependents) > 0 {
			text := fmt.Sprintf("the Broker goes although Topologies refer to it: %s. Their queues stay on the server; delete them there, or create the Broker again", names(dependents))
			send(r.events, b, []note{warning(EventDependentsLeft, actionDelete, text)})
			log.FromContext(ctx).Info("Broker deleted with dependents", "dependents", names(dependents))
		}
		r.pool.remove(b.UID)
		r.failures.forget(client.ObjectKeyFromObject(b))
		return ctrl.Result{}, r.setFinalizer(ctx, b, v1alpha1.FinalizerBroker, false)
	}
	if err := r.connect(ctx, s); err != nil {
		return ctrl.Result{}, err
	}
	message := fmt.Sprintf("Topologies refer to this Broker: %s. It goes when they are gone, and two minutes after its deletion in any case", names(dependents))
	s.conds.true(v1alpha1.ConditionInUse, v1alpha1.ReasonHasDependents, message)
	s.conds.drop(v1alpha1.ConditionStalled)
	s.conds.summarise(working, v1alpha1.ReasonDeleting, message)
	if s.after <= 0 || s.after > left {
		s.after = left
	}
	return ctrl.Result{RequeueAfter: s.after}, r.write(ctx, s)
}

// names lists some of the objects, in order, so that the text is the same every time.
func names(ts []v1alpha1.Topology) string {
	const shown = 5
	all := make([]string, len(ts))
	for i := range ts {
		all[i] = ts[i].Namespace + "/" + ts[i].Name
	}
	slices.Sort(all)
	if len(all) > shown {
		return strings.Join(all[:shown], ", ") + " and others"
	}
	return strings.Join(all, ", ")
}

// setFinalizer adds or removes one finalizer. The patch names the version that it is about, because it replaces the
// whole list.
func (d *deps) setFinalizer(ctx context.Context, obj client.Object, name string, on bool) error {
	before := obj.DeepCopyObject().(client.Object)
	changed := false
	if on {
		changed = controllerutil.AddFinalizer(obj, name)
	} else {
		changed = controllerutil.RemoveFinalizer(obj, name)
	}
	if !changed {
		return nil
	}
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	if err := d.client.Patch(ctx, obj, patch); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("set finalizer: %w", err))
	}
	if on || obj.GetDeletionTimestamp().IsZero() { // else it is gone
		d.written.record(obj, obj.GetResourceVersion())
	}
	return nil
}

// backoff is the wait before the next attempt after n failures, with jitter.
func backoff(n int) time.Duration {
	d := firstBackoff
	for range min(n-1, 10) {
		d = min(2*d, lastBackoff)
	}
	return jitter(d)
}

// jitter spreads d by 20 % to both sides.
func jitter(d time.Duration) time.Duration { return d - d/5 + rand.N(2*d/5+1) }
