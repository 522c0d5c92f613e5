package kubelet

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"slices"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

const (
	hashLabel  = "pod-template-hash"
	indexLabel = "apps.kubernetes.io/pod-index"
)

// setupWorkloads stands in for the Deployment, ReplicaSet and StatefulSet controllers: Pods belong to the workload
// directly, and there is no history.
func (k *Kubelet) setupWorkloads(mgr ctrl.Manager) error {
	err := ctrl.NewControllerManagedBy(mgr).Named("kubelet-deployment").For(&appsv1.Deployment{}).Owns(&corev1.Pod{}).
		Complete(reconcile.AsReconciler(k.client, reconcile.ObjectReconciler[*appsv1.Deployment](deployments{k})))
	if err != nil {
		return err
	}
	return ctrl.NewControllerManagedBy(mgr).Named("kubelet-statefulset").For(&appsv1.StatefulSet{}).Owns(&corev1.Pod{}).
		Complete(reconcile.AsReconciler(k.client, reconcile.ObjectReconciler[*appsv1.StatefulSet](statefulSets{k})))
}

type deployments struct{ *Kubelet }

// Reconcile keeps the wanted number of pods of the newest template, and ends older ones once those are ready.
func (d deployments) Reconcile(ctx context.Context, w *appsv1.Deployment) (ctrl.Result, error) {
	if !w.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, nil
	}
	pods, err := d.podsOf(ctx, w, w.Spec.Selector)
	if err != nil {
		return ctrl.Result{}, err
	}
	hash := templateHash(&w.Spec.Template)
	want := 1
	if w.Spec.Replicas != nil {
		want = int(*w.Spec.Replicas)
	}
	current, old := split(pods, hash)
	if w.Spec.Strategy.Type != appsv1.RecreateDeploymentStrategyType || len(old) == 0 {
		if err := d.addPods(ctx, w, hash, current, want-len(current)); err != nil {
			return ctrl.Result{}, err
		}
	}
	for i := want; i < len(current); i++ {
		if err := d.deletePod(ctx, current[i]); err != nil {
			return ctrl.Result{}, err
		}
	}
	ready := readyPods(current)
	if ready >= want || w.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType {
		for _, p := range old {
			if err := d.deletePod(ctx, p); err != nil {
				return ctrl.Result{}, err
			}
		}
	}
	status := appsv1.DeploymentStatus{
		ObservedGeneration: w.Generation, Replicas: int32(len(pods)), UpdatedReplicas: int32(len(current)),
		ReadyReplicas: int32(readyPods(pods)), AvailableReplicas: int32(readyPods(pods)),
		UnavailableReplicas: int32(max(0, want-readyPods(pods))),
		Conditions: []appsv1.DeploymentCondition{
			{Type: appsv1.DeploymentAvailable, Status: truth(ready >= want), Reason: "MinimumReplicasAvailable", Message: "as counted by the stand-in for kubelet"},
			{Type: appsv1.DeploymentProgressing, Status: corev1.ConditionTrue, Reason: "NewReplicaSetAvailable", Message: "pods of the newest template"},
		},
	}
	for i := range status.Conditions {
		for _, c := range w.Status.Conditions {
			if c.Type == status.Conditions[i].Type && c.Status == status.Conditions[i].Status {
				status.Conditions[i].LastTransitionTime, status.Conditions[i].LastUpdateTime = c.LastTransitionTime, c.LastUpdateTime
			}
		}
		if status.Conditions[i].LastTransitionTime.IsZero() {
			now := metav1.Now()
			status.Conditions[i].LastTransitionTime, status.Conditions[i].LastUpdateTime = now, now
		}
	}
	if equality.Semantic.DeepEqual(w.Status, status) {
		return ctrl.Result{}, nil
	}
	updated := w.DeepCopy()
	updated.Status = status
	return ctrl.Result{}, client.IgnoreNotFound(d.client.Status().Patch(ctx, updated, client.MergeFrom(w)))
}

// addPods makes n more pods. Their names are the first that are free, so that a second look at a stale list makes none
// twice.
func (d deployments) addPods(ctx context.Context, w *appsv1.Deployment, hash string, current []*corev1.Pod, n int) error {
	for i := 0; n > 0; i++ {
		name := w.Name + "-" + hash + "-" + strconv.Itoa(i)
		if slices.ContainsFunc(current, func(p *corev1.Pod) bool { return p.Name == name }) {
			continue
		}
		if err := d.createPod(ctx, w, "Deployment", &w.Spec.Template, name, map[string]string{hashLabel: hash}); err != nil {
			return err
		}
		n--
	}
	return nil
}

type statefulSets struct{ *Kubelet }

