package controllers

import (
	"context"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
)

// count brings the numbers of messages into the status, at their own pace: at most every 30 s, and only where one of
// them crossed zero or moved by more than a tenth. Live figures are metrics.
func (r *topologyReconciler) count(ctx context.Context, s *topologyScope) (verdict, error) {
	depths := s.entry.observer.sample(s.key())
	switch {
	case depths != nil:
	case s.created:
		depths = nothingIn(s.status.Queues, s.observed.DriftKnown)
	default:
		var err error
		if depths, err = s.entry.observer.depths(ctx, queueNames(s.status.Queues)); err != nil {
			return next, nil //nolint:nilerr // counted again at the next count of everything
		}
	}
	now := r.clock.Now()
	found := countsOf(s.tracked(), depths)
	s.stuck(depths)
	shown := fromStatus(s.status.Counts)
	shown.stuck = meta.IsStatusConditionTrue(s.topo.Status.Conditions, v1alpha1.ConditionHeldMessagesStuck)
	at := s.status.CountsObservedAt
	if at == nil || now.Sub(at.Time) >= countsPace && shown.movedTo(found) {
		s.showCounts(found, depths, metav1.NewTime(now))
	}
	reported := fromStatus(s.status.Counts)
	reported.stuck = found.stuck
	s.entry.observer.setReported(s.key(), reported, s.status.CountsObservedAt.Time)
	return next, nil
}

// nothingIn is the count of queues that were made in this pass: to count them is work for a broker with many.
// Where the broker shows little, the rest is unknown now as later.
func nothingIn(qs []v1alpha1.QueueStatus, shown bool) map[string]broker.Depth {
	zero := broker.Count{Known: shown}
	depths := make(map[string]broker.Depth, len(qs))
	for _, q := range qs {
		depths[q.Name] = broker.Depth{Queue: q.Name, Ready: broker.Known(0), InFlight: zero, Stuck: zero}
	}
	return depths
}

func (s *topologyScope) showCounts(c counts, depths map[string]broker.Depth, at metav1.Time) {
	s.status.Counts, s.status.CountsObservedAt = c.status(), &at
	for i := range s.status.Queues {
		q := &s.status.Queues[i]
		q.Ready, q.InFlight = pointer(depths[q.Name].Ready), pointer(depths[q.Name].InFlight)
	}
}

// stuck names hold queues whose expired messages cannot leave.
func (s *topologyScope) stuck(depths map[string]broker.Depth) {
	var names []string
	for _, q := range s.status.Queues {
		if d := depths[q.Name]; d.Stuck.Known && d.Stuck.N > 0 {
			names = append(names, fmt.Sprintf("%q", q.Name))
		}
	}
	if len(names) > 0 {
		s.conds.warn(v1alpha1.ConditionHeldMessagesStuck, fmt.Sprintf("expired messages cannot leave %s: look whether %q exists and has a length limit. They are kept, and tried again every 3 minutes", strings.Join(names, ", "), s.status.Queue))
	}
}

func queueNames(qs []v1alpha1.QueueStatus) []string {
	names := make([]string, len(qs))
	for i, q := range qs {
		names[i] = q.Name
	}
	return names
}
