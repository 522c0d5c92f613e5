package controllers

import (
	"context"
	"crypto/rand"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/controllers/render"
)

// embedVolume compares the claim with the spec, has it grow, and says what cannot be. Nil: there is no claim yet.
func (r *brokerReconciler) embedVolume(ctx context.Context, s *brokerScope) (*corev1.PersistentVolumeClaim, error) {
	b := s.broker
	claim := &corev1.PersistentVolumeClaim{}
	err := r.live.Get(ctx, client.ObjectKey{Namespace: b.Namespace, Name: render.EmbeddedClaim(b)}, claim)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, refusedBy("PersistentVolumeClaim", err)
	}
	storage := b.Spec.Embedded.Storage
	want, have, got := *storage.Size, claim.Spec.Resources.Requests[corev1.ResourceStorage], claim.Status.Capacity[corev1.ResourceStorage]
	differs := func(reason, format string, args ...any) {
		s.conds.true(v1alpha1.ConditionVolumeDiffers, reason, fmt.Sprintf(format, args...))
	}
	class := ""
	if c := claim.Spec.StorageClassName; c != nil {
		class = *c
	}
	switch {
	case want.Cmp(have) < 0:
		differs(v1alpha1.ReasonVolumeCannotShrink, "the volume %q has %s and the spec asks for %s: a volume cannot shrink; write %s", claim.Name, have.String(), want.String(), have.String())
	case want.Cmp(have) > 0:
		if err := r.growClaim(ctx, claim, want.String()); err != nil {
			if !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
				return nil, fmt.Errorf("make volume %q larger: %w", claim.Name, err)
			}
			differs(v1alpha1.ReasonVolumeGrowthRefused, "the volume %q has %s and cannot be made %s: %s", claim.Name, have.String(), want.String(), plain(err))
			return claim, nil
		}
		s.notes = append(s.notes, normal(EventVolumeGrown, actionReconcile, fmt.Sprintf("the claim %q asks for %s now, before for %s", claim.Name, want.String(), have.String())))
		differs(v1alpha1.ReasonVolumeGrowing, "the volume %q grows to %s", claim.Name, want.String())
	case !got.IsZero() && got.Cmp(have) < 0:
		differs(v1alpha1.ReasonVolumeGrowing, "the volume %q grows to %s", claim.Name, have.String())
	case storage.StorageClassName != "" && class != storage.StorageClassName:
		differs(v1alpha1.ReasonStorageClassFixed, "the volume %q is of StorageClass %q: the class is chosen when the volume is made; write that one", claim.Name, class)
	}
	return claim, nil
}

func (r *brokerReconciler) growClaim(ctx context.Context, claim *corev1.PersistentVolumeClaim, size string) error {
	patch := fmt.Appendf(nil, `{"metadata":{"uid":%q},"spec":{"resources":{"requests":{"storage":%q}}}}`, claim.UID, size)
	return r.client.Patch(ctx, claim, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(render.EmbeddedOwner))
}

// annotationCredentials says where the server's first user comes from.
const annotationCredentials = "shove.dev/embedded-credentials"

const (
	credentialsGenerated = "generated"
	credentialsGiven     = "spec.credentials"
)

// embedSecret sees to the users of the server. A password that was generated once stays. The error is a *secretError or
// a *refusedError where a person has to act.
func (r *brokerReconciler) embedSecret(ctx context.Context, b *v1alpha1.Broker) error {
	name := render.EmbeddedName(b)
	have := &corev1.Secret{}
	err := r.live.Get(ctx, client.ObjectKey{Namespace: b.Namespace, Name: name}, have)
	switch {
	case apierrors.IsForbidden(err):
		return &secretError{v1alpha1.ReasonSecretForbidden, fmt.Sprintf("the operator may not read and write Secrets in namespace %q: add it to the namespaces whose Secrets it may read", b.Namespace)}
	case client.IgnoreNotFound(err) != nil:
		return fmt.Errorf("read the Secret of the embedded broker: %w", err)
	}
	if err := oursOf(b, "Secret", have); err != nil {
		return err
	}
	data, from, err := r.embeddedUsers(ctx, b, have)
	if err != nil {
		return err
	}
	want := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: b.Namespace, Name: name,
		Labels:          render.Embedded{Broker: b}.Labels(),
		Annotations:     map[string]string{annotationCredentials: from},
		OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(b, v1alpha1.GroupVersion.WithKind("Broker"))},
	}, Type: corev1.SecretTypeOpaque, Data: data}
	switch {
	case have.UID == "":
		err = r.client.Create(ctx, want)
	case sameMeta(have, want) && sameBytes(have.Data, want.Data):
		return nil
	default:
		merged := have.DeepCopy()
		adopt(merged, want)
		merged.Data = want.Data
		err = r.client.Update(ctx, merged)
	}
	if apierrors.IsForbidden(err) || apierrors.IsInvalid(err) {
		return refusedBy("Secret", err)
	}
	if err != nil {
		return fmt.Errorf("write the Secret of the embedded broker: %w", err)
	}
	return nil
}

