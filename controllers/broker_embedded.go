package controllers

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	applyapps "k8s.io/client-go/applyconfigurations/apps/v1"
	applycore "k8s.io/client-go/applyconfigurations/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/controllers/render"
)

// +kubebuilder:rbac:groups=apps,resources=statefulsets,verbs=get;list;watch;create;patch
// +kubebuilder:rbac:groups="",resources=services,verbs=get;create;patch
// +kubebuilder:rbac:groups="",resources=persistentvolumeclaims,verbs=get;patch
// +kubebuilder:rbac:groups="",resources=secrets,verbs=get;list;watch;create;update
// +kubebuilder:rbac:groups="",resources=pods,verbs=list

const singleReplicaText = "one server without a replica: nothing is delivered while its pod is down, and what is lost with its volume is lost; " +
	"for data that must not be lost or late run a broker of your own and use nats, or another kind"

// embed makes the server of a Broker with spec.embedded so, and says whether it is up. Where it is not, the conditions
// say why; the error is one of the API server's that may pass.
func (r *brokerReconciler) embed(ctx context.Context, s *brokerScope) (up bool, err error) {
	b := s.broker
	s.conds.warn(v1alpha1.ConditionSingleReplica, singleReplicaText)
	if !b.DeletionTimestamp.IsZero() { // it is used to the end, and not made again
		for _, kind := range []string{v1alpha1.ConditionServerReady, v1alpha1.ConditionUpdateAvailable, v1alpha1.ConditionVolumeDiffers} {
			s.conds.keep(kind)
		}
		return true, nil
	}
	var set *appsv1.StatefulSet
	err = r.embedSecret(ctx, b)
	if err == nil {
		set, err = r.embedObjects(ctx, s)
	}
	if err != nil {
		return false, s.serverFailed(err)
	}
	if set.Status.UpdatedReplicas < set.Status.Replicas && set.Status.ObservedGeneration == set.Generation {
		s.conds.warn(v1alpha1.ConditionUpdateAvailable, fmt.Sprintf(
			"the pod of the server is older than what the operator would make now, and goes on; to update it, delete it when it suits: kubectl -n %s delete pod %s", b.Namespace, render.EmbeddedPod(b)))
	}
	if set.Status.ReadyReplicas == 0 {
		why, err := r.whyNotUp(ctx, b)
		if err != nil {
			return false, err
		}
		s.conds.false(v1alpha1.ConditionServerReady, v1alpha1.ReasonServerStarting, why)
		s.fail(working, v1alpha1.ReasonServerStarting, why)
		s.after = backoff(r.failures.add(client.ObjectKeyFromObject(b))) // its StatefulSet tells, its pod and its claim do not
		return false, nil
	}
	s.conds.true(v1alpha1.ConditionServerReady, v1alpha1.ReasonServerReady, fmt.Sprintf("pod %q serves at %s", render.EmbeddedPod(b), render.EmbeddedAddress(b)))
	return true, nil
}

// refusedError is something about the server's objects that a person has to mend, or that passes by itself.
type refusedError struct {
	p               progress
	reason, message string
}

func (e *refusedError) Error() string { return e.message }

// serverFailed turns what a person has to mend into conditions, and returns the rest.
func (s *brokerScope) serverFailed(err error) error {
	p, reason, message := stalled, "", ""
	switch e := err.(type) { //nolint:errorlint // both are returned as they are
	case *secretError:
		reason, message = e.reason, e.message
	case *refusedError:
		p, reason, message = e.p, e.reason, e.message
	default:
		return err
	}
	s.conds.false(v1alpha1.ConditionServerReady, reason, message)
	s.fail(p, reason, message)
	s.after = jitter(resyncOf(s.broker)) // rights and admission may change without an event
	if p == working {
		s.after = backoff(1)
	}
	return nil
}

