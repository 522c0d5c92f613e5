package controllers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/topology"
)

// remains is what a deletion has to deal with, decided from the status alone as far as that goes.
type remains struct {
	// delete are queues to delete, holds before their targets.
	delete []string
	// kept are queues that stay, with the reason.
	kept []string
}

// reconcileDelete does what the deletion policy says, and ends within two minutes whatever the broker, its Secret or
// its Broker object are doing.
func (r *topologyReconciler) reconcileDelete(ctx context.Context, s *topologyScope) error {
	if !controllerutil.ContainsFinalizer(s.topo, v1alpha1.FinalizerTopology) {
		r.forget(s.key())
		return nil
	}
	if !deletes(s.topo) || s.topo.Status.Declared == nil || len(s.topo.Status.Queues) == 0 {
		return r.finish(ctx, s) // nothing is declared, or nothing is to be deleted
	}
	b, err := r.getBroker(ctx, render.BrokerKey(s.topo))
	if err != nil {
		return err
	}
	if b == nil {
		return r.leave(ctx, s, "its Broker is gone")
	}
	s.broker, s.kind, s.entry = b, render.Kind(b), r.pool.entry(b.UID)
	if was := s.topo.Status.Declared.ServerID; was != "" && b.Status.ServerID != "" && was != b.Status.ServerID {
		return r.leave(ctx, s, "its Broker is connected to another server")
	}
	rest, err := r.remains(ctx, s)
	if err != nil {
		return err
	}
	if len(rest.delete) == 0 {
		s.notes = append(s.notes, warning(EventQueuesLeft, actionDelete, "nothing is deleted: "+strings.Join(rest.kept, ", ")))
		return r.finish(ctx, s)
	}
	waiting := "the broker is not reachable"
	if s.entry.up() {
		var over bool
		if waiting, over, err = r.deleteQueues(ctx, s, rest); over || err != nil {
			return err
		}
	}
	left := r.deadline(s).Sub(r.clock.Now())
	if left <= 0 {
		return r.leave(ctx, s, waiting)
	}
	s.within(left)
	s.conds.summarise(working, v1alpha1.ReasonDeleting, fmt.Sprintf("deletion policy %s waits: %s. After two minutes the object goes and the queues stay", s.topo.Spec.DeletionPolicy, waiting))
	return nil
}

// deadline ends the deletion. It counts from the operator's start where that is later, so that a deletion that was
// asked for while the operator was down is tried.
func (r *topologyReconciler) deadline(s *topologyScope) time.Time {
	from := s.topo.DeletionTimestamp.Time
	if r.started.After(from) {
		from = r.started
	}
	return from.Add(deletionBound)
}

// remains sorts the queues that were declared into those to delete and those that stay: what is external, and what
// another Topology claims too, such as a shared dead-letter queue.
func (r *topologyReconciler) remains(ctx context.Context, s *topologyScope) (remains, error) {
	var rest remains
	for _, q := range slices.Backward(s.topo.Status.Queues) {
		if s.topo.Spec.External && q.Role == v1alpha1.QueueRoleMain {
			rest.kept = append(rest.kept, fmt.Sprintf("%q (external)", q.Name))
			continue
		}
		others, err := r.claimantsOf(ctx, s.topo, s.broker, topology.Queue{Name: s.logical(q), Role: topology.Role(q.Role)})
		if err != nil {
			return remains{}, err
		}
		others = slices.DeleteFunc(others, func(o *v1alpha1.Topology) bool { return !o.DeletionTimestamp.IsZero() && precedes(s.topo, o) })
		if len(others) > 0 {
			rest.kept = append(rest.kept, fmt.Sprintf("%q (Topology %s/%s claims it too)", q.Name, others[0].Namespace, others[0].Name))
			continue
		}
		rest.delete = append(rest.delete, q.Name)
	}
	return rest, nil
}

// logical is the logical name of a queue in the status.
func (s *topologyScope) logical(q v1alpha1.QueueStatus) string {
	t, err := topology.Derive(render.TopologySpec(s.topo))
	if err != nil {
		return q.Name
	}
	names := t.Queues()
	if q.Delay != nil {
		names = append(names, topology.Queue{Name: topology.HoldName(t.Queue, q.Delay.Duration)})
	}
	for _, l := range names {
		if t.Physical(s.kind, l.Name) == q.Name {
			return l.Name
		}
	}
	return q.Name
}

