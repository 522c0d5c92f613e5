package kubelet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// retryStart is the pause before a pod that waits for something is looked at again.
const retryStart = time.Second

func (k *Kubelet) setupPods(mgr ctrl.Manager) error {
	b := ctrl.NewControllerManagedBy(mgr).Named("kubelet-pod").For(&corev1.Pod{}).
		WatchesRawSource(source.Channel(k.wake, handler.TypedFuncs[*corev1.Pod, reconcile.Request]{
			GenericFunc: func(_ context.Context, e event.TypedGenericEvent[*corev1.Pod], q workqueue.TypedRateLimitingInterface[reconcile.Request]) {
				q.Add(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(e.Object)})
			},
		}))
	// With a sync period, a change reaches a pod when that is over or when the pod itself changes.
	if k.cfg.SyncPeriod <= 0 {
		b = b.Watches(&corev1.ConfigMap{}, handler.EnqueueRequestsFromMapFunc(k.podsOfNamespace)).
			Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(k.podsOfNamespace))
	}
	return b.Complete(reconcile.AsReconciler(k.client, reconcile.ObjectReconciler[*corev1.Pod](k)))
}

func (k *Kubelet) podsOfNamespace(ctx context.Context, o client.Object) []reconcile.Request {
	var list corev1.PodList
	if err := k.client.List(ctx, &list, client.InNamespace(o.GetNamespace())); err != nil {
		return nil
	}
	out := make([]reconcile.Request, len(list.Items))
	for i := range list.Items {
		out[i].NamespacedName = client.ObjectKeyFromObject(&list.Items[i])
	}
	return out
}

// Reconcile makes one pass over a pod: volumes, then its processes, then its status.
func (k *Kubelet) Reconcile(ctx context.Context, p *corev1.Pod) (ctrl.Result, error) {
	if p.Spec.NodeName != NodeName {
		return ctrl.Result{}, nil
	}
	r := k.runner(p)
	if !p.DeletionTimestamp.IsZero() {
		return k.finish(ctx, p, r)
	}
	var waiting *notYet
	err := k.mountVolumes(ctx, p, r)
	if err == nil && !r.begun() {
		err = k.start(ctx, p, r)
	}
	result := ctrl.Result{RequeueAfter: k.cfg.SyncPeriod}
	switch {
	case errors.As(err, &waiting):
		result.RequeueAfter = retryStart
	case err != nil:
		k.cfg.Log.Info("a pod cannot start", "pod", p.Namespace+"/"+p.Name, "error", err.Error())
		result.RequeueAfter = retryStart
	}
	return result, k.writeStatus(ctx, p, r, err)
}

// runner is the pod's, made when it is asked for the first time.
func (k *Kubelet) runner(p *corev1.Pod) *runner {
	k.mu.Lock()
	defer k.mu.Unlock()
	r := k.runners[p.UID]
	if r == nil {
		r = newRunner(p, k.podDir(p), k.address(p), k.cfg.Output)
		r.changed = func() { k.poke(r.pod) }
		k.runners[p.UID] = r
	}
	return r
}

// address is a pod's own. The caller holds the mutex.
func (k *Kubelet) address(p *corev1.Pod) string {
	key := client.ObjectKeyFromObject(p)
	if ip, ok := k.ips[key]; ok {
		return ip
	}
	k.nextIP++
	n := (k.firstIP + k.nextIP) & (1<<22 - 1)
	ip := fmt.Sprintf("127.%d.%d.%d", 64+n>>16&63, n>>8&255, n&255)
	if c := metav1.GetControllerOf(p); c != nil && c.Kind == "StatefulSet" {
		k.ips[key] = ip
	}
	return ip
}

// start resolves every container's program and environment, and starts the pod.
func (k *Kubelet) start(ctx context.Context, p *corev1.Pod, r *runner) error {
	kubeconfig, err := k.kubeconfig(ctx, p, r)
	if err != nil {
		return err
	}
	for _, c := range r.containers() {
		program, ok := k.cfg.Images(c.Image)
		if !ok || len(program) == 0 {
			return &notYet{fmt.Sprintf("nothing stands for image %q", c.Image)}
		}
		env, err := k.environment(ctx, p, r, c)
		if err != nil {
			return err
		}
		if kubeconfig != "" {
			env = append(env, "KUBECONFIG="+kubeconfig)
		}
		r.prepare(c, program, env)
	}
	r.begin()
	return nil
}

// kubeconfig writes a file with a token of the pod's ServiceAccount, because the place where a real pod finds one
// cannot be had. It is made for pods that name a ServiceAccount.
func (k *Kubelet) kubeconfig(ctx context.Context, p *corev1.Pod, r *runner) (string, error) {
	if p.Spec.ServiceAccountName == "" || p.Spec.ServiceAccountName == "default" || p.Spec.AutomountServiceAccountToken != nil && !*p.Spec.AutomountServiceAccountToken {
		return "", nil
	}
	const day = int64(24 * time.Hour / time.Second)
	seconds := day
	token, err := k.token(ctx, p, nil, &seconds)
	if err != nil {
		return "", err
	}
	return writeKubeconfig(r.dir, k.cfg.REST, p.Namespace, token)
}

// finish ends a pod's processes within its grace period, and then lets the object go.
func (k *Kubelet) finish(ctx context.Context, p *corev1.Pod, r *runner) (ctrl.Result, error) {
	grace := 30 * time.Second
	if s := p.DeletionGracePeriodSeconds; s != nil {
		grace = time.Duration(*s) * time.Second
	}
	r.terminate(grace)
	select {
	case <-r.done:
	default:
		return ctrl.Result{RequeueAfter: grace + retryStart}, k.writeStatus(ctx, p, r, nil) // it pokes when it is done
	}
	zero := int64(0)
	err := k.client.Delete(ctx, p, &client.DeleteOptions{GracePeriodSeconds: &zero, Preconditions: &metav1.Preconditions{UID: &p.UID}})
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	}
	k.forget(p.UID)
	if k.cfg.Output == nil { // logs stay where somebody may look for them
		_ = os.RemoveAll(r.volumes())
	}
	return ctrl.Result{}, nil
}

func (k *Kubelet) forget(uid types.UID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.runners, uid)
}

// writeStatus says in the Pod what the processes do.
func (k *Kubelet) writeStatus(ctx context.Context, p *corev1.Pod, r *runner, problem error) error {
	status := r.status(p, problem)
	if equality.Semantic.DeepEqual(p.Status, status) {
		return nil
	}
	updated := p.DeepCopy()
	updated.Status = status
	return client.IgnoreNotFound(k.client.Status().Patch(ctx, updated, client.MergeFrom(p)))
}
