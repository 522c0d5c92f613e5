package controllers

import (
	"context"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/topology"
)

// Indexes of the injection.
const (
	// indexGroupTarget: ConsumerGroups by render.Target.
	indexGroupTarget = "consumergroup.target"
	// indexGroupSecret: ConsumerGroups by the Secret of their own credentials.
	indexGroupSecret = "consumergroup.secret"
	// indexTopologyPublisher: Topologies by the render.Target of each publisher.
	indexTopologyPublisher = "topology.publisher"
	// indexBrokerWorkloadSecret: Brokers by every Secret that workloads may get a copy of.
	indexBrokerWorkloadSecret = "broker.workloadsecret"
)

func groupSecretKeys(g *v1alpha1.ConsumerGroup) []string {
	if g.Spec.Credentials == nil {
		return nil
	}
	return []string{types.NamespacedName{Namespace: g.Namespace, Name: g.Spec.Credentials.SecretRef.Name}.String()}
}

func publisherKeys(t *v1alpha1.Topology) []string {
	keys := make([]string, len(t.Spec.Publishers))
	for i, p := range t.Spec.Publishers {
		keys[i] = render.PublisherTarget(t, p).String()
	}
	return keys
}

func workloadSecretKeys(b *v1alpha1.Broker) []string {
	names := operatorSecrets(b)
	if c := b.Spec.WorkloadCredentials; c != nil {
		names = append(names, c.SecretRef.Name)
	}
	keys := make([]string, len(names))
	for i, name := range names {
		keys[i] = types.NamespacedName{Namespace: b.Namespace, Name: name}.String()
	}
	return keys
}

// membersFound are a target's members, served or not.
type membersFound struct {
	consumers  []*render.Consumer
	publishers []*render.Publisher
}

func (m *membersFound) none() bool { return len(m.consumers) == 0 && len(m.publishers) == 0 }

// membersOf reads and assesses everything that refers to a target.
func (d *deps) membersOf(ctx context.Context, t render.Target) (*membersFound, error) {
	look := &lookup{ctx: ctx, deps: d}
	m := &membersFound{}
	var groups v1alpha1.ConsumerGroupList
	if err := d.client.List(ctx, &groups, client.MatchingFields{indexGroupTarget: t.String()}); err != nil {
		return nil, fmt.Errorf("list consumer groups of %s: %w", t, err)
	}
	for i := range groups.Items {
		g := &groups.Items[i]
		if !g.DeletionTimestamp.IsZero() {
			continue
		}
		c := render.Assess(g, look.world())
		if f := undeclared(c.Topology); f != nil && !c.Blocked() {
			c.Findings = append(c.Findings, *f)
		}
		m.consumers = append(m.consumers, c)
	}
	var topologies v1alpha1.TopologyList
	if err := d.client.List(ctx, &topologies, client.MatchingFields{indexTopologyPublisher: t.String()}); err != nil {
		return nil, fmt.Errorf("list topologies that %s publishes to: %w", t, err)
	}
	for i := range topologies.Items {
		topo := &topologies.Items[i]
		if !topo.DeletionTimestamp.IsZero() {
			continue
		}
		for _, ref := range topo.Spec.Publishers {
			if render.PublisherTarget(topo, ref) != t {
				continue
			}
			p := render.AssessPublisher(topo, ref, look.world())
			if f := undeclared(topo); f != nil && !p.Blocked() {
				p.Findings = append(p.Findings, *f)
			}
			m.publishers = append(m.publishers, p)
		}
	}
	return m, look.err
}

// undeclared keeps a Topology from being consumed before its queues were declared once, and while another Topology
// has the older claim to them. A broker that is down now and then changes nothing.
func undeclared(t *v1alpha1.Topology) *render.Finding {
	if t == nil {
		return nil
	}
	f := &render.Finding{Condition: v1alpha1.ConditionTopologyReady, Reason: v1alpha1.ReasonTopologyNotReady, Blocks: true, Waits: true}
	switch {
	case meta.IsStatusConditionTrue(t.Status.Conditions, v1alpha1.ConditionConflict):
		f.Message = fmt.Sprintf("Topology %q is in conflict with an older one: see its conditions", t.Name)
	case t.Status.Declared == nil:
		f.Message = fmt.Sprintf("Topology %q is not declared on the broker yet: see its conditions", t.Name)
	default:
		return nil
	}
	return f
}

// lookup reads through the cache and keeps the first error.
type lookup struct {
	*deps
	ctx context.Context //nolint:containedctx // lives as long as one pass
	err error
}

func (l *lookup) fail(err error) {
	if err != nil && l.err == nil {
		l.err = err
	}
}