// deleteQueues deletes if the policy's conditions are met. It says what is waited for otherwise; over means that the
// object is finished with.
func (r *topologyReconciler) deleteQueues(ctx context.Context, s *topologyScope, rest remains) (waiting string, over bool, err error) {
	if s.topo.Spec.DeletionPolicy == v1alpha1.DeletionDeleteIfEmpty {
		waiting, err = r.proveEmpty(ctx, s)
		if err != nil || waiting != "" {
			return waiting, false, err
		}
	}
	deleted, err := s.entry.remove(ctx, rest.delete)
	if err != nil {
		s.within(proofPoll)
		log.FromContext(ctx).Info("Could not delete queues", "queues", rest.delete, "cause", plain(err))
		return "the broker did not delete them: " + plain(err), false, nil
	}
	text := fmt.Sprintf("deleted %s, with %s in them", quoted(rest.delete), messagesIn(deleted))
	if len(rest.kept) > 0 {
		text += "; these stay: " + strings.Join(rest.kept, ", ")
	}
	s.notes = append(s.notes, normal(EventQueuesDeleted, actionDelete, text))
	log.FromContext(ctx).Info("Deleted queues", "queues", rest.delete, "kept", rest.kept)
	return "", true, r.finish(ctx, s)
}

// messagesIn says how many messages went with the queues. A number that the broker does not tell is not zero.
func messagesIn(ds []broker.Deleted) string {
	sum, known := int64(0), true
	for _, d := range ds {
		sum += d.Messages.N
		known = known && d.Messages.Known
	}
	switch {
	case known && sum == 1:
		return "1 message"
	case known:
		return fmt.Sprintf("%d messages", sum)
	case sum > 0:
		return fmt.Sprintf("at least %d messages", sum)
	default:
		return "an unknown number of messages"
	}
}

// proveEmpty returns "" once all queues have been empty and without a ConsumerGroup for 15 s; else what is missing.
func (r *topologyReconciler) proveEmpty(ctx context.Context, s *topologyScope) (string, error) {
	key := emptyKey{s.key(), ""}
	groups, err := r.groupsOf(ctx, s.key())
	if err != nil {
		return "", err
	}
	if len(groups) > 0 {
		r.quietSince.see(key, false, r.clock.Now())
		return fmt.Sprintf("ConsumerGroup %q refers to this Topology", groups[0].Name), nil
	}
	s.within(proofPoll)
	depths, err := s.entry.observer.depths(ctx, queueNames(s.topo.Status.Queues))
	if err != nil {
		r.quietSince.see(key, false, r.clock.Now())
		return "the queues cannot be counted: " + plain(err), nil
	}
	for _, q := range s.topo.Status.Queues {
		d := depths[q.Name]
		if empty(d) {
			continue
		}
		r.quietSince.see(key, false, r.clock.Now())
		if d.Ready.N > 0 || d.InFlight.N > 0 || d.Stuck.N > 0 {
			return fmt.Sprintf("queue %q is not empty", q.Name), nil
		}
		return fmt.Sprintf("the broker does not show whether queue %q is empty", q.Name), nil
	}
	if r.quietSince.see(key, true, r.clock.Now()) < proofTime {
		return "the queues are empty, which has to last for 15 s", nil
	}
	return "", nil
}

// leave ends the deletion with the queues left on the broker, and says so.
func (r *topologyReconciler) leave(ctx context.Context, s *topologyScope, why string) error {
	names := quoted(queueNames(s.topo.Status.Queues))
	d := s.topo.Status.Declared
	text := fmt.Sprintf("these queues stay on %s (Broker %s/%s), because %s: %s. Delete them there if they are not needed", d.Kind, d.Broker.Namespace, d.Broker.Name, why, names)
	s.notes = append(s.notes, warning(EventQueuesLeft, actionDelete, text))
	log.FromContext(ctx).Info("Topology deleted, its queues stay", "queues", queueNames(s.topo.Status.Queues), "cause", why)
	return r.finish(ctx, s)
}

// finish removes the finalizer. The events are sent with what follows.
func (r *topologyReconciler) finish(ctx context.Context, s *topologyScope) error {
	r.forget(s.key())
	s.after = 0
	err := r.setFinalizer(ctx, s.topo, v1alpha1.FinalizerTopology, false)
	if err != nil {
		s.notes = nil // they are sent when it is done
		return errors.Join(err)
	}
	return nil
}

func quoted(names []string) string {
	out := make([]string, len(names))
	for i, n := range names {
		out[i] = fmt.Sprintf("%q", n)
	}
	return strings.Join(out, ", ")
}
