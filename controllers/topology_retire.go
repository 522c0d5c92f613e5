package controllers

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

const (
	// proofTime is how long queues have to be empty before anything is deleted, beyond a hold queue's delay: longer
	// than counts of a management API lag behind.
	proofTime = 15 * time.Second
	// proofPoll is the time between two looks while a proof is collected.
	proofPoll = 3 * time.Second
)

// emptiness remembers since when queues are empty without a break. A restart of the operator begins anew, which makes
// a proof longer, never shorter.
type emptiness struct {
	mu    sync.Mutex
	since map[emptyKey]time.Time
}

type emptyKey struct {
	topology types.NamespacedName
	queue    string // "" for all of them together
}

// see records a look and returns for how long it has been empty.
func (e *emptiness) see(k emptyKey, empty bool, now time.Time) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !empty {
		delete(e.since, k)
		return 0
	}
	if e.since == nil {
		e.since = map[emptyKey]time.Time{}
	}
	if _, ok := e.since[k]; !ok {
		e.since[k] = now
	}
	return now.Sub(e.since[k])
}

func (e *emptiness) forget(t types.NamespacedName) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for k := range e.since {
		if k.topology == t {
			delete(e.since, k)
		}
	}
}

// empty says whether a count proves that nothing is in a queue. Unknown is not zero.
func empty(d broker.Depth) bool {
	if d.Missing {
		return true
	}
	zero := func(c broker.Count) bool { return c.Known && c.N == 0 }
	return zero(d.Ready) && zero(d.InFlight) && zero(d.Stuck)
}

// retire deletes hold queues that left the spec once nobody publishes to them any more and they have been empty for
// their delay and 15 s. Without that proof they stay, and a condition says what is waited for.
func (r *topologyReconciler) retire(ctx context.Context, s *topologyScope) (verdict, error) {
	r.dropMissing(s)
	retired := retiredIn(s.status.Queues)
	if len(retired) == 0 {
		return next, nil
	}
	waiting, err := r.undelivered(ctx, s.topo)
	if err != nil {
		return stop, err
	}
	if s.topo.Spec.Paused {
		waiting = "spec.paused is set"
	}
	var kept []string
	if waiting == "" {
		kept, err = r.deleteEmpty(ctx, s, retired)
		if err != nil {
			return r.failed(s, err), nil
		}
	} else {
		for _, q := range retired {
			r.quietSince.see(emptyKey{s.key(), q.Name}, false, r.clock.Now())
			kept = append(kept, fmt.Sprintf("%q (%s)", q.Name, waiting))
		}
		s.within(jitter(missingRetry))
	}
	if len(kept) > 0 {
		s.conds.warn(v1alpha1.ConditionRetiredQueues, "hold queues that left the spec are kept until they are proven unused and empty: "+strings.Join(kept, ", "))
	}
	return next, nil
}

// dropMissing forgets retired queues that are not on the broker any more.
func (r *topologyReconciler) dropMissing(s *topologyScope) {
	there := map[string]bool{}
	for _, obj := range s.observed.Objects {
		there[obj.Name] = there[obj.Name] || obj.Role == topology.RoleRetired && !obj.Missing
	}
	for _, q := range s.decl.Retired {
		if name := s.physical(q.Name); !there[name] {
			s.dropQueue(name)
		}
	}
}

func (s *topologyScope) dropQueue(name string) {
	s.status.Queues = slices.DeleteFunc(s.status.Queues, func(q v1alpha1.QueueStatus) bool {
		return q.Name == name && q.Role == v1alpha1.QueueRoleRetired
	})
}

func retiredIn(qs []v1alpha1.QueueStatus) []v1alpha1.QueueStatus {
	var out []v1alpha1.QueueStatus
	for _, q := range qs {
		if q.Role == v1alpha1.QueueRoleRetired {
			out = append(out, q)
		}
	}
	return out
}

// deleteEmpty deletes what is proven empty and names what is kept, with the reason.
func (r *topologyReconciler) deleteEmpty(ctx context.Context, s *topologyScope, retired []v1alpha1.QueueStatus) (kept []string, err error) {
	depths, err := s.entry.observer.depths(ctx, queueNames(retired))
	if err != nil {
		return nil, err
	}
	var proven []string
	for _, q := range retired {
		d := depths[q.Name]
		var delay time.Duration
		if q.Delay != nil {
			delay = q.Delay.Duration
		}
		quiet := r.quietSince.see(emptyKey{s.key(), q.Name}, empty(d), r.clock.Now())
		switch {
		case empty(d) && quiet >= delay+proofTime:
			proven = append(proven, q.Name)
			continue
		case empty(d):
			s.within(proofPoll)
			kept = append(kept, fmt.Sprintf("%q (empty, observed for its delay and 15 s)", q.Name))
		case !d.Ready.Known || !d.InFlight.Known || !d.Stuck.Known:
			s.within(jitter(missingRetry))
			kept = append(kept, fmt.Sprintf("%q (the broker does not show whether it is empty: set the Broker's management URL)", q.Name))
		default:
			s.within(jitter(missingRetry))
			kept = append(kept, fmt.Sprintf("%q (it holds messages)", q.Name))
		}
	}
	if len(proven) == 0 {
		return kept, nil
	}
	if _, err := s.entry.remove(ctx, proven); err != nil {
		return nil, err
	}
	for _, name := range proven {
		s.dropQueue(name)
		r.quietSince.see(emptyKey{s.key(), name}, false, r.clock.Now())
		s.notes = append(s.notes, normal(EventTierDeleted, actionDelete, fmt.Sprintf("hold queue %q left the spec, was unused and empty, and is deleted", name)))
	}
	return kept, nil
}

// undelivered names a ConsumerGroup some of whose pods may still publish to a queue that left the spec; "" when all
// report the present generation.
func (r *topologyReconciler) undelivered(ctx context.Context, t *v1alpha1.Topology) (string, error) {
	groups, err := r.groupsOf(ctx, client.ObjectKeyFromObject(t))
	if err != nil {
		return "", err
	}
	slices.SortFunc(groups, func(a, b v1alpha1.ConsumerGroup) int { return strings.Compare(a.Name, b.Name) })
	for i := range groups {
		if why := r.delivered(&groups[i], t); why != "" {
			return why, nil
		}
	}
	return "", nil
}

// groupsOf are the ConsumerGroups on a Topology, read-only.
func (d *deps) groupsOf(ctx context.Context, key types.NamespacedName) ([]v1alpha1.ConsumerGroup, error) {
	var list v1alpha1.ConsumerGroupList
	if err := d.client.List(ctx, &list, client.MatchingFields{indexGroupTopology: key.String()}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list consumer groups of topology %s: %w", key, err)
	}
	return list.Items, nil
}
