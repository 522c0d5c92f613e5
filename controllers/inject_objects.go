package controllers

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/runtime/config"
)

// What marks a ConfigMap or Secret as the operator's.
const (
	labelManagedBy = "app.kubernetes.io/managed-by"
	// annotationTarget is "{kind}/{name}" of what it is rendered for.
	annotationTarget = "shove.dev/target"
	// annotationChangedAt is when the file or the credentials last changed.
	annotationChangedAt = "shove.dev/changed-at"
	// annotationRestart is a restartState.
	annotationRestart = "shove.dev/restart-state"
)

func ours(o client.Object) bool { return o.GetLabels()[labelManagedBy] == FieldOwner }

func metaName(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name} }

func parseTarget(namespace, s string) (render.Target, bool) {
	kind, name, ok := strings.Cut(s, "/")
	switch kind {
	case string(v1alpha1.WorkloadDeployment), string(v1alpha1.WorkloadStatefulSet), v1alpha1.KindConsumerGroup:
		return render.Target{Kind: kind, Namespace: namespace, Name: name}, ok && name != ""
	}
	return render.Target{}, false
}

// writeObjects writes the target's ConfigMap and Secret where they differ from what they should be. False: it could
// not, and the outcome says why.
func (r *injectReconciler) writeObjects(ctx context.Context, s *injectScope, existing *corev1.Secret) (bool, error) {
	version := ""
	if len(s.secrets) > 0 || existing != nil {
		secret := &corev1.Secret{ObjectMeta: s.objectMeta(), Type: corev1.SecretTypeOpaque, Data: s.secrets}
		ok, err := r.writeSecret(ctx, s, existing, secret)
		if err != nil || !ok {
			return false, err
		}
		version = secret.ResourceVersion
	}
	file, err := config.Marshal(s.config)
	if err != nil {
		return false, fmt.Errorf("encode RuntimeConfig of %s: %w", s.target, err)
	}
	return r.writeConfigMap(ctx, s, string(file), version)
}

// objectMeta is what the rendered objects have in common. They belong to the workload: they stay as long as pods may
// mount them, whoever deletes what.
func (s *injectScope) objectMeta() metav1.ObjectMeta {
	m := metav1.ObjectMeta{Namespace: s.target.Namespace, Name: s.target.ObjectName(),
		Labels:      map[string]string{labelManagedBy: FieldOwner},
		Annotations: map[string]string{annotationTarget: s.target.Kind + "/" + s.target.Name}}
	if s.workload != nil {
		m.OwnerReferences = []metav1.OwnerReference{s.workload.ownerReference()}
		return m
	}
	for _, c := range s.out.members.consumers {
		m.OwnerReferences = append(m.OwnerReferences, metav1.OwnerReference{APIVersion: v1alpha1.GroupVersion.String(), Kind: v1alpha1.KindConsumerGroup, Name: c.Group.Name, UID: c.Group.UID})
	}
	return m
}

func (r *injectReconciler) writeSecret(ctx context.Context, s *injectScope, existing, want *corev1.Secret) (bool, error) {
	if existing == nil {
		err := r.client.Create(ctx, want)
		return r.written1(s, "Secret", err)
	}
	if !ours(existing) {
		return r.notOurs(s, "Secret"), nil
	}
	if sameMeta(existing, want) && sameBytes(existing.Data, want.Data) {
		want.ResourceVersion = existing.ResourceVersion
		return true, nil
	}
	merged := existing.DeepCopy()
	adopt(merged, want)
	merged.Data = want.Data
	err := r.client.Update(ctx, merged)
	want.ResourceVersion = merged.ResourceVersion
	return r.written1(s, "Secret", err)
}

func (r *injectReconciler) writeConfigMap(ctx context.Context, s *injectScope, file, secretVersion string) (bool, error) {
	existing := &corev1.ConfigMap{}
	err := r.live.Get(ctx, client.ObjectKey{Namespace: s.target.Namespace, Name: s.target.ObjectName()}, existing)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read rendered ConfigMap: %w", err)
	}
	found := err == nil
	if found && !ours(existing) {
		return r.notOurs(s, "ConfigMap"), nil
	}
	now := r.clock.Now().UTC().Truncate(time.Second)
	s.token = s.config.Generation
	if secretVersion != "" {
		s.token += "-" + secretVersion
	}
	want := &corev1.ConfigMap{ObjectMeta: s.objectMeta(), Data: map[string]string{render.ConfigFile: file}}
	s.restart = decodeRestartState(existing.Annotations[annotationRestart]).next(s.plan, s.out.members.consumers, now)
	want.Annotations[annotationRestart] = s.restart.encode()
	want.Annotations[v1alpha1.AnnotationConfigGeneration] = s.token
	s.changed, _ = time.Parse(time.RFC3339, existing.Annotations[annotationChangedAt])
	if existing.Annotations[v1alpha1.AnnotationConfigGeneration] != s.token || s.changed.IsZero() {
		s.changed = now
	}
	want.Annotations[annotationChangedAt] = s.changed.Format(time.RFC3339)
	switch {
	case !found:
		return r.written1(s, "ConfigMap", r.client.Create(ctx, want))
	case sameMeta(existing, want) && maps.Equal(existing.Data, want.Data):
		return true, nil
	}
	adopt(existing, want)
	existing.Data, existing.BinaryData = want.Data, nil
	return r.written1(s, "ConfigMap", r.client.Update(ctx, existing))
}

