package controllers

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/topology"
)

// findBroker looks up the Broker that the Topology refers to.
func (r *topologyReconciler) findBroker(ctx context.Context, s *topologyScope) (verdict, error) {
	key := render.BrokerKey(s.topo)
	b, err := r.getBroker(ctx, key)
	if err != nil {
		return stop, err
	}
	if b == nil {
		r.forgetTracking(s)
		message := fmt.Sprintf("Broker %s does not exist, or is in a namespace that the operator does not watch: create it, or correct brokerRef in another Topology", key)
		s.conds.false(v1alpha1.ConditionBrokerReady, v1alpha1.ReasonBrokerNotFound, message)
		return s.stop(working, v1alpha1.ReasonBrokerNotFound, message), nil
	}
	s.broker, s.kind = b, render.Kind(b)
	driver, ok := r.drivers[s.kind]
	if !ok {
		return s.refuse(v1alpha1.ReasonBackendNotAvailable, fmt.Sprintf("Broker %s is of kind %s, for which this release has no backend", key, b.Spec.Kind())), nil
	}
	s.driver, s.entry = driver, r.pool.entry(b.UID)
	return next, nil
}

// getBroker is nil where there is no such Broker that the operator may see.
func (d *deps) getBroker(ctx context.Context, key client.ObjectKey) (*v1alpha1.Broker, error) {
	if !d.watches(key.Namespace) {
		return nil, nil
	}
	b := &v1alpha1.Broker{}
	if err := d.client.Get(ctx, key, b); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return b, nil
}

// refuse says that this Topology cannot be on this Broker as it is.
func (s *topologyScope) refuse(reason, message string) verdict {
	s.conds.false(v1alpha1.ConditionBrokerReady, reason, message)
	return s.stop(stalled, reason, message)
}

// derive turns the spec into a declaration, and has the driver look at it without asking the broker.
func (r *topologyReconciler) derive(_ context.Context, s *topologyScope) (verdict, error) {
	d, err := render.Declaration(s.topo, s.kind)
	if err == nil {
		_, err = s.driver.Objects(d)
	}
	if err == nil {
		s.decl = d
		return next, nil
	}
	reason := v1alpha1.ReasonInvalidSpec
	field, isField := errors.AsType[*topology.FieldError](err)
	switch {
	case errors.Is(err, broker.ErrUnsupported):
		reason = v1alpha1.ReasonUnsupported
	case isField && (field.Field == string(topology.RabbitMQ) || field.Field == string(topology.Kafka) || field.Field == string(topology.NATS) || field.Field == "source"):
		reason = v1alpha1.ReasonBrokerKindMismatch
	}
	message := "spec." + strings.ReplaceAll(plain(err), "\n", "; spec.")
	if !isField {
		message = plain(err)
	}
	s.conds.false(v1alpha1.ConditionDeclared, reason, message)
	return s.stop(stalled, reason, message), nil
}

// checkAccess asks whether the Broker allows this namespace and these names.
func (r *topologyReconciler) checkAccess(ctx context.Context, s *topologyScope) (verdict, error) {
	refusal, err := r.access(ctx, s.broker, s.topo.Namespace, render.Claims(s.decl.Topology))
	if err != nil {
		return stop, err
	}
	if refusal == nil {
		return next, nil
	}
	r.forgetTracking(s)
	s.within(jitter(resyncOf(s.broker))) // the namespace's labels may change
	return s.refuse(refusal.Reason, refusal.Message), nil
}

func (d *deps) access(ctx context.Context, b *v1alpha1.Broker, namespace string, queues []topology.Queue) (*render.Refusal, error) {
	var labels map[string]string
	if a := b.Spec.AllowedNamespaces; a != nil && a.From == v1alpha1.NamespacesSelector && namespace != b.Namespace {
		var err error
		if labels, err = d.namespaces.labels(ctx, namespace); err != nil {
			return nil, err
		}
	}
	return render.Access(b, namespace, labels, queues), nil
}

// namespaceLabels reads labels of namespaces by name and keeps them for a short time: no watch of namespaces, which
// would need rights over the cluster.
type namespaceLabels struct {
	live client.Reader
	now  func() time.Time
	mu   sync.Mutex
	kept map[string]keptLabels
}

type keptLabels struct {
	labels map[string]string
	until  time.Time
}

// keepLabels is how long a namespace's labels are believed.
const keepLabels = 30 * time.Second

// +kubebuilder:rbac:groups="",resources=namespaces,verbs=get

