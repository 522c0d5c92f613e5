package controllers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/rabbitmq"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/internal/kubelet"
	"github.com/shove-dev/shove/internal/testenv"
)

// liveWorker is the example's worker in a pod.
type liveWorker struct {
	*cluster
	deployment *appsv1.Deployment
	group      *v1alpha1.ConsumerGroup
}

// workerStatus is what matters here of a worker's /status.
type workerStatus struct {
	Generation string
	Consumers  []struct{ Topology, State string }
}

// TestLive_AWorkerFollowsItsManifests: the operator, a real broker, and the example's worker as a process that gets
// nothing but what its pod template says. Volumes are synced only when the pod changes, as a kubelet would at worst.
func TestLive_AWorkerFollowsItsManifests(t *testing.T) {
	c := connect(t)
	v := testenv.RabbitMQ(t).Vhost(t)
	v.AddUser(t, c.ns, "second", "", ".*", ".*", ".*") // for the rotation
	w := startLive(c, v)
	pod := w.settled()
	w.get(w.deployment)
	injected := w.deployment.DeepCopy()
	same := func(t *testing.T) {
		t.Helper()
		if now := w.settled(); now.UID != pod.UID || now.Status.ContainerStatuses[0].RestartCount != pod.Status.ContainerStatuses[0].RestartCount {
			t.Error("the pod was replaced or restarted")
		}
		w.get(w.deployment)
		if w.deployment.Generation != injected.Generation {
			t.Errorf("a rollout was started: %s", cmp.Diff(injected.Spec, w.deployment.Spec))
		}
	}

	t.Run("an option reaches the running pod", func(t *testing.T) {
		w.patch(w.group, func() { w.group.Spec.MaxRetries = ptr(int32(9)) })
		same(t)
	})
	t.Run("a pause does, and its end", func(t *testing.T) {
		for _, paused := range []bool{true, false} {
			w.patch(w.group, func() { w.group.Spec.Paused = paused })
			state := map[bool]string{true: "paused", false: "consuming"}[paused]
			testenv.Eventually(t, patience, func() error {
				s, err := w.ask(pod)
				if err == nil && !slices.ContainsFunc(s.Consumers, func(c struct{ Topology, State string }) bool {
					return c.Topology == "orders" && c.State == state
				}) {
					err = fmt.Errorf("consumers are %+v, want %s", s.Consumers, state)
				}
				return err
			})
			same(t)
		}
	})
	t.Run("a rotated Secret does", func(t *testing.T) {
		app := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "rabbit-app"}}
		w.patch(app, func() { app.Data["username"], app.Data["password"] = []byte(w.ns), []byte("second") })
		testenv.Eventually(t, 60*time.Second, func() error {
			// The worker keeps its connection until it is lost; whatever user it has then is the new one.
			var conns []struct{ Name, User string }
			if err := v.Server.Call(http.MethodGet, "/api/vhosts/"+v.Name+"/connections", nil, &conns); err != nil {
				return err
			}
			for _, conn := range conns {
				if conn.User == w.ns {
					return nil
				}
			}
			for _, conn := range conns {
				_ = v.Server.Call(http.MethodDelete, "/api/connections/"+url.PathEscape(conn.Name), nil, nil)
			}
			time.Sleep(time.Second) // connections show up in the management API once they had time to report
			return fmt.Errorf("no connection of the new user among %d", len(conns))
		})
		same(t)
	})
	t.Run("a retired tier goes once every pod has left it", func(t *testing.T) {
		topo := &v1alpha1.Topology{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "orders"}}
		w.patch(topo, func() { topo.Spec.HoldQueues = holds(time.Second, 3*time.Second) })
		testenv.Eventually(t, 90*time.Second, func() error {
			if have := sortedKeys(queuesOf(t, v)); slices.Contains(have, "orders-hold-2s") {
				return fmt.Errorf("queues %v", have)
			}
			return nil
		})
		same(t)
	})
	t.Run("the end of the group takes everything back", func(t *testing.T) {
		if err := w.client.Delete(context.Background(), w.group); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, patience, func() error {
			w.get(w.deployment)
			if n := len(w.deployment.Spec.Template.Spec.Volumes); n > 0 || w.deployment.Annotations[render.AnnotationInjected] != "" {
				return fmt.Errorf("%d volumes are left", n)
			}
			return nil
		})
	})
}

