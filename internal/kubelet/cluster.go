package kubelet

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// mountClaim makes a claim's folder, which outlives the pod, and links the volume to it. The claim is bound by it.
func (k *Kubelet) mountClaim(ctx context.Context, p *corev1.Pod, name, volume string) error {
	var claim corev1.PersistentVolumeClaim
	if err := k.client.Get(ctx, types.NamespacedName{Namespace: p.Namespace, Name: name}, &claim); err != nil {
		return missing(err, false, "PersistentVolumeClaim", name)
	}
	dir := filepath.Join(k.cfg.Dir, "claims", p.Namespace+"_"+name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(volume), 0o755); err != nil {
		return err
	}
	if err := os.Symlink(dir, volume); err != nil && !os.IsExist(err) {
		return err
	}
	if claim.Status.Phase == corev1.ClaimBound {
		return nil
	}
	bound := claim.DeepCopy()
	bound.Status = corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, AccessModes: claim.Spec.AccessModes, Capacity: claim.Spec.Resources.Requests}
	return client.IgnoreNotFound(k.client.Status().Patch(ctx, bound, client.MergeFrom(&claim)))
}

var serviceName = regexp.MustCompile(`\b([a-z0-9-]+)\.([a-z0-9-]+)\.svc(\.cluster\.local)?\b`)

// resolveServices replaces the names of Services in texts by the address of a pod behind them. The error is a *notYet
// where none is ready; names of Services that do not exist stay.
func (k *Kubelet) resolveServices(ctx context.Context, files map[string]file) error {
	for name, f := range files {
		if !f.text {
			continue
		}
		var failed error
		text := serviceName.ReplaceAllStringFunc(string(f.content), func(match string) string {
			g := serviceName.FindStringSubmatch(match)
			ip, err := k.behind(ctx, types.NamespacedName{Namespace: g[2], Name: g[1]})
			switch {
			case err != nil:
				failed = err
			case ip != "":
				return ip
			}
			return match
		})
		if failed != nil {
			return failed
		}
		f.content = []byte(text)
		files[name] = f
	}
	return nil
}

// behind is the address of a ready pod that a Service leads to; "" without such a Service.
func (k *Kubelet) behind(ctx context.Context, key types.NamespacedName) (string, error) {
	var s corev1.Service
	if err := k.client.Get(ctx, key, &s); err != nil {
		return "", client.IgnoreNotFound(err)
	}
	if len(s.Spec.Selector) == 0 {
		return "", nil
	}
	var pods corev1.PodList
	if err := k.client.List(ctx, &pods, client.InNamespace(key.Namespace), client.MatchingLabels(s.Spec.Selector)); err != nil {
		return "", err
	}
	for i := range pods.Items {
		if p := &pods.Items[i]; p.Status.PodIP != "" && p.DeletionTimestamp.IsZero() && readyPods([]*corev1.Pod{p}) == 1 {
			return p.Status.PodIP, nil
		}
	}
	return "", &notYet{fmt.Sprintf("no pod behind Service %q is ready", key)}
}
