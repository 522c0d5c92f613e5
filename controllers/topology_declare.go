package controllers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/topology"
)

// missingRetry is how soon something that others have to create is looked for again.
const missingRetry = 30 * time.Second

// recordNames writes the names of what is about to be declared into the status before it is declared, so that
// deletion knows them whatever happens in between. Where nothing is ever deleted they are written with the rest.
func (r *topologyReconciler) recordNames(_ context.Context, s *topologyScope) (verdict, error) {
	s.status.Queue = s.physical(s.decl.Topology.Queue)
	known := len(s.topo.Status.Queues)
	s.mergeQueues(metav1.NewTime(r.clock.Now()))
	record, err := s.record()
	if err != nil {
		return stop, err
	}
	fresh := s.topo.Status.Declared == nil || s.topo.Status.Declared.ServerID != record.ServerID || len(s.status.Queues) > known
	s.status.Declared = record
	s.decl.Retired = render.RetiredQueues(&v1alpha1.Topology{Status: s.status})
	if !fresh || s.topo.Spec.Paused || !deletes(s.topo) {
		return next, nil
	}
	s.again = true
	for _, c := range []string{v1alpha1.ConditionDeclared, v1alpha1.ConditionDrift, v1alpha1.ConditionRetiredQueues} {
		s.conds.keep(c)
	}
	return s.stop(working, v1alpha1.ReasonProgressing, "the queues are being declared"), nil
}

// record says where the queues are declared.
func (s *topologyScope) record() (*v1alpha1.DeclaredRecord, error) {
	rec := &v1alpha1.DeclaredRecord{
		Broker: v1alpha1.ObjectIdentity{Namespace: s.broker.Namespace, Name: s.broker.Name, UID: s.broker.UID},
		Kind:   s.broker.Spec.Kind(), ServerID: s.entry.serverID(),
	}
	rec.Bindings = slices.Clone(s.bindings())
	var left []v1alpha1.RabbitMQBinding
	if was := s.topo.Status.Declared; was != nil && was.ServerID == rec.ServerID {
		for _, b := range was.Bindings {
			if !slices.Contains(rec.Bindings, b) {
				left = append(left, b)
			}
		}
	}
	if len(left) == 0 {
		return rec, nil
	}
	// Those that left the list stay on record until they are gone from the broker.
	rec.Bindings = append(rec.Bindings, left...)
	options := map[string]any{}
	if len(s.decl.Options) > 0 {
		if err := json.Unmarshal(s.decl.Options, &options); err != nil {
			return nil, fmt.Errorf("read the declaration's options: %w", err)
		}
	}
	options["retiredBindings"] = left
	var err error
	s.unretired = s.decl
	if s.decl.Options, err = json.Marshal(options); err != nil {
		return nil, fmt.Errorf("write the declaration's options: %w", err)
	}
	return rec, nil
}

// bindings are those of the spec.
func (s *topologyScope) bindings() []v1alpha1.RabbitMQBinding {
	if s.topo.Spec.RabbitMQ == nil {
		return nil
	}
	return s.topo.Spec.RabbitMQ.Bindings
}

// unbound forgets bindings that left the spec and are gone from the broker: one that somebody makes by hand from now
// on is theirs.
func (s *topologyScope) unbound() {
	if len(s.status.Declared.Bindings) != len(s.bindings()) {
		s.status.Declared.Bindings = slices.Clone(s.bindings())
		s.decl.Options = s.unretired.Options
	}
}

// mergeQueues brings the queues of the status in line with the spec. A queue that left the spec stays, as Retired
// where it is a hold queue.
func (s *topologyScope) mergeQueues(now metav1.Time) {
	old := map[string]v1alpha1.QueueStatus{}
	for _, q := range s.topo.Status.Queues {
		old[q.Name] = q
	}
	var queues []v1alpha1.QueueStatus
	for _, q := range render.Claims(s.decl.Topology) {
		st := v1alpha1.QueueStatus{Name: s.physical(q.Name), Role: v1alpha1.QueueRole(q.Role)}
		if q.Role == topology.RoleHold {
			st.Delay = &metav1.Duration{Duration: q.Delay}
		}
		if o, ok := old[st.Name]; ok {
			st.Ready, st.InFlight = o.Ready, o.InFlight
			delete(old, st.Name)
		}
		queues = append(queues, st)
	}
	for _, o := range s.topo.Status.Queues {
		q, left := old[o.Name]
		if !left {
			continue
		}
		if q.Role == v1alpha1.QueueRoleHold {
			generation := s.topo.Generation
			q.Role, q.RetiredGeneration, q.RetiredAt = v1alpha1.QueueRoleRetired, &generation, &now
			s.notes = append(s.notes, normal(EventTierRetired, actionReconcile, fmt.Sprintf("hold queue %q left the spec; it is deleted once it is unused and empty", q.Name)))
		}
		queues = append(queues, q)
	}
	s.status.Queues = queues
}

