// Package controllers makes Brokers, Topologies and ConsumerGroups so: it connects to brokers, declares and watches
// queues, and hands configuration to workloads.
//
// Controllers is the list of everything that runs: read it first. Each controller is one file with its loop
// (broker_controller.go, topology_controller.go, …) and one file per phase of it. Shared pieces: brokerpool.go holds
// one connection per Broker, observer.go joins what is asked of a broker into few calls, status.go writes conditions,
// index.go has the cache's indexes, events.go and metrics.go what people and machines see.
package controllers

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/topology"
)

// Options say what the controllers work with. The zero value of each field but Drivers is usable.
type Options struct {
	// Drivers are the brokers that this operator knows. Needed.
	Drivers []broker.Driver
	// Namespaces are the ones that are watched; none: all.
	Namespaces []string
	// Concurrency bounds the passes over Topologies that run at once; most of them wait for a joint call to a
	// broker. Defaults to 256.
	Concurrency int
	// AgentImage is the sidecar's image where a ConsumerGroup names none. Empty: it must.
	AgentImage string
	// EmbeddedImage is the image that runs the servers of Brokers with spec.embedded: the operator's own. Empty: none
	// is made.
	EmbeddedImage string
	// EmbeddedServers is where the operator finds such a server. Defaults to the address of its Service, which only
	// works inside of the cluster.
	EmbeddedServers func(*v1alpha1.Broker) []v1alpha1.NATSServer
	// PodReporter asks a pod which configuration it runs. Defaults to its own /status.
	PodReporter func(context.Context, *corev1.Pod) (PodReport, error)
	// Clock defaults to the real one.
	Clock clock.WithTicker
	// Registry takes the operator's metrics. Defaults to controller-runtime's.
	Registry prometheus.Registerer
}

func (o Options) withDefaults() Options {
	if o.Concurrency <= 0 {
		o.Concurrency = 256
	}
	if o.EmbeddedServers == nil {
		o.EmbeddedServers = func(b *v1alpha1.Broker) []v1alpha1.NATSServer {
			return []v1alpha1.NATSServer{render.EmbeddedAddress(b)}
		}
	}
	if o.PodReporter == nil {
		o.PodReporter = httpReport
	}
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.Registry == nil {
		o.Registry = metrics.Registry
	}
	return o
}

// deps are what controllers share.
type deps struct {
	client     client.Client
	live       client.Reader // past the cache
	clock      clock.WithTicker
	events     events.EventRecorder
	drivers    map[topology.Kind]broker.Driver
	namespaced []string
	namespaces *namespaceLabels
	pool       *brokerPool
	metrics    *operatorMetrics
	written    written
	started    time.Time
	brokers    *enqueuer
	topologies *enqueuer
	groups     *enqueuer
	publishers *enqueuer
	outcomes   *outcomes
	embedded   embeddedOptions
}

// embeddedOptions are of Options.
type embeddedOptions struct {
	image   string
	servers func(*v1alpha1.Broker) []v1alpha1.NATSServer
}

// watches says whether the operator may see objects of a namespace.
func (d *deps) watches(namespace string) bool {
	return len(d.namespaced) == 0 || slices.Contains(d.namespaced, namespace)
}

// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch
// +kubebuilder:rbac:groups="",resources=secrets,verbs=get;list;watch
// +kubebuilder:rbac:groups=coordination.k8s.io,namespace=shove-system,resources=leases,verbs=get;create;update
// +kubebuilder:rbac:groups="";events.k8s.io,namespace=shove-system,resources=events,verbs=create;patch

// Controllers adds everything that runs to a manager.
func Controllers(ctx context.Context, mgr ctrl.Manager, o Options) error {
	d, err := newDeps(mgr, o)
	if err != nil {
		return err
	}
	if err := setupIndexes(ctx, mgr.GetFieldIndexer()); err != nil {
		return err
	}
	if err := mgr.Add(d.pool); err != nil {
		return err
	}
	for _, setup := range []func(ctrl.Manager, *deps, Options) error{
		setupBroker,
		setupTopology,
		setupInject,
		setupConsumerGroup,
		setupPublishers,
	} {
		if err := setup(mgr, d, o.withDefaults()); err != nil {
			return err
		}
	}
	return nil
}

func newDeps(mgr ctrl.Manager, o Options) (*deps, error) {
	o = o.withDefaults()
	m, err := newOperatorMetrics(o.Registry)
	if err != nil {
		return nil, err
	}
	d := &deps{
		client: mgr.GetClient(), live: mgr.GetAPIReader(), clock: o.Clock, events: mgr.GetEventRecorder(FieldOwner),
		drivers: map[topology.Kind]broker.Driver{}, namespaced: o.Namespaces, metrics: m, started: o.Clock.Now(),
		namespaces: &namespaceLabels{live: mgr.GetAPIReader(), now: o.Clock.Now},
		brokers:    &enqueuer{}, topologies: &enqueuer{}, groups: &enqueuer{}, publishers: &enqueuer{}, outcomes: newOutcomes(),
		embedded: embeddedOptions{o.EmbeddedImage, o.EmbeddedServers},
	}
	for _, drv := range o.Drivers {
		d.drivers[drv.Kind] = drv
	}
	d.pool = newBrokerPool(o.Clock, m, d.brokers.addNow)
	if err := o.Registry.Register(newDepthCollector(d.pool)); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return d, nil
}

