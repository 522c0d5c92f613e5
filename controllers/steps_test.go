package controllers

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/runtime"
	clocktesting "k8s.io/utils/clock/testing"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/internal/testenv"
)

// stepper runs the controllers pass by pass, on a clock that stands still: a real API server and its cache, without
// the work queues.
type stepper struct {
	*cluster
	clock      *clocktesting.FakeClock
	cached     client.Client
	deps       *deps
	brokers    *brokerReconciler
	topologies *topologyReconciler
	notes      *noteRecorder
	writes     *writeCounter
}

// step sets up the controllers to be driven by hand, watching one new namespace and the given ones.
func step(t *testing.T, drivers ...broker.Driver) *stepper {
	t.Helper()
	c := connect(t)
	return c.stepper(Options{Drivers: drivers, Namespaces: []string{c.ns}})
}

func (c *cluster) stepper(o Options) *stepper {
	t := c.t
	t.Helper()
	s := &stepper{cluster: c, clock: clocktesting.NewFakeClock(time.Now()), notes: &noteRecorder{}, writes: &writeCounter{}}
	o.Clock, o.Registry = s.clock, prometheus.NewRegistry()
	mgr, err := ctrl.NewManager(c.cfg, ctrl.Options{
		Scheme: c.client.Scheme(), Cache: CacheOptions(o.Namespaces, nil), Metrics: metricsserver.Options{BindAddress: "0"},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	if err := setupIndexes(ctx, mgr.GetFieldIndexer()); err != nil {
		t.Fatal(err)
	}
	if s.deps, err = newDeps(mgr, o); err != nil {
		t.Fatal(err)
	}
	s.deps.pool.byHand = true
	s.cached = mgr.GetClient()
	s.deps.client = s.writes.around(t, c, mgr.GetClient())
	s.deps.events = s.notes
	s.brokers, s.topologies = &brokerReconciler{deps: s.deps}, &topologyReconciler{deps: s.deps}
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	t.Cleanup(func() {
		s.deps.pool.close()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the manager ended with: %v", err)
		}
	})
	if !mgr.GetCache().WaitForCacheSync(ctx) {
		t.Fatal("the cache does not sync")
	}
	return s
}

// writeCounter counts what is written to the API server.
type writeCounter struct {
	mu sync.Mutex
	n  int
}

func (w *writeCounter) add() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.n++
}

func (w *writeCounter) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.n
}

func (w *writeCounter) around(t testing.TB, c *cluster, inner client.Client) client.Client {
	t.Helper()
	live, err := client.NewWithWatch(c.cfg, client.Options{Scheme: c.client.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return interceptor.NewClient(live, interceptor.Funcs{
		Get: func(ctx context.Context, _ client.WithWatch, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
			return inner.Get(ctx, key, obj, opts...)
		},
		List: func(ctx context.Context, _ client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			return inner.List(ctx, list, opts...)
		},
		Patch: func(ctx context.Context, c client.WithWatch, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
			w.add()
			return c.Patch(ctx, obj, patch, opts...)
		},
		Create: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.CreateOption) error {
			w.add()
			return c.Create(ctx, obj, opts...)
		},
		Update: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.UpdateOption) error {
			w.add()
			return c.Update(ctx, obj, opts...)
		},
		Apply: func(ctx context.Context, c client.WithWatch, obj runtime.ApplyConfiguration, opts ...client.ApplyOption) error {
			w.add()
			return c.Apply(ctx, obj, opts...)
		},
		SubResourceApply: func(ctx context.Context, c client.Client, sub string, obj runtime.ApplyConfiguration, opts ...client.SubResourceApplyOption) error {
			w.add()
			return c.SubResource(sub).Apply(ctx, obj, opts...)
		},
	})
}

// noteRecorder keeps events.
type noteRecorder struct {
	mu   sync.Mutex
	list []note
}

func (r *noteRecorder) Eventf(_, _ runtime.Object, kind, reason, action, format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = append(r.list, note{kind, reason, action, fmt.Sprintf(format, args...)})
}