// declare compares the broker with the spec, and creates or repairs what differs.
func (r *topologyReconciler) declare(ctx context.Context, s *topologyScope) (verdict, error) {
	seen, err := s.entry.observer.observe(ctx, s.decl)
	if err != nil {
		return r.failed(s, err), nil
	}
	s.observed = seen
	defer func() { s.entry.observer.track(s.key(), s.decl, s.tracked(), r.settledWith(s)) }()
	if seen.DriftKnown && len(seen.Warnings) > 0 {
		s.conds.warn(v1alpha1.ConditionMessagesAtRisk, plain(errors.New(strings.Join(seen.Warnings, "; "))))
	}
	if fixed := conflict(seen); fixed != nil {
		return s.immutable(fixed), nil
	}
	missing := differences(seen)
	if s.topo.Spec.Paused {
		return s.pausedWith(seen, missing), nil
	}
	if len(missing) == 0 && r.verified(s, seen) {
		s.declared(seen, "")
		return next, nil
	}
	if err := s.entry.declare(ctx, s.decl); err != nil {
		return r.failed(s, err), nil
	}
	repaired := ""
	if len(missing) > 0 && s.wasDeclared() {
		repaired = strings.Join(missing, "; ")
		r.metrics.repairs.WithLabelValues(s.topo.Namespace, s.topo.Name).Inc()
		s.within(jitter(resyncOf(s.broker))) // then the condition says that all is well again
		s.notes = append(s.notes, warning(EventDrifted, actionDeclare, "repaired on the broker: "+repaired))
	}
	s.created = allMissing(seen)
	r.checked.set(s.key(), s.verification())
	s.declared(seen, repaired)
	return next, nil
}

// settledWith is the fingerprint of what this pass has dealt with: after a declaration nothing differs any more.
func (r *topologyReconciler) settledWith(s *topologyScope) string {
	if d := s.conds.get(v1alpha1.ConditionDeclared); d != nil && d.Status == metav1.ConditionTrue {
		return fingerprint(broker.Observation{Warnings: s.observed.Warnings})
	}
	return fingerprint(s.observed)
}

// wasDeclared says whether this generation was declared before, so that a difference is somebody else's doing.
func (s *topologyScope) wasDeclared() bool {
	for _, c := range s.topo.Status.Conditions {
		if c.Type == v1alpha1.ConditionDeclared {
			return c.Status == metav1.ConditionTrue && c.ObservedGeneration == s.topo.Generation
		}
	}
	return false
}

// declared fills the conditions of success.
func (s *topologyScope) declared(seen broker.Observation, repaired string) {
	if !s.topo.Spec.Paused {
		s.unbound()
	}
	if s.topo.Spec.External {
		s.conds.true(v1alpha1.ConditionDeclared, v1alpha1.ReasonVerified, fmt.Sprintf("queue %q exists", s.status.Queue))
	} else {
		s.conds.true(v1alpha1.ConditionDeclared, v1alpha1.ReasonDeclared, "every queue is as the spec says")
	}
	switch {
	case repaired != "":
		s.conds.false(v1alpha1.ConditionDrift, v1alpha1.ReasonRepaired, "repaired on the broker: "+repaired)
	case !seen.DriftKnown:
		s.conds.unknown(v1alpha1.ConditionDrift, v1alpha1.ReasonDriftUnknown, "the broker does not show the arguments of its queues: set the Broker's management URL")
	default:
		s.conds.false(v1alpha1.ConditionDrift, v1alpha1.ReasonInSync, "the broker is as declared")
	}
	s.conds.summarise(done, v1alpha1.ReasonReady, fmt.Sprintf("queue %q is declared on Broker %s/%s", s.status.Queue, s.broker.Namespace, s.broker.Name))
}

// pausedWith says how the broker stands without touching it.
func (s *topologyScope) pausedWith(seen broker.Observation, missing []string) verdict {
	if len(missing) == 0 {
		s.declared(seen, "")
		return next
	}
	message := "spec.paused is set and the broker differs: " + strings.Join(missing, "; ")
	s.conds.true(v1alpha1.ConditionDrift, v1alpha1.ReasonDrifted, message)
	s.conds.false(v1alpha1.ConditionDeclared, v1alpha1.ReasonPaused, message)
	s.conds.summarise(stalled, v1alpha1.ReasonPaused, message+"; unset spec.paused to have it declared")
	return next
}

// allMissing says whether no queue was there.
func allMissing(o broker.Observation) bool {
	return !slices.ContainsFunc(o.Objects, func(obj broker.ObservedObject) bool { return obj.Role != "" && !obj.Missing })
}