// embedObjects applies Service and StatefulSet where they differ, and sees to the volume.
func (r *brokerReconciler) embedObjects(ctx context.Context, s *brokerScope) (*appsv1.StatefulSet, error) {
	b := s.broker
	key := client.ObjectKey{Namespace: b.Namespace, Name: render.EmbeddedName(b)}
	set, service := &appsv1.StatefulSet{}, &corev1.Service{}
	for kind, o := range map[string]client.Object{"StatefulSet": set, "Service": service} {
		if err := r.live.Get(ctx, key, o); client.IgnoreNotFound(err) != nil {
			return nil, refusedBy(kind, err)
		}
		if err := oursOf(b, kind, o); err != nil {
			return nil, err
		}
	}
	claim, err := r.embedVolume(ctx, s)
	if err != nil {
		return nil, err
	}
	e := render.Embedded{Broker: b, Image: r.embedded.image, Size: *b.Spec.Embedded.Storage.Size}
	if claim != nil {
		if have := claim.Spec.Resources.Requests[corev1.ResourceStorage]; have.Cmp(e.Size) > 0 {
			e.Size = have
		}
	}
	exists := set.UID != ""
	if exists {
		if len(set.Spec.VolumeClaimTemplates) > 0 {
			e.Claim = &set.Spec.VolumeClaimTemplates[0].Spec
		}
		if e.Image == "" && len(set.Spec.Template.Spec.Containers) > 0 {
			e.Image = set.Spec.Template.Spec.Containers[0].Image
		}
	}
	if e.Image == "" {
		return nil, &refusedError{stalled, v1alpha1.ReasonServerImageMissing, "the operator does not know which image to run: start it with --embedded-image, which is its own image"}
	}
	carriedService, err := applycore.ExtractService(service, render.EmbeddedOwner)
	if err != nil {
		return nil, fmt.Errorf("find the fields of Service %s: %w", key.Name, err)
	}
	if err := r.applyWhereDiffers(ctx, "Service", service.UID != "", carriedService, e.Service()); err != nil {
		return nil, err
	}
	carriedSet, err := applyapps.ExtractStatefulSet(set, render.EmbeddedOwner)
	if err != nil {
		return nil, fmt.Errorf("find the fields of StatefulSet %s: %w", key.Name, err)
	}
	want := e.StatefulSet()
	if carriedSet.Spec != nil { // the claim's template cannot change, and comes back with defaults in it
		carriedSet.Spec.VolumeClaimTemplates = want.Spec.VolumeClaimTemplates
	}
	if err := r.applyWhereDiffers(ctx, "StatefulSet", exists, carriedSet, want); err != nil {
		return nil, err
	}
	if err := r.live.Get(ctx, key, set); err != nil {
		return nil, fmt.Errorf("read StatefulSet %s: %w", key.Name, err)
	}
	return set, nil
}

// applyWhereDiffers applies an object that is not as it should be: what is ours in it, as it is now, is compared.
func (r *brokerReconciler) applyWhereDiffers(ctx context.Context, kind string, exists bool, have, want runtime.ApplyConfiguration) error {
	if exists {
		same, err := render.SamePatch(have, want)
		if err != nil || same {
			return err
		}
	}
	if err := r.client.Apply(ctx, want, client.FieldOwner(render.EmbeddedOwner), client.ForceOwnership); err != nil {
		return refusedBy(kind, err)
	}
	log.FromContext(ctx).Info("Applied", "kind", kind, "made", !exists)
	return nil
}

// oursOf refuses an object of the server's name that somebody else made. One of an earlier Broker of this name is about
// to go.
func oursOf(b *v1alpha1.Broker, kind string, o client.Object) error {
	if o.GetUID() == "" || metav1.IsControlledBy(o, b) {
		return nil
	}
	if c := metav1.GetControllerOf(o); c != nil && c.Kind == "Broker" && c.Name == b.Name {
		return &refusedError{working, v1alpha1.ReasonServerStarting, fmt.Sprintf("%s %q of an earlier Broker of this name is still there and about to be deleted", kind, o.GetName())}
	}
	return &refusedError{stalled, v1alpha1.ReasonObjectNotOurs, fmt.Sprintf("%s %q exists and was not made by the operator: delete it, or name the Broker differently", kind, o.GetName())}
}

// refusedBy tells what a person has to mend from what passes by itself.
func refusedBy(kind string, err error) error {
	if apierrors.IsForbidden(err) || apierrors.IsInvalid(err) {
		return &refusedError{stalled, v1alpha1.ReasonServerRefused, fmt.Sprintf("the %s of the embedded broker is refused: %s", kind, plain(err))}
	}
	return fmt.Errorf("%s of the embedded broker: %w", kind, err)
}

// whyNotUp says what keeps the pod from being ready, in words that stay the same while the reason does.
func (r *brokerReconciler) whyNotUp(ctx context.Context, b *v1alpha1.Broker) (string, error) {
	name := render.EmbeddedPod(b)
	var pods corev1.PodList
	if err := r.live.List(ctx, &pods, client.InNamespace(b.Namespace), client.MatchingLabels(render.EmbeddedSelector(b))); err != nil {
		return "", fmt.Errorf("list pods of the embedded broker: %w", err)
	}
	for i := range pods.Items {
		p := &pods.Items[i]
		if p.Name != name {
			continue
		}
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
				return fmt.Sprintf("pod %q cannot be scheduled: %s", name, c.Message), nil
			}
		}
		for _, c := range p.Status.ContainerStatuses {
			if w := c.State.Waiting; w != nil && w.Reason != "" && w.Reason != "ContainerCreating" {
				return fmt.Sprintf("pod %q does not run (%s): see kubectl -n %s describe pod %s, and its log", name, w.Reason, b.Namespace, name), nil
			}
		}
		return fmt.Sprintf("pod %q starts", name), nil
	}
	claim := &corev1.PersistentVolumeClaim{}
	err := r.live.Get(ctx, client.ObjectKey{Namespace: b.Namespace, Name: render.EmbeddedClaim(b)}, claim)
	if err == nil && claim.Status.Phase == corev1.ClaimPending {
		return fmt.Sprintf("there is no pod %q yet, and its volume %q is not bound: does the cluster have a StorageClass for it?", name, claim.Name), nil
	}
	return fmt.Sprintf("there is no pod %q yet", name), client.IgnoreNotFound(err)
}