// take returns and forgets the texts of events with a reason.
func (r *noteRecorder) take(reason string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []string
	var rest []note
	for _, n := range r.list {
		if n.reason == reason {
			out = append(out, n.text)
		} else {
			rest = append(rest, n)
		}
	}
	r.list = rest
	return out
}

func (r *noteRecorder) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.list)
}

// sync waits until the cache has what the API server has of an object.
func (s *stepper) sync(o client.Object) {
	s.t.Helper()
	key := client.ObjectKeyFromObject(o)
	live, seen := o.DeepCopyObject().(client.Object), o.DeepCopyObject().(client.Object)
	testenv.Eventually(s.t, patience, func() error {
		errLive, errSeen := s.client.Get(context.Background(), key, live), s.cached.Get(context.Background(), key, seen)
		switch {
		case client.IgnoreNotFound(errLive) != nil:
			return errLive
		case (errLive == nil) != (errSeen == nil):
			return fmt.Errorf("%T %s: the API server says %v, the cache %v", o, key, errLive, errSeen)
		case errLive == nil && live.GetResourceVersion() != seen.GetResourceVersion():
			return fmt.Errorf("%T %s: the cache is behind", o, key)
		}
		return nil
	})
}

// broker makes a pass over a Broker.
func (s *stepper) broker(b *v1alpha1.Broker) time.Duration {
	s.t.Helper()
	return s.pass(b, s.brokers.Reconcile)
}

// topology makes a pass over a Topology.
func (s *stepper) topology(t *v1alpha1.Topology) time.Duration {
	s.t.Helper()
	return s.pass(t, s.topologies.Reconcile)
}

// pass makes a pass over an object, reads it anew if it is still there, and returns when it is to be looked at again.
func (s *stepper) pass(o client.Object, reconcile func(context.Context, ctrl.Request) (ctrl.Result, error)) time.Duration {
	s.t.Helper()
	s.sync(o)
	res, err := reconcile(context.Background(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(o)})
	if err != nil {
		s.t.Fatalf("%T %s: %v", o, o.GetName(), err)
	}
	s.sync(o)
	if err := s.client.Get(context.Background(), client.ObjectKeyFromObject(o), o); client.IgnoreNotFound(err) != nil {
		s.t.Fatal(err)
	}
	if c, ok := o.(v1alpha1.ConditionedObject); ok && len(c.GetConditions()) > 0 {
		checkConditions(s.t, c)
	}
	return res.RequeueAfter
}

// gone says whether an object is not there any more.
func (s *stepper) gone(o client.Object) bool {
	s.t.Helper()
	err := s.client.Get(context.Background(), client.ObjectKeyFromObject(o), o.DeepCopyObject().(client.Object))
	if client.IgnoreNotFound(err) != nil {
		s.t.Fatal(err)
	}
	return err != nil
}

func (s *stepper) delete(o client.Object) {
	s.t.Helper()
	if err := s.client.Delete(context.Background(), o); err != nil {
		s.t.Fatal(err)
	}
	if now := time.Now(); s.clock.Now().Before(now) { // the API server's clock goes on
		s.clock.SetTime(now)
	}
}

// connected makes a Broker on a fake server, with its Secret, and connects it.
func (s *stepper) connected(name string) *v1alpha1.Broker {
	s.t.Helper()
	b := rabbitBroker(name, "amqp://rabbit:5672/", "http://rabbit:15672")
	s.create(secret(name+"-admin", map[string]string{"username": "admin", "password": secretPassword}), b)
	s.broker(b)
	return b
}

// declared makes a Topology and declares it.
func (s *stepper) declared(t *v1alpha1.Topology) *v1alpha1.Topology {
	s.t.Helper()
	s.create(t)
	s.topology(t)
	return t
}

// edit changes an object's spec.
func (s *stepper) edit(o client.Object, change func()) {
	s.t.Helper()
	s.get(o)
	change()
	if err := s.client.Update(context.Background(), o); err != nil {
		s.t.Fatal(err)
	}
}