// conflict is the first difference that the broker cannot change.
func conflict(o broker.Observation) *broker.ConflictError {
	for _, obj := range o.Objects {
		for _, d := range obj.Diffs {
			if !d.Repairable {
				return &broker.ConflictError{Object: fmt.Sprintf("%s %q", obj.Kind, obj.Name), Diff: d}
			}
		}
	}
	return nil
}

// differences names what is missing or differs, in the order of the observation.
func differences(o broker.Observation) []string {
	var out []string
	for _, obj := range o.Objects {
		switch {
		case obj.Role == topology.RoleRetired:
		case obj.Missing:
			out = append(out, fmt.Sprintf("%s %q was missing", obj.Kind, obj.Name))
		case len(obj.Diffs) > 0:
			d := obj.Diffs[0]
			out = append(out, fmt.Sprintf("%s %q had %s %s, not %s", obj.Kind, obj.Name, d.Property, d.Have, d.Want))
		}
	}
	return out
}

func (s *topologyScope) immutable(c *broker.ConflictError) verdict {
	remedy := c.Diff.Remedy
	if remedy == "" {
		remedy = "drain and delete it by hand, choose another queue name, or set external: true in another Topology"
	}
	message := plain(c) + ": " + remedy
	s.conds.false(v1alpha1.ConditionDeclared, v1alpha1.ReasonImmutableField, message)
	s.conds.true(v1alpha1.ConditionDrift, v1alpha1.ReasonDrifted, plain(c))
	return s.stop(stalled, v1alpha1.ReasonImmutableField, message)
}

// failed turns an error of the broker into conditions.
func (r *topologyReconciler) failed(s *topologyScope, err error) verdict {
	if fixed, ok := errors.AsType[*broker.ConflictError](err); ok {
		return s.immutable(fixed)
	}
	text := plain(err)
	switch {
	case errors.Is(err, broker.ErrUnavailable), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return s.await()
	case errors.Is(err, broker.ErrNotFound):
		s.within(jitter(missingRetry))
		reason := v1alpha1.ReasonExchangeNotFound
		switch {
		case s.topo.Spec.Source != nil:
			reason = v1alpha1.ReasonSourceNotFound
		case s.topo.Spec.External:
			reason = v1alpha1.ReasonExternalNotFound
		}
		s.conds.false(v1alpha1.ConditionDeclared, reason, text+": have it created; it is looked for again")
		return s.stop(working, reason, text+": have it created; it is looked for again")
	case errors.Is(err, broker.ErrUnauthorized):
		s.within(jitter(resyncOf(s.broker)))
		message := "the Broker's credentials lack a right: " + text
		s.conds.false(v1alpha1.ConditionDeclared, v1alpha1.ReasonAccessRefused, message)
		return s.stop(stalled, v1alpha1.ReasonAccessRefused, message)
	case errors.Is(err, broker.ErrUnsupported):
		s.conds.false(v1alpha1.ConditionDeclared, v1alpha1.ReasonUnsupported, text)
		return s.stop(stalled, v1alpha1.ReasonUnsupported, text)
	}
	s.within(jitter(missingRetry))
	s.conds.false(v1alpha1.ConditionDeclared, v1alpha1.ReasonDeclareFailed, text)
	return s.stop(working, v1alpha1.ReasonDeclareFailed, text)
}

// tracked are the queues to count, with their roles.
func (s *topologyScope) tracked() []trackedQueue {
	out := make([]trackedQueue, len(s.status.Queues))
	for i, q := range s.status.Queues {
		out[i] = trackedQueue{q.Name, topology.Role(q.Role)}
	}
	return out
}

// verifications remembers, where a broker does not show the arguments of its queues, for which Topologies a
// declaration over the present connection has found them right. A no-op pass then declares nothing.
type verifications struct {
	mu   sync.Mutex
	done map[types.NamespacedName]verification
}

type verification struct {
	uid        types.UID
	generation int64
	broker     types.UID
	epoch      int
}

func (s *topologyScope) verification() verification {
	return verification{s.topo.UID, s.topo.Generation, s.broker.UID, s.entry.currentEpoch()}
}

// verified says whether nothing is left to declare: the broker showed that all is well, or said so when asked before.
func (r *topologyReconciler) verified(s *topologyScope, seen broker.Observation) bool {
	return seen.DriftKnown || r.checked.is(s.key(), s.verification())
}

func (v *verifications) set(key types.NamespacedName, to verification) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.done == nil {
		v.done = map[types.NamespacedName]verification{}
	}
	v.done[key] = to
}

func (v *verifications) is(key types.NamespacedName, want verification) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.done[key] == want
}

func (v *verifications) forget(key types.NamespacedName) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.done, key)
}