// embeddedUsers are the keys of the server's Secret: its first user, which is the operator's, and one with fewer rights
// where the Broker has workloadCredentials.
func (r *brokerReconciler) embeddedUsers(ctx context.Context, b *v1alpha1.Broker, have *corev1.Secret) (data map[string][]byte, from string, err error) {
	given := func(c *v1alpha1.CredentialsSource, field string) (user, password []byte, err error) {
		s, err := readSecret(ctx, r.live, types.NamespacedName{Namespace: b.Namespace, Name: c.SecretRef.Name}, field)
		if err != nil {
			return nil, nil, err
		}
		user, password = s.Data[keyUsername], s.Data[keyPassword]
		if len(user) == 0 || len(password) == 0 {
			return nil, nil, missingKey(s, "an embedded broker takes username and password")
		}
		return user, password, nil
	}
	name := render.EmbeddedName(b)
	user, password := have.Data[keyUsername], have.Data[keyPassword]
	from = credentialsGenerated
	if c := b.Spec.Credentials; c != nil && c.SecretRef.Name != name {
		from = credentialsGiven
		if user, password, err = given(c, "spec.credentials"); err != nil {
			return nil, "", err
		}
	} else if len(user) == 0 || len(password) == 0 || have.Annotations[annotationCredentials] == credentialsGiven {
		user, password = []byte("shove"), []byte(rand.Text())
	}
	data = map[string][]byte{keyUsername: user, keyPassword: password}
	c := b.Spec.WorkloadCredentials
	if c == nil || c.SecretRef.Name == name {
		return data, from, nil
	}
	workload, secret, err := given(c, "spec.workloadCredentials")
	switch {
	case err != nil:
		return nil, "", err
	case string(workload) != string(user):
		data[render.EmbeddedWorkloadPrefix+keyUsername], data[render.EmbeddedWorkloadPrefix+keyPassword] = workload, secret
	case string(secret) != string(password):
		return nil, "", &secretError{v1alpha1.ReasonInvalidSpec, fmt.Sprintf("Secret %q, named by spec.workloadCredentials, has the user name of the operator and another password: give the workloads a user name of their own", c.SecretRef.Name)}
	}
	return data, from, nil
}

// volumeLeftEvents names the volume that a deleted Broker leaves behind. There is no finalizer for it, so that nobody's
// namespace waits for the operator.
func (d *deps) volumeLeftEvents() handler.EventHandler {
	return handler.Funcs{DeleteFunc: func(ctx context.Context, e event.DeleteEvent, _ workqueue.TypedRateLimitingInterface[reconcile.Request]) {
		b := e.Object.(*v1alpha1.Broker)
		if b.Spec.Embedded == nil {
			return
		}
		claim := &corev1.PersistentVolumeClaim{}
		err := d.live.Get(ctx, client.ObjectKey{Namespace: b.Namespace, Name: render.EmbeddedClaim(b)}, claim)
		if err != nil || !claim.DeletionTimestamp.IsZero() {
			if client.IgnoreNotFound(err) != nil {
				log.FromContext(ctx).Error(err, "Could not look for the volume of a deleted Broker", "broker", client.ObjectKeyFromObject(b))
			}
			return
		}
		send(d.events, b, []note{warning(EventVolumeLeft, actionDelete, fmt.Sprintf(
			"the server of the Broker goes and its volume stays, with all messages: PersistentVolumeClaim %q. A Broker of this name uses it again; to lose the messages: kubectl -n %s delete pvc %s", claim.Name, b.Namespace, claim.Name))})
	}}
}
