package controllers

import (
	"context"
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	applyapps "k8s.io/client-go/applyconfigurations/apps/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/controllers/render"
)

// workload is a Deployment or a StatefulSet, read past the cache: what matters is who owns which of its fields, and
// the cache does not keep that.
type workload struct {
	deployment  *appsv1.Deployment
	statefulSet *appsv1.StatefulSet
}

func metadataOf(t render.Target) *metav1.PartialObjectMetadata {
	m := &metav1.PartialObjectMetadata{}
	m.SetGroupVersionKind(appsv1.SchemeGroupVersion.WithKind(t.Kind))
	return m
}

// getWorkload is nil where there is no such workload.
func (r *injectReconciler) getWorkload(ctx context.Context, t render.Target) (*workload, error) {
	w := &workload{}
	var o client.Object
	switch v1alpha1.WorkloadKind(t.Kind) {
	case v1alpha1.WorkloadDeployment:
		w.deployment = &appsv1.Deployment{}
		o = w.deployment
	case v1alpha1.WorkloadStatefulSet:
		w.statefulSet = &appsv1.StatefulSet{}
		o = w.statefulSet
	default:
		return nil, nil
	}
	err := r.live.Get(ctx, client.ObjectKey{Namespace: t.Namespace, Name: t.Name}, o)
	if apierrors.IsNotFound(err) || err == nil && !o.GetDeletionTimestamp().IsZero() {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", t, err)
	}
	return w, nil
}

func (w *workload) object() client.Object {
	if w.deployment != nil {
		return w.deployment
	}
	return w.statefulSet
}

func (w *workload) template() *corev1.PodTemplateSpec {
	if w.deployment != nil {
		return &w.deployment.Spec.Template
	}
	return &w.statefulSet.Spec.Template
}

func (w *workload) selector() *metav1.LabelSelector {
	if w.deployment != nil {
		return w.deployment.Spec.Selector
	}
	return w.statefulSet.Spec.Selector
}

func (w *workload) replicas() *int32 {
	if w.deployment != nil {
		return &w.deployment.Status.Replicas
	}
	return &w.statefulSet.Status.Replicas
}

func (w *workload) readyReplicas() *int32 {
	if w.deployment != nil {
		return &w.deployment.Status.ReadyReplicas
	}
	return &w.statefulSet.Status.ReadyReplicas
}

// wanted is spec.replicas.
func (w *workload) wanted() int32 {
	p := (*int32)(nil)
	if w.deployment != nil {
		p = w.deployment.Spec.Replicas
	} else {
		p = w.statefulSet.Spec.Replicas
	}
	if p == nil {
		return 1
	}
	return *p
}

func (w *workload) optedIn() bool {
	return w.object().GetAnnotations()[v1alpha1.AnnotationInject] == "true"
}

func (w *workload) containers() []string {
	names := []string{}
	for _, c := range w.template().Spec.Containers {
		names = append(names, c.Name)
	}
	return names
}

func (w *workload) ownerReference() metav1.OwnerReference {
	kind := string(v1alpha1.WorkloadDeployment)
	if w.statefulSet != nil {
		kind = string(v1alpha1.WorkloadStatefulSet)
	}
	return metav1.OwnerReference{APIVersion: appsv1.SchemeGroupVersion.String(), Kind: kind, Name: w.object().GetName(), UID: w.object().GetUID()}
}

// carried is what the operator owns in the workload, as an apply configuration with the values that are there now.
func (w *workload) carried() (runtime.ApplyConfiguration, error) {
	if w.deployment != nil {
		a, err := applyapps.ExtractDeployment(w.deployment, render.FieldOwner)
		if err != nil {
			return nil, fmt.Errorf("find injected fields: %w", err)
		}
		return a, nil
	}
	a, err := applyapps.ExtractStatefulSet(w.statefulSet, render.FieldOwner)
	if err != nil {
		return nil, fmt.Errorf("find injected fields: %w", err)
	}
	return a, nil
}

// carries says whether the operator owns anything in the workload.
func (w *workload) carries() bool {
	for _, m := range w.object().GetManagedFields() {
		if isOurs(m) {
			return true
		}
	}
	return false
}

func isOurs(m metav1.ManagedFieldsEntry) bool {
	return m.Manager == render.FieldOwner && m.Operation == metav1.ManagedFieldsOperationApply && m.Subresource == ""
}

var gracePath = fieldpath.MakePathOrDie("spec", "template", "spec", "terminationGracePeriodSeconds")

// graceOwners says whether the operator, and whether anybody else, owns the grace period. A default that nobody wrote
// is nobody's, unless it came with a whole object: then its writer owns it.
func (w *workload) graceOwners() (us bool, others []string) {
	for _, m := range w.object().GetManagedFields() {
		if m.FieldsV1 == nil {
			continue
		}
		var set fieldpath.Set
		if err := set.FromJSON(m.FieldsV1.GetRawReader()); err != nil || !set.Has(gracePath) {
			continue
		}
		if isOurs(m) {
			us = true
		} else {
			others = append(others, m.Manager)
		}
	}
	return us, others
}