// written1 turns what a person has to mend into the outcome, and leaves the rest to another try.
func (r *injectReconciler) written1(s *injectScope, kind string, err error) (bool, error) {
	switch {
	case err == nil:
		return true, nil
	case apierrors.IsForbidden(err) && kind == "Secret":
		s.out.injected(metaFalse, v1alpha1.ReasonSecretForbidden, fmt.Sprintf(
			"the operator may not write Secrets in namespace %q: add it to the namespaces whose Secrets it may read and write", s.target.Namespace))
		return false, nil
	default:
		return false, fmt.Errorf("write rendered %s: %w", kind, err)
	}
}

func (r *injectReconciler) notOurs(s *injectScope, kind string) bool {
	s.out.injected(metaFalse, v1alpha1.ReasonObjectNotOurs, fmt.Sprintf(
		"%s %q exists and was not made by the operator: rename or delete it", kind, s.target.ObjectName()))
	return false
}

// adopt puts the operator's metadata on an object and leaves what others put there.
func adopt(o, want client.Object) {
	o.SetLabels(merge(o.GetLabels(), want.GetLabels()))
	o.SetAnnotations(merge(o.GetAnnotations(), want.GetAnnotations()))
	o.SetOwnerReferences(want.GetOwnerReferences())
}

func sameMeta(have, want client.Object) bool {
	return contains(have.GetLabels(), want.GetLabels()) && contains(have.GetAnnotations(), want.GetAnnotations()) &&
		reflect.DeepEqual(have.GetOwnerReferences(), want.GetOwnerReferences())
}

func merge(a, b map[string]string) map[string]string {
	out := maps.Clone(a)
	if out == nil {
		out = map[string]string{}
	}
	maps.Copy(out, b)
	return out
}

func contains(have, want map[string]string) bool {
	for k, v := range want {
		if have[k] != v {
			return false
		}
	}
	return true
}

func sameBytes(a, b map[string][]byte) bool {
	return maps.EqualFunc(a, b, func(x, y []byte) bool { return string(x) == string(y) })
}

// deleteObjects deletes the target's ConfigMap and Secret, if they are the operator's.
func (r *injectReconciler) deleteObjects(ctx context.Context, t render.Target) error {
	key := client.ObjectKey{Namespace: t.Namespace, Name: t.ObjectName()}
	for _, o := range []client.Object{&corev1.ConfigMap{}, &corev1.Secret{}} {
		err := r.live.Get(ctx, key, o)
		if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
			continue
		}
		if err != nil {
			return fmt.Errorf("read rendered object: %w", err)
		}
		if !ours(o) {
			continue
		}
		uid := o.GetUID()
		if err := r.client.Delete(ctx, o, client.Preconditions{UID: &uid}); ignoreGone(err) != nil {
			return fmt.Errorf("delete rendered object: %w", err)
		}
	}
	return nil
}

// restartState says per Topology what a running pod cannot change, and since when it is so. A container that started
// before that time runs with something else.
type restartState map[string]restartFact

type restartFact struct {
	// Key is what cannot change.
	Key string `json:"key"`
	// Since is when Key changed; zero: it never did.
	Since metav1.Time `json:"since,omitzero"`
}

func decodeRestartState(s string) restartState {
	out := restartState{}
	if s != "" {
		_ = json.Unmarshal([]byte(s), &out) // what cannot be read is begun anew
	}
	return out
}

func (s restartState) encode() string {
	b, err := json.Marshal(s)
	if err != nil {
		return "{}"
	}
	return string(b)
}

// next is the state with a plan. A Topology that is new to the workload needs no restart: its handler came with one.
// One that is not served just now keeps its state.
func (s restartState) next(p *render.Plan, all []*render.Consumer, now time.Time) restartState {
	out := restartState{}
	for _, c := range all {
		if old, known := s[c.Group.Spec.TopologyRef.Name]; known {
			out[c.Group.Spec.TopologyRef.Name] = old
		}
	}
	for _, c := range p.Consumers {
		fact := restartFact{Key: render.RestartKey(c)}
		if old, known := s[c.Topology.Name]; known {
			fact.Since = old.Since
			if old.Key != fact.Key {
				fact.Since = metav1.NewTime(now)
			}
		}
		out[c.Topology.Name] = fact
	}
	return out
}
