package controllers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/kubeenv"
)

func TestMain(m *testing.M) {
	if os.Getenv("SHOVE_TEST_LOG") != "" {
		ctrl.SetLogger(zap.New(zap.UseDevMode(true)))
	} else {
		ctrl.SetLogger(logr.Discard())
	}
	testenv.Main(m,
		goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"),
		goleak.IgnoreTopFunction("k8s.io/apimachinery/pkg/watch.(*filteredWatch).loop"),
		// client-go's event broadcaster and cached transports outlive their manager
		goleak.IgnoreAnyFunction("net/http.(*http2clientConnReadLoop).run"),
		goleak.IgnoreAnyFunction("golang.org/x/net/http2.(*clientConnReadLoop).run"),
		goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"),
		goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"),
	)
}

func testScheme(t testing.TB) *runtime.Scheme {
	t.Helper()
	s := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(s), v1alpha1.AddToScheme(s)); err != nil {
		t.Fatal(err)
	}
	return s
}

// cluster is an API server with the operator running on it, in namespaces of the test's own.
type cluster struct {
	t      testing.TB
	cfg    *rest.Config
	client client.Client // uncached
	ns     string
	stop   func()
	reg    *prometheus.Registry
}

// start runs the operator with these drivers, watching one new namespace and the given ones.
func start(t testing.TB, drivers ...broker.Driver) *cluster {
	t.Helper()
	c := connect(t)
	c.run(Options{Drivers: drivers, Namespaces: []string{c.ns}})
	return c
}

// connect makes a namespace for the test, without an operator.
func connect(t testing.TB) *cluster {
	t.Helper()
	cfg := kubeenv.ControlPlane(t)
	cl, err := client.New(cfg, client.Options{Scheme: testScheme(t)})
	if err != nil {
		t.Fatal(err)
	}
	return &cluster{t: t, cfg: cfg, client: cl, ns: kubeenv.Namespace(t, cfg)}
}

// run starts the operator; it ends with the test, or with c.stop.
func (c *cluster) run(o Options) {
	c.t.Helper()
	skip := true
	c.reg = prometheus.NewRegistry()
	o.Registry = c.reg
	mgr, err := ctrl.NewManager(c.cfg, ctrl.Options{
		Scheme: c.client.Scheme(), Cache: CacheOptions(o.Namespaces, nil), Metrics: metricsserver.Options{BindAddress: "0"},
		Controller: config.Controller{SkipNameValidation: &skip},
	})
	if err != nil {
		c.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	if err := Controllers(ctx, mgr, o); err != nil {
		c.t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	stopped := false
	c.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			c.t.Errorf("the manager ended with: %v", err)
		}
	}
	c.t.Cleanup(c.stop)
}

func (c *cluster) create(objs ...client.Object) {
	c.t.Helper()
	for _, o := range objs {
		if o.GetNamespace() == "" {
			o.SetNamespace(c.ns)
		}
		if err := c.client.Create(context.Background(), o); err != nil {
			c.t.Fatal(err)
		}
	}
}

func (c *cluster) update(o client.Object) {
	c.t.Helper()
	if err := c.client.Update(context.Background(), o); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) get(o client.Object) {
	c.t.Helper()
	if err := c.client.Get(context.Background(), client.ObjectKeyFromObject(o), o); err != nil {
		c.t.Fatal(err)
	}
}

// patience is how long a test waits for something that should take a moment.
const patience = 20 * time.Second

// conditionIs waits until a condition of o, for its present generation, has the status and reason; o is read anew.
func (c *cluster) conditionIs(o v1alpha1.ConditionedObject, kind string, status metav1.ConditionStatus, reason string) *metav1.Condition {
	c.t.Helper()
	var found *metav1.Condition
	testenv.Eventually(c.t, patience, func() error {
		if err := c.client.Get(context.Background(), client.ObjectKeyFromObject(o.(client.Object)), o.(client.Object)); err != nil {
			return err
		}
		found = meta.FindStatusCondition(o.GetConditions(), kind)
		switch {
		case found == nil:
			return fmt.Errorf("%T %s has no condition %s: %s", o, o.GetName(), kind, describe(o))
		case found.Status != status || reason != "" && found.Reason != reason || found.ObservedGeneration != o.GetGeneration():
			return fmt.Errorf("%T %s: want %s=%s (%s): %s", o, o.GetName(), kind, status, reason, describe(o))
		}
		return nil
	})
	checkConditions(c.t, o)
	return found
}

func (c *cluster) ready(o v1alpha1.ConditionedObject) {
	c.t.Helper()
	c.conditionIs(o, v1alpha1.ConditionReady, metav1.ConditionTrue, "")
}

// stalled waits until o says that a person has to act, with this reason; it returns the message.
func (c *cluster) stalled(o v1alpha1.ConditionedObject, reason string) string {
	c.t.Helper()
	c.conditionIs(o, v1alpha1.ConditionStalled, metav1.ConditionTrue, reason)
	return c.conditionIs(o, v1alpha1.ConditionReady, metav1.ConditionFalse, reason).Message
}