func (n *namespaceLabels) labels(ctx context.Context, name string) (map[string]string, error) {
	n.mu.Lock()
	k, ok := n.kept[name]
	n.mu.Unlock()
	if ok && n.now().Before(k.until) {
		return k.labels, nil
	}
	ns := &metav1.PartialObjectMetadata{}
	ns.SetGroupVersionKind(namespaceKind)
	err := n.live.Get(ctx, client.ObjectKey{Name: name}, ns)
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err) { // then it has none that can be matched
		return nil, fmt.Errorf("read labels of namespace %q: %w", name, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.kept == nil {
		n.kept = map[string]keptLabels{}
	}
	n.kept[name] = keptLabels{ns.Labels, n.now().Add(keepLabels)}
	return ns.Labels, nil
}

// checkImmutable is the net under the CRD's own rules: an object that was stored without them, or restored from a
// backup, does not move a queue.
func (r *topologyReconciler) checkImmutable(_ context.Context, s *topologyScope) (verdict, error) {
	st := s.topo.Status
	if st.Declared == nil {
		return next, nil
	}
	field, was, is := "", "", ""
	key := render.BrokerKey(s.topo)
	switch {
	case st.Queue != "" && st.Queue != s.physical(s.decl.Topology.Queue):
		field, was, is = "queue", st.Queue, s.physical(s.decl.Topology.Queue)
	case st.Declared.Broker.Name != "" && (st.Declared.Broker.Namespace != key.Namespace || st.Declared.Broker.Name != key.Name):
		field, was, is = "brokerRef", st.Declared.Broker.Namespace+"/"+st.Declared.Broker.Name, key.String()
	default:
		return next, nil
	}
	message := fmt.Sprintf("spec.%s is immutable: it was %q when the queues were declared and is now %q: set it back, or create another Topology", field, was, is)
	s.conds.false(v1alpha1.ConditionDeclared, v1alpha1.ReasonImmutableField, message)
	return s.stop(stalled, v1alpha1.ReasonImmutableField, message), nil
}

func (s *topologyScope) physical(name string) string { return s.decl.Topology.Physical(s.kind, name) }

// warn names what is allowed and rarely meant (B6), and that the Topology is paused.
func (r *topologyReconciler) warn(_ context.Context, s *topologyScope) (verdict, error) {
	for _, w := range s.decl.Topology.Warnings() {
		s.conds.warn(string(w), w.Text())
	}
	if s.topo.Spec.Paused {
		s.conds.true(v1alpha1.ConditionPaused, v1alpha1.ReasonPaused, "spec.paused is set: nothing is written to the broker; consumption goes on")
	}
	return next, nil
}

// awaitBroker goes on only where the Broker is connected. Otherwise the Topology waits for the Broker's status and
// makes no call.
func (r *topologyReconciler) awaitBroker(_ context.Context, s *topologyScope) (verdict, error) {
	b := s.broker
	switch {
	case !meta.IsStatusConditionTrue(b.Status.Conditions, v1alpha1.ConditionReady) || !b.DeletionTimestamp.IsZero():
		return s.brokerNotReady(), nil
	case !s.entry.up():
		return s.await(), nil
	}
	s.conds.true(v1alpha1.ConditionBrokerReady, v1alpha1.ReasonBrokerReady, fmt.Sprintf("Broker %s/%s is connected", b.Namespace, b.Name))
	return next, nil
}

// await ends a pass without a word: the Broker's status says that it is ready, and the connection is lost, or not made
// yet by an operator that has just started. Either the Broker's status will say otherwise, or the connection comes
// back, and the Topology is looked at again in both cases. So a connection that was lost for a moment, and a restart
// of the operator, change no object.
func (s *topologyScope) await() verdict {
	s.hold = true
	s.within(jitter(probeInterval))
	return stop
}

// brokerNotReady ends a pass that the Broker's state does not allow.
func (s *topologyScope) brokerNotReady() verdict {
	b := s.broker
	message := fmt.Sprintf("Broker %s/%s is not ready: its conditions say why", b.Namespace, b.Name)
	if !b.DeletionTimestamp.IsZero() {
		message = fmt.Sprintf("Broker %s/%s is being deleted", b.Namespace, b.Name)
	}
	s.conds.false(v1alpha1.ConditionBrokerReady, v1alpha1.ReasonBrokerNotReady, message)
	for _, c := range []string{v1alpha1.ConditionDeclared, v1alpha1.ConditionDrift, v1alpha1.ConditionRetiredQueues, v1alpha1.ConditionMessagesAtRisk, v1alpha1.ConditionHeldMessagesStuck} {
		s.conds.keep(c) // the last that is known
	}
	return s.stop(working, v1alpha1.ReasonBrokerNotReady, message)
}

// forgetTracking stops looking after a Topology that may not be on its broker.
func (r *topologyReconciler) forgetTracking(s *topologyScope) {
	for _, e := range r.pool.all() {
		e.observer.untrack(s.key())
	}
}