// startLive starts everything and creates the objects.
func startLive(c *cluster, v testenv.RabbitMQVhost) *liveWorker {
	c.t.Helper()
	program := filepath.Join(c.t.TempDir(), "worker")
	if out, err := exec.Command("go", "build", "-o", program, "../examples/orders/worker").CombinedOutput(); err != nil {
		c.t.Fatalf("building the worker: %v\n%s", err, out)
	}
	node := kubelet.New(kubelet.Config{REST: c.cfg, Dir: c.t.TempDir(), Namespace: c.ns, SyncPeriod: time.Hour, Selector: labels.SelectorFromSet(labels.Set{"live": c.ns}),
		Images: func(string) ([]string, bool) { return []string{program}, true }})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- node.Run(ctx) }()
	c.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			c.t.Errorf("the stand-in for kubelet: %v", err)
		}
	})
	c.run(Options{Drivers: []broker.Driver{rabbitmq.Driver}, Namespaces: []string{c.ns}})

	u, m := address(c.t, v.URL), address(c.t, v.ManagementURL)
	password, _ := u.User.Password()
	user := map[string]string{"username": u.User.Username(), "password": password}
	u.User, m.User = nil, nil
	b := rabbitBroker("rabbit", u.String(), m.String())
	b.Spec.WorkloadCredentials = &v1alpha1.CredentialsSource{SecretRef: v1alpha1.SecretReference{Name: "rabbit-app"}}
	topo := orders("orders", "rabbit")
	topo.Spec.HoldQueues = holds(time.Second, 2*time.Second, 3*time.Second)
	w := &liveWorker{cluster: c, deployment: deployment("worker"), group: group("worker", "orders", "worker")}
	w.deployment.Labels = map[string]string{"live": c.ns}
	app := &w.deployment.Spec.Template.Spec.Containers[0]
	app.Env = []corev1.EnvVar{
		{Name: "POD_IP", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "status.podIP"}}},
		{Name: "SHOVE_HTTP_ADDR", Value: "$(POD_IP):" + strconv.Itoa(render.StatusPort)},
	}
	app.ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/readyz", Port: intstr.FromInt32(render.StatusPort)}}}
	c.create(secret("rabbit-admin", user), secret("rabbit-app", user), b, topo, w.group, w.deployment)
	return w
}

func address(t testing.TB, s string) *url.URL {
	t.Helper()
	u, err := url.Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// settled waits until one pod runs, is ready, and reports the configuration of the group's present generation.
func (w *liveWorker) settled() *corev1.Pod {
	w.t.Helper()
	var pod *corev1.Pod
	testenv.Eventually(w.t, 90*time.Second, func() error {
		w.get(w.group)
		g := w.group
		if g.Status.ObservedGeneration != g.Generation {
			return fmt.Errorf("the group is not looked at yet: %s", describe(g))
		}
		for _, kind := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionConfigDelivered} {
			if !slices.ContainsFunc(g.Status.Conditions, func(c metav1.Condition) bool { return c.Type == kind && c.Status == metaTrue }) {
				return fmt.Errorf("the group is not %s: %s", kind, describe(g))
			}
		}
		var list corev1.PodList
		if err := w.client.List(context.Background(), &list, client.InNamespace(w.ns)); err != nil {
			return err
		}
		if len(list.Items) != 1 {
			return fmt.Errorf("%d pods", len(list.Items))
		}
		pod = &list.Items[0]
		s, err := w.ask(pod)
		if err == nil && s.Generation != g.Status.ConfigGeneration {
			err = fmt.Errorf("the pod runs %q, want %q", s.Generation, g.Status.ConfigGeneration)
		}
		return err
	})
	return pod
}

var liveClient = &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

func (w *liveWorker) ask(p *corev1.Pod) (workerStatus, error) {
	if p.Status.PodIP == "" {
		return workerStatus{}, errors.New("the pod has no address")
	}
	resp, err := liveClient.Get("http://" + net.JoinHostPort(p.Status.PodIP, strconv.Itoa(render.StatusPort)) + "/status")
	if err != nil {
		return workerStatus{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	var s workerStatus
	return s, json.NewDecoder(resp.Body).Decode(&s)
}
