package controllers

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/topology"
)

// checkClaims lets the older of two Topologies that want one queue have it. Claims are read from the objects
// themselves, so that the answer is the same after a restart of the operator and whichever is looked at first.
func (r *topologyReconciler) checkClaims(ctx context.Context, s *topologyScope) (verdict, error) {
	for _, q := range render.Claims(s.decl.Topology) {
		others, err := r.claimants(ctx, s.topo, s.broker, q)
		if err != nil {
			return stop, err
		}
		for _, o := range others {
			if !precedes(o, s.topo) {
				continue
			}
			r.forgetTracking(s)
			message := fmt.Sprintf("queue %q is claimed by Topology %s/%s, which is older: choose another queue in a new Topology, or delete one of the two", s.physical(q.Name), o.Namespace, o.Name)
			s.conds.true(v1alpha1.ConditionConflict, v1alpha1.ReasonQueueClaimed, message)
			s.conds.false(v1alpha1.ConditionDeclared, v1alpha1.ReasonConflict, message)
			return s.stop(stalled, v1alpha1.ReasonConflict, message), nil
		}
	}
	return next, nil
}

// precedes says whether a is the older claimant: by creation, then by UID.
func precedes(a, b *v1alpha1.Topology) bool {
	if !a.CreationTimestamp.Equal(&b.CreationTimestamp) {
		return a.CreationTimestamp.Before(&b.CreationTimestamp)
	}
	return a.UID < b.UID
}

// byAge orders claimants as precedes does.
func byAge(a, b *v1alpha1.Topology) int {
	switch {
	case precedes(a, b):
		return -1
	case precedes(b, a):
		return 1
	}
	return 0
}

// claimants are the other Topologies with a claim on one of t's queues on the same server that stands in its way. A
// Topology that its Broker refuses claims nothing, else any namespace could block any queue. A dead-letter queue that
// Topologies of one namespace share is in nobody's way.
func (d *deps) claimants(ctx context.Context, t *v1alpha1.Topology, b *v1alpha1.Broker, q topology.Queue) ([]*v1alpha1.Topology, error) {
	all, err := d.claimantsOf(ctx, t, b, q)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(o *v1alpha1.Topology) bool {
		return q.Role == topology.RoleDeadLetter && o.Namespace == t.Namespace && roleOf(o, q.Name) == topology.RoleDeadLetter
	}), nil
}

// claimantsOf is claimants with those that share a dead-letter queue, the oldest first.
func (d *deps) claimantsOf(ctx context.Context, t *v1alpha1.Topology, b *v1alpha1.Broker, q topology.Queue) ([]*v1alpha1.Topology, error) {
	var list v1alpha1.TopologyList
	if err := d.client.List(ctx, &list, client.MatchingFields{indexTopologyClaim: q.Name}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list claims on %q: %w", q.Name, err)
	}
	var out []*v1alpha1.Topology
	for i := range list.Items {
		o := &list.Items[i]
		if o.UID == t.UID {
			continue
		}
		same, err := d.sameQueue(ctx, t, b, o, q.Name)
		if err != nil {
			return nil, err
		}
		if same {
			out = append(out, o)
		}
	}
	slices.SortFunc(out, byAge) // the index has no order, and messages name the first
	return out, nil
}

// sameQueue says whether a logical name is one queue for both Topologies, and the other one may have it.
func (d *deps) sameQueue(ctx context.Context, t *v1alpha1.Topology, b *v1alpha1.Broker, o *v1alpha1.Topology, name string) (bool, error) {
	ob, err := d.getBroker(ctx, render.BrokerKey(o))
	if err != nil || ob == nil || serverKey(ob) != serverKey(b) {
		return false, err
	}
	kind := render.Kind(b)
	mine, err := topology.Derive(render.TopologySpec(t))
	if err != nil {
		return false, nil //nolint:nilerr // what has no names claims none
	}
	theirs, err := topology.Derive(render.TopologySpec(o))
	if err != nil || mine.Physical(kind, name) != theirs.Physical(kind, name) {
		return false, nil //nolint:nilerr // as above
	}
	refusal, err := d.access(ctx, ob, o.Namespace, render.Claims(theirs))
	return refusal == nil, err
}

// serverKey is the same for Brokers on one server. A Broker that was never connected is a server of its own.
func serverKey(b *v1alpha1.Broker) string {
	if b.Status.ServerID == "" {
		return "broker " + string(b.UID)
	}
	return strings.Join([]string{string(render.Kind(b)), b.Status.ServerID}, " ")
}

func roleOf(t *v1alpha1.Topology, name string) topology.Role {
	for _, q := range claimsOf(t) {
		if q.Name == name {
			return q.Role
		}
	}
	return ""
}

// rivals are the keys of other Topologies that share a name with t: they are looked at again when t comes or goes.
func (d *deps) rivals(ctx context.Context, t *v1alpha1.Topology) ([]client.ObjectKey, error) {
	found := map[client.ObjectKey]bool{}
	var keys []client.ObjectKey
	for _, q := range claimsOf(t) {
		var list v1alpha1.TopologyList
		if err := d.client.List(ctx, &list, client.MatchingFields{indexTopologyClaim: q.Name}, client.UnsafeDisableDeepCopy); err != nil {
			return nil, err
		}
		for i := range list.Items {
			key := client.ObjectKeyFromObject(&list.Items[i])
			if list.Items[i].UID != t.UID && !found[key] {
				found[key] = true
				keys = append(keys, key)
			}
		}
	}
	return keys, nil
}