// CacheOptions are the cache settings that the controllers are written for: watched namespaces only, nothing kept of
// managed fields, and of Secrets the metadata only, in the namespaces whose Secrets may be read.
func CacheOptions(namespaces, secretNamespaces []string) cache.Options {
	o := cache.Options{DefaultTransform: cache.TransformStripManagedFields(), DefaultNamespaces: only(namespaces)}
	if len(secretNamespaces) > 0 {
		o.ByObject = map[client.Object]cache.ByObject{&corev1.Secret{}: {Namespaces: only(secretNamespaces)}}
	}
	return o
}

func only(namespaces []string) map[string]cache.Config {
	if len(namespaces) == 0 {
		return nil
	}
	m := map[string]cache.Config{}
	for _, ns := range namespaces {
		m[ns] = cache.Config{}
	}
	return m
}

var namespaceKind = schema.GroupVersionKind{Version: "v1", Kind: "Namespace"}

// Priorities of work. What a person waits for goes before what the operator found out by itself.
var (
	priorityDeletion = 100
	priorityLater    = handler.LowPriority
)

// enqueuer lets others ask a controller to look at an object. Before the controller runs it does nothing: the
// controller looks at everything when it starts.
type enqueuer struct {
	mu    sync.Mutex
	queue workqueue.TypedRateLimitingInterface[reconcile.Request]
}

// start is a source's function.
func (e *enqueuer) start(_ context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.queue = q
	return nil
}

func (e *enqueuer) add(key types.NamespacedName, priority int) {
	e.mu.Lock()
	q := e.queue
	e.mu.Unlock()
	if q != nil {
		addWithPriority(q, key, priority)
	}
}

func (e *enqueuer) addNow(key types.NamespacedName)   { e.add(key, 0) }
func (e *enqueuer) addLater(key types.NamespacedName) { e.add(key, priorityLater) }

func addWithPriority(q workqueue.TypedRateLimitingInterface[reconcile.Request], key types.NamespacedName, priority int) {
	req := reconcile.Request{NamespacedName: key}
	if pq, ok := q.(priorityqueue.PriorityQueue[reconcile.Request]); ok {
		pq.AddWithOpts(priorityqueue.AddOpts{Priority: &priority}, req)
		return
	}
	q.Add(req)
}

func setupBroker(mgr ctrl.Manager, d *deps, _ Options) error {
	return ctrl.NewControllerManagedBy(mgr).
		Named("broker").
		For(&v1alpha1.Broker{}, builder.WithPredicates(specOrDeletion())).
		Watches(&v1alpha1.Broker{}, d.volumeLeftEvents()).
		Watches(&v1alpha1.Topology{}, d.dependentEvents()).
		WatchesMetadata(&appsv1.StatefulSet{}, handler.EnqueueRequestForOwner(mgr.GetScheme(), mgr.GetRESTMapper(), &v1alpha1.Broker{}, handler.OnlyControllerOwner())).
		WatchesMetadata(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(d.brokersOfSecret)).
		WatchesRawSource(source.Func(d.brokers.start)).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4, RateLimiter: rateLimiter()}).
		Complete(&brokerReconciler{deps: d})
}

func setupTopology(mgr ctrl.Manager, d *deps, o Options) error {
	return ctrl.NewControllerManagedBy(mgr).
		Named("topology").
		Watches(&v1alpha1.Topology{}, topologyEvents(), builder.WithPredicates(specOrDeletion())).
		Watches(&v1alpha1.Topology{}, d.rivalEvents()).
		Watches(&v1alpha1.Broker{}, handler.EnqueueRequestsFromMapFunc(d.topologiesOfBroker), builder.WithPredicates(brokerMatters())).
		Watches(&v1alpha1.ConsumerGroup{}, handler.EnqueueRequestsFromMapFunc(d.topologyOfGroup)).
		WatchesRawSource(source.Func(d.topologies.start)).
		WithOptions(controller.Options{MaxConcurrentReconciles: o.Concurrency, RateLimiter: rateLimiter()}).
		Complete(&topologyReconciler{deps: d})
}

// rateLimiter spaces out passes that end in an error of the API server.
func rateLimiter() workqueue.TypedRateLimiter[reconcile.Request] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](100*time.Millisecond, time.Minute)
}