// waits waits until o says that it will get there by itself, with this reason; it returns the message.
func (c *cluster) waits(o v1alpha1.ConditionedObject, reason string) string {
	c.t.Helper()
	c.conditionIs(o, v1alpha1.ConditionReconciling, metav1.ConditionTrue, reason)
	return c.conditionIs(o, v1alpha1.ConditionReady, metav1.ConditionFalse, reason).Message
}

func describe(o v1alpha1.ConditionedObject) string {
	var b strings.Builder
	for _, c := range o.GetConditions() {
		fmt.Fprintf(&b, "\n  %s=%s (%s, generation %d): %s", c.Type, c.Status, c.Reason, c.ObservedGeneration, c.Message)
	}
	return b.String()
}

// checkConditions holds the conditions of any object to what kstatus and our own documents promise.
func checkConditions(t testing.TB, o v1alpha1.ConditionedObject) {
	t.Helper()
	cs := o.GetConditions()
	is := func(kind string) bool { return meta.IsStatusConditionTrue(cs, kind) }
	ready := meta.FindStatusCondition(cs, v1alpha1.ConditionReady)
	switch {
	case ready == nil:
		t.Errorf("%T %s has no condition Ready", o, o.GetName())
	case is(v1alpha1.ConditionReconciling) && is(v1alpha1.ConditionStalled):
		t.Errorf("%T %s is Reconciling and Stalled%s", o, o.GetName(), describe(o))
	case is(v1alpha1.ConditionReady) && (is(v1alpha1.ConditionReconciling) || is(v1alpha1.ConditionStalled)):
		t.Errorf("%T %s is Ready and not%s", o, o.GetName(), describe(o))
	case !is(v1alpha1.ConditionReady) && !is(v1alpha1.ConditionReconciling) && !is(v1alpha1.ConditionStalled):
		t.Errorf("%T %s is not Ready and says neither Reconciling nor Stalled%s", o, o.GetName(), describe(o))
	}
	for _, c := range cs {
		if c.Message == "" || c.Reason == "" {
			t.Errorf("%T %s: condition %s has no reason or no message", o, o.GetName(), c.Type)
		}
		if (c.Type == v1alpha1.ConditionReconciling || c.Type == v1alpha1.ConditionStalled) && c.Status != metav1.ConditionTrue {
			t.Errorf("%T %s: %s is %s, not absent", o, o.GetName(), c.Type, c.Status)
		}
		if c.ObservedGeneration > o.GetGeneration() {
			t.Errorf("%T %s: condition %s is about a generation to come", o, o.GetName(), c.Type)
		}
		for _, secret := range []string{secretPassword, "@127.0.0.1"} {
			if strings.Contains(c.Message, secret) {
				t.Errorf("%T %s: condition %s shows a secret", o, o.GetName(), c.Type)
			}
		}
	}
}

// eventsOf are the events about an object, by reason.
func (c *cluster) eventsOf(o client.Object) map[string][]eventsv1.Event {
	c.t.Helper()
	var list eventsv1.EventList
	if err := c.client.List(context.Background(), &list, client.InNamespace(o.GetNamespace())); err != nil {
		c.t.Fatal(err)
	}
	out := map[string][]eventsv1.Event{}
	for _, e := range list.Items {
		if e.Regarding.UID == o.GetUID() {
			out[e.Reason] = append(out[e.Reason], e)
		}
	}
	return out
}

// event waits for an event about o and returns its note.
func (c *cluster) event(o client.Object, reason string) string {
	c.t.Helper()
	note := ""
	testenv.Eventually(c.t, patience, func() error {
		es := c.eventsOf(o)
		if len(es[reason]) == 0 {
			var have []string
			for r := range es {
				have = append(have, r)
			}
			slices.Sort(have)
			return fmt.Errorf("no event %s about %s, only %v", reason, o.GetName(), have)
		}
		note = es[reason][0].Note
		return nil
	})
	return note
}

const secretPassword = "correct-horse-battery" //nolint:gosec // of a test

func secret(name string, data map[string]string) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, StringData: data}
}

func rabbitBroker(name, url, management string) *v1alpha1.Broker {
	b := &v1alpha1.Broker{ObjectMeta: metav1.ObjectMeta{Name: name}}
	b.Spec.RabbitMQ = &v1alpha1.RabbitMQBroker{URL: url}
	if management != "" {
		b.Spec.RabbitMQ.Management = &v1alpha1.RabbitMQManagement{URL: management}
	}
	b.Spec.Credentials = &v1alpha1.CredentialsSource{SecretRef: v1alpha1.SecretReference{Name: name + "-admin"}}
	return b
}

// orders is a Topology with two tiers and a dead-letter queue.
func orders(name, brokerName string) *v1alpha1.Topology {
	t := &v1alpha1.Topology{ObjectMeta: metav1.ObjectMeta{Name: name}}
	t.Spec.BrokerRef.Name = brokerName
	t.Spec.HoldQueues = holds(5*time.Second, 30*time.Second)
	t.Spec.DeadLetter = &v1alpha1.DeadLetter{}
	return t
}

func holds(ds ...time.Duration) []v1alpha1.HoldQueue {
	out := make([]v1alpha1.HoldQueue, len(ds))
	for i, d := range ds {
		out[i].Delay = metav1.Duration{Duration: d}
	}
	return out
}