func (l *lookup) world() render.World {
	return render.World{
		Topology: func(k types.NamespacedName) *v1alpha1.Topology {
			t := &v1alpha1.Topology{}
			if err := l.client.Get(l.ctx, k, t); err != nil {
				l.fail(client.IgnoreNotFound(err))
				return nil
			}
			return t
		},
		Broker: func(k types.NamespacedName) *v1alpha1.Broker {
			b, err := l.getBroker(l.ctx, k)
			l.fail(err)
			return b
		},
		Labels: func(ns string) map[string]string {
			labels, err := l.namespaces.labels(l.ctx, ns)
			if apierrors.IsForbidden(err) { // then no selector matches
				return nil
			}
			l.fail(err)
			return labels
		},
		Driver: func(k topology.Kind) (broker.Driver, bool) {
			d, ok := l.drivers[k]
			return d, ok
		},
	}
}

type targetQueue = workqueue.TypedRateLimitingInterface[render.Target]

// targetEvents enqueues the targets that an object concerns, as it was and as it is.
func targetEvents(targets func(context.Context, client.Object) []render.Target) handler.TypedEventHandler[client.Object, render.Target] {
	add := func(ctx context.Context, q targetQueue, objs ...client.Object) {
		for _, o := range objs {
			for _, t := range targets(ctx, o) {
				q.Add(t)
			}
		}
	}
	return handler.TypedFuncs[client.Object, render.Target]{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, q targetQueue) { add(ctx, q, e.Object) },
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q targetQueue) {
			add(ctx, q, e.ObjectOld, e.ObjectNew)
		},
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q targetQueue) { add(ctx, q, e.Object) },
	}
}

func groupTargets(_ context.Context, o client.Object) []render.Target {
	return []render.Target{render.TargetOf(o.(*v1alpha1.ConsumerGroup))}
}

// topologyMatters passes what changes what workloads get: the spec, whether the Topology may be used at all, and the
// hold queues that left it.
func topologyMatters() predicate.Predicate {
	usable := func(o client.Object) bool { return undeclared(o.(*v1alpha1.Topology)) == nil }
	retired := func(o client.Object) []topology.Queue { return render.RetiredQueues(o.(*v1alpha1.Topology)) }
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		return specOrDeletion().Update(e) || usable(e.ObjectOld) != usable(e.ObjectNew) || !slices.Equal(retired(e.ObjectOld), retired(e.ObjectNew))
	}}
}

func (d *deps) topologyTargets(ctx context.Context, o client.Object) []render.Target {
	t := o.(*v1alpha1.Topology)
	var out []render.Target
	for _, p := range t.Spec.Publishers {
		out = append(out, render.PublisherTarget(t, p))
	}
	groups, err := d.groupsOf(ctx, client.ObjectKeyFromObject(t))
	if err != nil {
		log.FromContext(ctx).Error(err, "Could not look up the ConsumerGroups of a Topology", "topology", client.ObjectKeyFromObject(t))
		return out
	}
	for i := range groups {
		out = append(out, render.TargetOf(&groups[i]))
	}
	return out
}

func (d *deps) brokerTargets(ctx context.Context, o client.Object) []render.Target {
	topologies, err := d.dependents(ctx, client.ObjectKeyFromObject(o))
	if err != nil {
		log.FromContext(ctx).Error(err, "Could not look up the Topologies of a Broker", "broker", client.ObjectKeyFromObject(o))
		return nil
	}
	var out []render.Target
	for i := range topologies {
		out = append(out, d.topologyTargets(ctx, &topologies[i])...)
	}
	return out
}

// secretTargets are the targets whose Secret is made from this one, or is this one.
func (d *deps) secretTargets(ctx context.Context, o client.Object) []render.Target {
	key := client.ObjectKeyFromObject(o).String()
	if t, ok := parseTarget(o.GetNamespace(), o.GetAnnotations()[annotationTarget]); ok && ours(o) {
		return []render.Target{t}
	}
	var out []render.Target
	var brokers v1alpha1.BrokerList
	if err := d.client.List(ctx, &brokers, client.MatchingFields{indexBrokerWorkloadSecret: key}, client.UnsafeDisableDeepCopy); err != nil {
		log.FromContext(ctx).Error(err, "Could not look up the Brokers of a Secret", "secret", key)
	}
	for i := range brokers.Items {
		out = append(out, d.brokerTargets(ctx, &brokers.Items[i])...)
	}
	var groups v1alpha1.ConsumerGroupList
	if err := d.client.List(ctx, &groups, client.MatchingFields{indexGroupSecret: key}, client.UnsafeDisableDeepCopy); err != nil {
		log.FromContext(ctx).Error(err, "Could not look up the ConsumerGroups of a Secret", "secret", key)
	}
	for i := range groups.Items {
		out = append(out, render.TargetOf(&groups.Items[i]))
	}
	return out
}

func (d *deps) workloadTargets(kind v1alpha1.WorkloadKind) func(context.Context, client.Object) []render.Target {
	return func(_ context.Context, o client.Object) []render.Target {
		return []render.Target{{Kind: string(kind), Namespace: o.GetNamespace(), Name: o.GetName()}}
	}
}
