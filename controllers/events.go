package controllers

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"

	"github.com/shove-dev/shove/api/v1alpha1"
)

// Reasons of events that are not also reasons of conditions.
const (
	// EventDrifted: the broker was not as declared, and was repaired.
	EventDrifted = "Drifted"
	// EventTierRetired: a hold queue left the spec and waits to be deleted.
	EventTierRetired = "TierRetired"
	// EventTierDeleted: a retired hold queue was empty and is deleted.
	EventTierDeleted = "TierDeleted"
	// EventQueuesDeleted: the deletion policy deleted queues; the note says how many messages were in them.
	EventQueuesDeleted = "QueuesDeleted"
	// EventQueuesLeft: the object goes and queues stay on the broker; the note names them.
	EventQueuesLeft = "QueuesLeftBehind"
	// EventDependentsLeft: a Broker goes although Topologies refer to it.
	EventDependentsLeft = "DependentsLeftBehind"
	// EventVolumeLeft: a Broker with spec.embedded is gone and the volume of its server stays; the note names it.
	EventVolumeLeft = "VolumeLeftBehind"
	// EventVolumeGrown: the claim of an embedded broker's volume was made larger.
	EventVolumeGrown = "VolumeGrown"
	// EventCredentialsRotated: a new connection was made with a changed Secret.
	EventCredentialsRotated = "CredentialsRotated"
)

// Actions of events.
const (
	actionReconcile = "Reconcile"
	actionDeclare   = "Declare"
	actionDelete    = "Delete"
	actionConnect   = "Connect"
)

// note is one event to send once the status that it is about is written.
type note struct{ kind, reason, action, text string }

func normal(reason, action, text string) note {
	return note{corev1.EventTypeNormal, reason, action, text}
}

func warning(reason, action, text string) note {
	return note{corev1.EventTypeWarning, reason, action, text}
}

// send sends events about an object. The API allows 1,024 characters.
func send(r events.EventRecorder, about runtime.Object, notes []note) {
	for _, n := range notes {
		r.Eventf(about, nil, n.kind, n.reason, n.action, "%s", bounded(n.text, 1000))
	}
}

// transitions are the events of what changed between two sets of conditions: Ready when it changes for a reason that
// a person wants to know, and every warning when it appears. Their own kinds are given by name.
func transitions(old, now []metav1.Condition, warnings []string) []note {
	var out []note
	before, after := meta.FindStatusCondition(old, v1alpha1.ConditionReady), meta.FindStatusCondition(now, v1alpha1.ConditionReady)
	if after != nil && (before == nil || before.Status != after.Status || before.Reason != after.Reason) {
		switch {
		case after.Status == metav1.ConditionTrue:
			if before == nil || before.Status != after.Status {
				out = append(out, normal(after.Reason, actionReconcile, after.Message))
			}
		case quiet[after.Reason]:
		case after.Reason == v1alpha1.ReasonBrokerNotReady && (before == nil || before.Status != metav1.ConditionTrue):
			// it has not been ready yet
		default:
			out = append(out, warning(after.Reason, actionReconcile, after.Message))
		}
	}
	for _, kind := range warnings {
		if meta.IsStatusConditionTrue(now, kind) && !meta.IsStatusConditionTrue(old, kind) {
			c := meta.FindStatusCondition(now, kind)
			out = append(out, warning(c.Reason, actionReconcile, c.Message))
		}
	}
	return out
}

// quiet are reasons of Ready=False that are no news.
var quiet = map[string]bool{v1alpha1.ReasonProgressing: true, v1alpha1.ReasonDeleting: true, v1alpha1.ReasonPaused: true}