// Reconcile keeps pods {name}-0 up to the wanted number, and replaces those of an older template one after the other,
// unless the strategy is OnDelete.
func (s statefulSets) Reconcile(ctx context.Context, w *appsv1.StatefulSet) (ctrl.Result, error) {
	if !w.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, nil
	}
	pods, err := s.podsOf(ctx, w, w.Spec.Selector)
	if err != nil {
		return ctrl.Result{}, err
	}
	hash := templateHash(&w.Spec.Template)
	want := 1
	if w.Spec.Replicas != nil {
		want = int(*w.Spec.Replicas)
	}
	byName := map[string]*corev1.Pod{}
	for _, p := range pods {
		byName[p.Name] = p
	}
	replaced := false
	for i := range want {
		name := w.Name + "-" + strconv.Itoa(i)
		p := byName[name]
		delete(byName, name)
		switch {
		case p == nil:
			err = s.createOrdinal(ctx, w, name, map[string]string{hashLabel: hash, indexLabel: strconv.Itoa(i)})
		case p.Labels[hashLabel] != hash && !replaced && w.Spec.UpdateStrategy.Type != appsv1.OnDeleteStatefulSetStrategyType:
			replaced = true
			err = s.deletePod(ctx, p)
		}
		if err != nil {
			return ctrl.Result{}, err
		}
	}
	for _, p := range byName {
		if err := s.deletePod(ctx, p); err != nil {
			return ctrl.Result{}, err
		}
	}
	current, _ := split(pods, hash)
	ready := int32(readyPods(pods))
	updated := w.DeepCopy()
	updated.Status = appsv1.StatefulSetStatus{ObservedGeneration: w.Generation, Replicas: int32(len(pods)), ReadyReplicas: ready,
		AvailableReplicas: ready, CurrentReplicas: int32(len(current)), UpdatedReplicas: int32(len(current)), UpdateRevision: hash}
	if equality.Semantic.DeepEqual(w.Status, updated.Status) {
		return ctrl.Result{}, nil
	}
	return ctrl.Result{}, client.IgnoreNotFound(s.client.Status().Patch(ctx, updated, client.MergeFrom(w)))
}

// createOrdinal makes one pod of a StatefulSet, with the claims of its volumes, which outlive it.
func (s statefulSets) createOrdinal(ctx context.Context, w *appsv1.StatefulSet, name string, extra map[string]string) error {
	t := w.Spec.Template.DeepCopy()
	for i := range w.Spec.VolumeClaimTemplates {
		c := w.Spec.VolumeClaimTemplates[i].DeepCopy()
		t.Spec.Volumes = append(t.Spec.Volumes, corev1.Volume{Name: c.Name, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: c.Name + "-" + name},
		}})
		c.Namespace, c.Name, c.ResourceVersion, c.UID = w.Namespace, c.Name+"-"+name, "", ""
		if err := s.client.Create(ctx, c); err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
	}
	return s.createPod(ctx, w, "StatefulSet", t, name, extra)
}

// podsOf lists a workload's pods that are not being deleted, the oldest first.
func (k *Kubelet) podsOf(ctx context.Context, w client.Object, selector *metav1.LabelSelector) ([]*corev1.Pod, error) {
	sel, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil {
		return nil, reconcile.TerminalError(fmt.Errorf("selector of %s/%s: %w", w.GetNamespace(), w.GetName(), err))
	}
	var list corev1.PodList
	if err := k.client.List(ctx, &list, client.InNamespace(w.GetNamespace()), client.MatchingLabelsSelector{Selector: sel}); err != nil {
		return nil, err
	}
	var pods []*corev1.Pod
	for i := range list.Items {
		p := &list.Items[i]
		if p.DeletionTimestamp.IsZero() && metav1.IsControlledBy(p, w) {
			pods = append(pods, p)
		}
	}
	slices.SortFunc(pods, func(a, b *corev1.Pod) int {
		if c := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); c != 0 {
			return c
		}
		return slices.Compare([]string{a.Name}, []string{b.Name})
	})
	return pods, nil
}

func (k *Kubelet) createPod(ctx context.Context, w client.Object, kind string, t *corev1.PodTemplateSpec, name string, extra map[string]string) error {
	p := &corev1.Pod{ObjectMeta: *t.ObjectMeta.DeepCopy(), Spec: *t.Spec.DeepCopy()}
	p.Namespace, p.Name = w.GetNamespace(), name
	p.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(w, appsv1.SchemeGroupVersion.WithKind(kind))}
	if p.Labels == nil {
		p.Labels = map[string]string{}
	}
	for key, v := range extra {
		p.Labels[key] = v
	}
	p.Spec.NodeName = NodeName
	err := k.client.Create(ctx, p)
	if apierrors.IsAlreadyExists(err) { // one that is ending, or the cache is behind
		return nil
	}
	return err
}

func (k *Kubelet) deletePod(ctx context.Context, p *corev1.Pod) error {
	return client.IgnoreNotFound(k.client.Delete(ctx, p, client.Preconditions{UID: &p.UID}))
}

func split(pods []*corev1.Pod, hash string) (current, old []*corev1.Pod) {
	for _, p := range pods {
		if p.Labels[hashLabel] == hash {
			current = append(current, p)
		} else {
			old = append(old, p)
		}
	}
	return current, old
}

func readyPods(pods []*corev1.Pod) int {
	n := 0
	for _, p := range pods {
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
				n++
			}
		}
	}
	return n
}

func truth(b bool) corev1.ConditionStatus {
	if b {
		return corev1.ConditionTrue
	}
	return corev1.ConditionFalse
}

// templateHash changes exactly when the template does.
func templateHash(t *corev1.PodTemplateSpec) string {
	h := fnv.New32a()
	b, err := json.Marshal(t)
	if err != nil {
		panic(fmt.Sprintf("encode a pod template: %v", err)) // it came from the API server
	}
	_, _ = h.Write(b)
	return rand.SafeEncodeString(strconv.FormatUint(uint64(h.Sum32()), 10))
}
