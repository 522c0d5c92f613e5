package controllers

import (
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/controllers/render"
)

// groupFacts is everything that a ConsumerGroup's status is made from.
type groupFacts struct {
	group    *v1alpha1.ConsumerGroup
	consumer *render.Consumer
	outcome  *outcome
	topology *v1alpha1.Topology // nil: there is none
	scaling  *render.Finding
	timeouts *render.Finding
}

// status is the whole status. It is a pure function of the facts and the conditions of the last pass.
func (f groupFacts) status(conds *conditions) v1alpha1.ConsumerGroupStatus {
	s := v1alpha1.ConsumerGroupStatus{ObservedGeneration: f.group.Generation, Replicas: f.outcome.replicas, ReadyReplicas: f.outcome.ready}
	if f.topology != nil {
		s.Backlog, s.CountsObservedAt = f.topology.Status.Counts, f.topology.Status.CountsObservedAt
	}
	if f.consumer.Resolved() {
		s.Effective = render.Effective(f.consumer.Effective, f.consumer.Prefetch)
	}
	if !f.consumer.Blocked() {
		s.ConfigGeneration = f.outcome.generation
		s.TopologyGeneration = f.consumer.Topology.Generation
	}
	if f.outcome.carried {
		s.Injected = f.group.Spec.WorkloadRef
	}
	f.conditions(conds)
	s.Conditions = conds.list
	return s
}

func (f groupFacts) conditions(c *conditions) {
	f.topologyReady(c)
	c.true(v1alpha1.ConditionCredentialsReady, v1alpha1.ReasonCredentialsReady, "pods have the credentials that they need")
	if f.consumer.Broker == nil {
		c.unknown(v1alpha1.ConditionCredentialsReady, v1alpha1.ReasonProgressing, "the Broker is not known")
	}
	f.injected(c)
	f.warnings(c)
	for _, n := range f.consumer.Findings {
		switch n.Condition {
		case v1alpha1.ConditionTopologyReady, v1alpha1.ConditionCredentialsReady, v1alpha1.ConditionInjected:
			c.false(n.Condition, n.Reason, n.Message)
		default:
			c.true(n.Condition, n.Reason, n.Message)
		}
	}
	f.summarise(c)
}

func (f groupFacts) topologyReady(c *conditions) {
	switch {
	case f.topology == nil:
		c.false(v1alpha1.ConditionTopologyReady, v1alpha1.ReasonTopologyNotFound, fmt.Sprintf("Topology %q does not exist", f.group.Spec.TopologyRef.Name))
	case meta.IsStatusConditionTrue(f.topology.Status.Conditions, v1alpha1.ConditionReady):
		c.true(v1alpha1.ConditionTopologyReady, v1alpha1.ReasonTopologyReady, fmt.Sprintf("Topology %q is ready", f.topology.Name))
	default:
		c.false(v1alpha1.ConditionTopologyReady, v1alpha1.ReasonTopologyNotReady, fmt.Sprintf("Topology %q is not ready: its conditions say why", f.topology.Name))
	}
}

// injected is the injection's own finding, except for a group that is not served: then its finding is what matters.
func (f groupFacts) injected(c *conditions) {
	i := f.outcome.injection
	switch {
	case f.consumer.Blocked() && i.status != metaFalse:
		c.false(v1alpha1.ConditionInjected, v1alpha1.ReasonProgressing, "this group is not part of the configuration: other conditions say why")
	case i.status != "":
		c.set(v1alpha1.ConditionInjected, i.status, i.reason, i.message)
	default:
		c.unknown(v1alpha1.ConditionInjected, v1alpha1.ReasonProgressing, "the injection has not been tried yet")
	}
	if d := f.outcome.delivery; d.status != "" && !f.consumer.Blocked() {
		c.set(v1alpha1.ConditionConfigDelivered, d.status, d.reason, d.message)
	}
}

func (f groupFacts) warnings(c *conditions) {
	if f.group.Spec.Paused {
		c.true(v1alpha1.ConditionPaused, v1alpha1.ReasonPaused, "spec.paused is set: pods do not fetch; what they are working on is finished")
	}
	for _, n := range []*render.Finding{f.scaling, f.timeouts} {
		if n != nil {
			c.true(n.Condition, n.Reason, n.Message)
		}
	}
	if f.group.Spec.Replicas != nil {
		c.false(v1alpha1.ConditionScalingActive, v1alpha1.ReasonScalingNotAvailable, "this release does not scale: the workload's replicas are left as they are")
	}
	if f.outcome.grace != "" && !f.consumer.Blocked() {
		c.warn(v1alpha1.ConditionGracePeriodTooShort, f.outcome.grace)
	}
	if text := f.outcome.restarts[f.group.Spec.TopologyRef.Name]; text != "" {
		c.warn(v1alpha1.ConditionRestartRequired, text)
	}
}

// summarise says in Ready what explains the state best. A group is ready when its pods get what its spec says; that
// some of them are still reading it is in ConfigDelivered, so that Ready does not flap with every option.
func (f groupFacts) summarise(c *conditions) {
	for _, n := range f.consumer.Findings {
		if n.Blocks {
			c.summarise(waitOrStall(n.Waits), n.Reason, n.Message)
			return
		}
	}
	for _, kind := range []string{v1alpha1.ConditionCredentialsReady, v1alpha1.ConditionInjected, v1alpha1.ConditionTopologyReady} {
		if n := c.get(kind); n.Status != metav1.ConditionTrue {
			c.summarise(waitOrStall(waits[n.Reason]), n.Reason, n.Message)
			return
		}
	}
	if f.scaling != nil {
		c.summarise(stalled, f.scaling.Reason, f.scaling.Message)
		return
	}
	if d := c.get(v1alpha1.ConditionConfigDelivered); d != nil && d.Reason == v1alpha1.ReasonConfigRejected {
		c.summarise(stalled, d.Reason, d.Message)
		return
	}
	c.summarise(done, v1alpha1.ReasonReady, "the workload has its configuration")
}

// waits are reasons with which nobody has to act: something that is watched may still come.
var waits = map[string]bool{
	v1alpha1.ReasonProgressing: true, v1alpha1.ReasonWorkloadNotFound: true, v1alpha1.ReasonTopologyNotFound: true,
	v1alpha1.ReasonTopologyNotReady: true,
}

func waitOrStall(waits bool) progress {
	if waits {
		return working
	}
	return stalled
}