// inject applies the injection where the workload does not carry it already. False: it could not, and the outcome
// says why.
func (r *injectReconciler) inject(ctx context.Context, s *injectScope) (bool, error) {
	if s.plan.Empty() {
		// Nobody can be served just now. The template stays as it is: taking the injection away and bringing it back
		// would be two rollouts for a mistake in an option.
		s.out.carried = s.workload.carries()
		s.out.injected(metaFalse, v1alpha1.ReasonProgressing, "nothing can be injected: other conditions say why")
		return s.out.carried, nil
	}
	in, f := render.NewInjection(s.plan, s.workload.object().GetUID(), r.agentImage)
	if f != nil {
		s.out.injected(metaFalse, f.Reason, f.Message)
		return false, nil
	}
	carried, err := s.workload.carried()
	if err != nil {
		return false, err
	}
	patch, same, err := s.chooseGrace(in, carried)
	if err != nil {
		return false, err
	}
	if !same {
		err := r.client.Apply(ctx, patch, client.FieldOwner(render.FieldOwner))
		if err != nil {
			return false, s.refused(err)
		}
		log.FromContext(ctx).Info("Injected", "workload", s.target.String())
	}
	s.out.carried = true
	s.out.injected(metaTrue, v1alpha1.ReasonInjected, fmt.Sprintf("the pod template of %s carries the configuration", s.target))
	return true, nil
}

// chooseGrace decides on the grace period and says whether the workload carries exactly the result already. The grace
// period follows a drain timeout only together with another change of the template: an option alone never starts a
// rollout.
func (s *injectScope) chooseGrace(in render.Injection, carried runtime.ApplyConfiguration) (patch runtime.ApplyConfiguration, same bool, err error) {
	needed := render.GraceNeeded(s.plan)
	have := int64(corev1.DefaultTerminationGracePeriodSeconds)
	if g := s.workload.template().Spec.TerminationGracePeriodSeconds; g != nil {
		have = *g
	}
	us, others := s.workload.graceOwners()
	if len(others) == 0 && us {
		in.GraceSeconds = &have
	}
	if patch, err = in.Patch(); err != nil {
		return nil, false, err
	}
	if same, err = render.SamePatch(patch, carried); err != nil {
		return nil, false, err
	}
	switch {
	case have >= needed:
		return patch, same, nil
	case len(others) > 0:
		s.out.grace = fmt.Sprintf("terminationGracePeriodSeconds is %d, set by %s, and drainTimeout needs %d: set it to that", have, strings.Join(others, ", "), needed)
		return patch, same, nil
	case same:
		s.out.grace = fmt.Sprintf("terminationGracePeriodSeconds is %d and drainTimeout needs %d: set it in the workload's manifest; the operator starts no rollout for it", have, needed)
		return patch, true, nil
	}
	in.GraceSeconds = &needed
	patch, err = in.Patch()
	return patch, false, err
}

// refused turns an error of the apply into the outcome, where trying again would change nothing.
func (s *injectScope) refused(err error) error {
	status, ok := err.(apierrors.APIStatus)
	if !ok {
		return fmt.Errorf("inject into %s: %w", s.target, err)
	}
	var owners []string
	if d := status.Status().Details; d != nil {
		for _, c := range d.Causes {
			if c.Type == metav1.CauseTypeFieldManagerConflict {
				owners = append(owners, fmt.Sprintf("%s (%s)", strings.TrimPrefix(c.Field, "."), c.Message))
			}
		}
	}
	switch {
	case len(owners) > 0:
		s.out.injected(metaFalse, v1alpha1.ReasonFieldOwnedByOther, fmt.Sprintf(
			"%s: somebody else sets what the injection needs: %s. Nothing is forced: remove it there", s.target, strings.Join(owners, "; ")))
		return nil
	case apierrors.IsInvalid(err), apierrors.IsForbidden(err), apierrors.IsBadRequest(err):
		s.out.injected(metaFalse, v1alpha1.ReasonInjectionRefused, fmt.Sprintf("the API server refuses the injection into %s: %s", s.target, plain(err)))
		return nil
	default:
		return fmt.Errorf("inject into %s: %w", s.target, err)
	}
}

// takeBack removes everything that the operator owns in the workload, and the objects that were rendered for it.
func (r *injectReconciler) takeBack(ctx context.Context, s *injectScope) error {
	if s.workload != nil && s.workload.carries() {
		patch, err := render.Removal(s.target, s.workload.object().GetUID())
		if err != nil {
			return err
		}
		if err := r.client.Apply(ctx, patch, client.FieldOwner(render.FieldOwner)); ignoreGone(err) != nil {
			return fmt.Errorf("take the injection back from %s: %w", s.target, err)
		}
		log.FromContext(ctx).Info("Took the injection back", "workload", s.target.String())
	}
	return r.deleteObjects(ctx, s.target)
}
