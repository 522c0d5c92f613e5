package controllers

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/shove-dev/shove/api/v1alpha1"
)

// FieldOwner is the operator's name in managed fields.
const FieldOwner = "shove-operator"

// conditions collects the conditions of one pass. A condition that is not set in a pass goes away.
type conditions struct {
	prev       []metav1.Condition
	list       []metav1.Condition
	generation int64
	now        metav1.Time
}

func newConditions(prev []metav1.Condition, generation int64, now metav1.Time) *conditions {
	return &conditions{prev: prev, generation: generation, now: now}
}

// set sets one condition. The time of the last transition is kept where the status is the same.
func (c *conditions) set(kind string, status metav1.ConditionStatus, reason, message string) {
	n := metav1.Condition{Type: kind, Status: status, Reason: reason, Message: bounded(message, 32768), ObservedGeneration: c.generation, LastTransitionTime: c.now}
	if old := meta.FindStatusCondition(c.prev, kind); old != nil && old.Status == status {
		n.LastTransitionTime = old.LastTransitionTime
	}
	c.put(n)
}

// put keeps the list sorted by type.
func (c *conditions) put(n metav1.Condition) {
	i, found := slices.BinarySearchFunc(c.list, n.Type, func(o metav1.Condition, kind string) int { return strings.Compare(o.Type, kind) })
	if found {
		c.list[i] = n
		return
	}
	c.list = slices.Insert(c.list, i, n)
}

func (c *conditions) true(kind, reason, message string) {
	c.set(kind, metav1.ConditionTrue, reason, message)
}

func (c *conditions) false(kind, reason, message string) {
	c.set(kind, metav1.ConditionFalse, reason, message)
}

func (c *conditions) unknown(kind, reason, message string) {
	c.set(kind, metav1.ConditionUnknown, reason, message)
}

// warn sets an abnormal-true condition whose reason is its own name.
func (c *conditions) warn(kind, message string) { c.true(kind, kind, message) }

// keep carries a condition of an earlier pass over as it is, with the generation that it is about.
func (c *conditions) keep(kind string) {
	if old := meta.FindStatusCondition(c.prev, kind); old != nil {
		c.put(*old)
	}
}

// drop takes a condition away that was set in this pass.
func (c *conditions) drop(kind string) { meta.RemoveStatusCondition(&c.list, kind) }

func (c *conditions) get(kind string) *metav1.Condition {
	return meta.FindStatusCondition(c.list, kind)
}

// progress is how far an object is, as kstatus sees it.
type progress uint8

const (
	// done: the object is what its spec says.
	done progress = iota
	// working: the operator works on it, or waits for something that it watches.
	working
	// stalled: a person has to act.
	stalled
)

// summarise sets Ready, Reconciling and Stalled: never two of the last, and Ready only where neither is set.
func (c *conditions) summarise(p progress, reason, message string) {
	switch p {
	case done:
		c.true(v1alpha1.ConditionReady, reason, message)
	case working:
		c.false(v1alpha1.ConditionReady, reason, message)
		c.true(v1alpha1.ConditionReconciling, reason, message)
	case stalled:
		c.false(v1alpha1.ConditionReady, reason, message)
		c.true(v1alpha1.ConditionStalled, reason, message)
	}
}

// applyStatus writes the whole of one owner's part of an object's status by server-side apply, and returns the
// object's new resource version. The object's UID guards against one of the same name that came later.
func applyStatus(ctx context.Context, c client.Client, obj client.Object, owner string, status any) (string, error) {
	gvk, err := apiutil.GVKForObject(obj, c.Scheme())
	if err != nil {
		return "", err
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(status)
	if err != nil {
		return "", fmt.Errorf("encode status: %w", err)
	}
	u := &unstructured.Unstructured{Object: map[string]any{"status": content}}
	u.SetGroupVersionKind(gvk)
	u.SetNamespace(obj.GetNamespace())
	u.SetName(obj.GetName())
	u.SetUID(obj.GetUID())
	if err := c.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(owner), client.ForceOwnership); err != nil {
		return "", fmt.Errorf("write status: %w", err)
	}
	return u.GetResourceVersion(), nil
}

// gone says whether an error means that the object is not there any more, or is another one of the same name.
func gone(err error) bool { return apierrors.IsNotFound(err) || apierrors.IsConflict(err) }

// written remembers the resource versions that this process wrote, so that a pass does not decide from a cache that
// has not seen the last write.
type written struct {
	mu       sync.Mutex
	versions map[writtenKey]string
}

type writtenKey struct {
	kind reflect.Type
	name types.NamespacedName
}

func keyOf(obj client.Object) writtenKey {
	return writtenKey{reflect.TypeOf(obj), client.ObjectKeyFromObject(obj)}
}

func (w *written) record(obj client.Object, version string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.versions == nil {
		w.versions = map[writtenKey]string{}
	}
	w.versions[keyOf(obj)] = version
}

// forget drops what is known of an object of that kind and name.
func (w *written) forget(kind client.Object, name types.NamespacedName) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.versions, writtenKey{reflect.TypeOf(kind), name})
}

// latest reads obj again, past the cache, where the cache is behind what this process wrote.
func (w *written) latest(ctx context.Context, live client.Reader, obj client.Object) error {
	w.mu.Lock()
	version, ok := w.versions[keyOf(obj)]
	if ok && !older(obj.GetResourceVersion(), version) {
		delete(w.versions, keyOf(obj))
		ok = false
	}
	w.mu.Unlock()
	if !ok {
		return nil
	}
	return live.Get(ctx, client.ObjectKeyFromObject(obj), obj)
}

// older compares resource versions, which Kubernetes 1.35 and later guarantee to be comparable; what does not parse
// counts as older, which costs a read and nothing else.
func older(a, b string) bool {
	x, errX := strconv.ParseUint(a, 10, 64)
	y, errY := strconv.ParseUint(b, 10, 64)
	if errX != nil || errY != nil {
		return a != b
	}
	return x < y
}

var (
	userInfo = regexp.MustCompile(`://[^/\s"'@]+@`)
	// localPort is the operator's side of a connection, other at every attempt.
	localPort = regexp.MustCompile(`\S+:\d+->`)
)

// plain is an error's text as it may be shown to anyone: without user information of URLs, and without what differs
// from one attempt to the next.
func plain(err error) string {
	if err == nil {
		return ""
	}
	s := userInfo.ReplaceAllString(err.Error(), "://")
	s = localPort.ReplaceAllString(s, "")
	return bounded(strings.TrimSpace(s), 1000)
}

func bounded(s string, n int) string {
	if len(s) <= n {
		return s
	}
	const more = " …"
	return strings.ToValidUTF8(s[:n-len(more)], "") + more
}

// ignoreGone is nil for the error of a write to an object that is not there any more.
func ignoreGone(err error) error {
	var status apierrors.APIStatus
	if errors.As(err, &status) && gone(err) {
		return nil
	}
	return err
}

// again is the outermost layer of a pass: somebody else having written the object in the meantime is no error, the
// pass is made again with what they wrote.
func again(res reconcile.Result, err error) (reconcile.Result, error) {
	if apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: 200 * time.Millisecond}, nil
	}
	return res, err
}
