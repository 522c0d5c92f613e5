// Package kubelet stands in for a node and for the controllers of workloads, on a control plane that has neither: it
// makes Pods from Deployments and StatefulSets, brings their volumes and environment into being, and runs their
// containers as processes of this machine. It is for tests and for the demo. It knows nothing of shove: what a worker
// gets, it gets because it stands in the pod template.
//
// A process is not a container: it sees this machine's files and network. Paths that a container would find mounted
// are replaced by where they really are, in environment values, in arguments and in files that come from ConfigMaps.
// Each pod has an address of its own within 127.0.0.0/8, and the pods of a StatefulSet keep theirs. Nothing resolves the
// names of Services; in files that come from ConfigMaps they are replaced, too, by the address of a pod that is ready.
package kubelet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/go-logr/logr"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/event"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

// NodeName is the node that pods are bound to.
const NodeName = "local"

// Config says what to run and how.
type Config struct {
	// REST reaches the API server, as an administrator.
	REST *rest.Config
	// Dir holds volumes and logs, one folder per pod. Defaults to a temporary folder that Run removes.
	Dir string
	// Images turns a container's image into the program that stands for it, with arguments that come first if any.
	// A pod with an image that it does not know waits.
	Images func(image string) (program []string, ok bool)
	// Namespace is the only one that is looked at. Empty: all are.
	Namespace string
	// Selector picks workloads by their labels. Nil: all.
	Selector labels.Selector
	// SyncPeriod is how often volumes are brought up to date when nothing happens to their pod. Zero: as soon as
	// their ConfigMap or Secret changes. A real kubelet takes 60 to 90 s, and syncs at once when the pod changes.
	SyncPeriod time.Duration
	// Env is added to the environment of every process, as NAME=value; $(POD_IP), $(POD_NAME) and $(POD_NAMESPACE) in
	// it are the pod's. Processes share the machine's ports, so that one that listens on all addresses keeps others
	// from its port: have it listen on $(POD_IP).
	Env []string
	// Output gets what containers print, besides the file {Dir}/{namespace}_{pod}/{container}.log. Nil: nothing.
	Output func(namespace, pod, container string) io.Writer
	// StopGrace is how long processes may take to end when Run is cancelled. Defaults to 10 s.
	StopGrace time.Duration
	// Log defaults to a discarding one.
	Log logr.Logger
}

// Kubelet is the stand-in. Make it with New.
type Kubelet struct {
	cfg    Config
	client client.Client
	live   client.Reader // past the cache: a pod that changed gets what its volumes are made of as it is then
	wake   chan event.TypedGenericEvent[*corev1.Pod]

	mu      sync.Mutex
	runners map[types.UID]*runner
	firstIP int // others' pods on this machine, of another test or a demo, are to have other addresses
	nextIP  int
	ips     map[types.NamespacedName]string // of pods with a name that comes again
}

// New makes a stand-in; Run runs it.
func New(cfg Config) *Kubelet {
	if cfg.StopGrace <= 0 {
		cfg.StopGrace = 10 * time.Second
	}
	if cfg.Selector == nil {
		cfg.Selector = labels.Everything()
	}
	if cfg.Log.GetSink() == nil {
		cfg.Log = logr.Discard()
	}
	return &Kubelet{cfg: cfg, wake: make(chan event.TypedGenericEvent[*corev1.Pod], 1024), runners: map[types.UID]*runner{}, ips: map[types.NamespacedName]string{}, firstIP: rand.N(1<<14) << 8}
}

// Run runs workloads until the context ends, and then ends their processes. It may be called once.
func (k *Kubelet) Run(ctx context.Context) error {
	if k.cfg.REST == nil || k.cfg.Images == nil {
		return errors.New("kubelet: Config.REST and Config.Images are needed")
	}
	if k.cfg.Dir == "" {
		dir, err := os.MkdirTemp("", "kubelet-")
		if err != nil {
			return fmt.Errorf("make a folder for pods: %w", err)
		}
		defer func() { _ = os.RemoveAll(dir) }()
		k.cfg.Dir = dir
	}
	dir, err := filepath.Abs(k.cfg.Dir)
	if err != nil {
		return fmt.Errorf("folder for pods: %w", err)
	}
	k.cfg.Dir = dir
	scheme := runtime.NewScheme()
	if err := clientgoscheme.AddToScheme(scheme); err != nil {
		return err
	}
	skip := true
	var namespaces map[string]cache.Config
	if k.cfg.Namespace != "" {
		namespaces = map[string]cache.Config{k.cfg.Namespace: {}}
	}
	mgr, err := ctrl.NewManager(k.cfg.REST, ctrl.Options{
		Scheme: scheme, Logger: k.cfg.Log, Metrics: metricsserver.Options{BindAddress: "0"}, HealthProbeBindAddress: "0",
		Controller: config.Controller{SkipNameValidation: &skip}, Cache: cache.Options{DefaultNamespaces: namespaces, ByObject: map[client.Object]cache.ByObject{
			&appsv1.Deployment{}:  {Label: k.cfg.Selector},
			&appsv1.StatefulSet{}: {Label: k.cfg.Selector},
		}},
	})
	if err != nil {
		return fmt.Errorf("kubelet: %w", err)
	}
	k.client, k.live = mgr.GetClient(), mgr.GetAPIReader()
	if err := k.setupWorkloads(mgr); err != nil {
		return err
	}
	if err := k.setupPods(mgr); err != nil {
		return err
	}
	defer k.stopAll()
	return mgr.Start(ctx)
}

// stopAll ends every process; the Pods stay as they are.
func (k *Kubelet) stopAll() {
	k.mu.Lock()
	runners := make([]*runner, 0, len(k.runners))
	for _, r := range k.runners {
		runners = append(runners, r)
	}
	k.mu.Unlock()
	var wg sync.WaitGroup
	for _, r := range runners {
		wg.Go(func() {
			r.terminate(k.cfg.StopGrace)
			<-r.done
		})
	}
	wg.Wait()
}

// podDir is the folder of a pod.
func (k *Kubelet) podDir(p *corev1.Pod) string {
	return filepath.Join(k.cfg.Dir, p.Namespace+"_"+p.Name)
}

// poke has a pod looked at again.
func (k *Kubelet) poke(p *corev1.Pod) {
	select {
	case k.wake <- event.TypedGenericEvent[*corev1.Pod]{Object: p}:
	default: // it is full of pods that will be looked at
	}
}
