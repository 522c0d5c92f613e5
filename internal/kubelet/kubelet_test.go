package kubelet_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/internal/kubelet"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/kubeenv"
)

func TestMain(m *testing.M) {
	if os.Getenv("KUBELET_TEST_WORKER") != "" {
		worker()
		return
	}
	testenv.Main(m)
}

// report is what the worker process tells about itself over HTTP.
type report struct {
	Args   []string
	Env    map[string]string
	Config string
	Secret string
}

// worker is the program in the pods of these tests.
func worker() {
	show := func(w http.ResponseWriter, _ *http.Request) {
		r := report{Args: os.Args[1:], Env: map[string]string{}}
		for _, e := range os.Environ() {
			k, v, _ := strings.Cut(e, "=")
			r.Env[k] = v
		}
		b, _ := os.ReadFile(os.Getenv("CONFIG"))
		r.Config = string(b)
		b, _ = os.ReadFile(filepath.Join(filepath.Dir(os.Getenv("CONFIG")), "password"))
		r.Secret = string(b)
		_ = json.NewEncoder(w).Encode(r)
	}
	l, err := net.Listen("tcp", net.JoinHostPort(os.Getenv("POD_IP"), "9464"))
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	go func() { _ = http.Serve(l, http.HandlerFunc(show)) }()
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	<-term
	if path := os.Getenv("GOODBYE"); path != "" {
		_ = os.WriteFile(path, []byte("SIGTERM"), 0o600)
	}
}

type world struct {
	client.Client
	t   *testing.T
	ns  string
	dir string
}

// run starts a stand-in for one namespace.
func run(t *testing.T, change func(*kubelet.Config)) *world {
	cfg := kubeenv.ControlPlane(t)
	c, err := client.New(cfg, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{Client: c, t: t, ns: kubeenv.Namespace(t, cfg), dir: t.TempDir()}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	kc := kubelet.Config{REST: cfg, Dir: w.dir, Namespace: w.ns, Env: []string{"KUBELET_TEST_WORKER=1"}, Selector: selector(t, "test="+w.ns),
		Images: func(image string) ([]string, bool) { return []string{self}, strings.HasPrefix(image, "worker") }}
	if change != nil {
		change(&kc)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- kubelet.New(kc).Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return w
}

func (w *world) create(objs ...client.Object) {
	w.t.Helper()
	for _, o := range objs {
		o.SetNamespace(w.ns)
		if err := w.Create(context.Background(), o); err != nil {
			w.t.Fatal(err)
		}
	}
}

func (w *world) deployment(replicas int32) *appsv1.Deployment {
	labels := map[string]string{"app": "worker", "test": w.ns}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "worker", Labels: labels},
		Spec: appsv1.DeploymentSpec{Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: labels},
			Spec: corev1.PodSpec{
				Containers: []corev1.Container{{
					Name: "app", Image: "worker:1", Args: []string{"--config=/etc/app/config.yaml"},
					Env: []corev1.EnvVar{
						{Name: "CONFIG", Value: "/etc/app/config.yaml"},
						{Name: "GOODBYE", Value: "/scratch/goodbye"},
						{Name: "POD_IP", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "status.podIP"}}},
						{Name: "POD_NAME", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}},
						{Name: "GREETING", Value: "$(POD_NAME) at $$(POD_IP)"},
					},
					VolumeMounts:   []corev1.VolumeMount{{Name: "config", MountPath: "/etc/app"}, {Name: "scratch", MountPath: "/scratch"}},
					ReadinessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/", Port: intstr.FromInt32(9464)}}},
				}},
				Volumes: []corev1.Volume{
					{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
					{Name: "config", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
						{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "c"}}},
						{Secret: &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "s"}}},
					}}}},
				},
			},
		}},
	}
}

func (w *world) config(text string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: w.ns}, Data: map[string]string{"config.yaml": text}}
}

func (w *world) secret(password string) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s", Namespace: w.ns}, StringData: map[string]string{"password": password}}
}

// pods waits for exactly n ready pods and nothing else.
func (w *world) pods(n int) []corev1.Pod {
	w.t.Helper()
	var list corev1.PodList
	testenv.Eventually(w.t, time.Minute, func() error {
		if err := w.List(context.Background(), &list, client.InNamespace(w.ns)); err != nil {
			return err
		}
		ready := 0
		for _, p := range list.Items {
			if slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
			}) {
				ready++
			}
		}
		if ready != n || len(list.Items) != n {
			return fmt.Errorf("%d of %d pods are ready, want %d", ready, len(list.Items), n)
		}
		return nil
	})
	return list.Items
}

func (w *world) ask(p corev1.Pod) (report, error) {
	resp, err := http.Get("http://" + net.JoinHostPort(p.Status.PodIP, "9464"))
	if err != nil {
		return report{}, err
	}
	defer func() { _ = resp.Body.Close(); http.DefaultClient.CloseIdleConnections() }()
	var r report
	return r, json.NewDecoder(resp.Body).Decode(&r)
}

func TestPodsOfADeploymentRunWithTheirVolumesAndEnvironment(t *testing.T) {
	w := run(t, nil)
	w.create(w.deployment(2), w.config("dir: /etc/app\n"), w.secret("one"))
	pods := w.pods(2)
	if pods[0].Status.PodIP == pods[1].Status.PodIP {
		t.Errorf("both pods have the address %s", pods[0].Status.PodIP)
	}
	r, err := w.ask(pods[0])
	if err != nil {
		t.Fatal(err)
	}
	volumes := filepath.Join(w.dir, w.ns+"_"+pods[0].Name, "volumes")
	if want := "--config=" + volumes + "/config/config.yaml"; len(r.Args) != 1 || r.Args[0] != want {
		t.Errorf("arguments %q, want %q", r.Args, want)
	}
	if want := "dir: " + volumes + "/config\n"; r.Config != want {
		t.Errorf("configuration %q, want %q", r.Config, want)
	}
	if r.Secret != "one" {
		t.Errorf("secret %q, want %q", r.Secret, "one")
	}
	if want := pods[0].Name + " at $(POD_IP)"; r.Env["GREETING"] != want {
		t.Errorf("GREETING=%q, want %q", r.Env["GREETING"], want)
	}
	testenv.Eventually(t, time.Minute, func() error {
		var d appsv1.Deployment
		if err := w.Get(context.Background(), client.ObjectKey{Namespace: w.ns, Name: "worker"}, &d); err != nil {
			return err
		}
		if d.Status.ReadyReplicas != 2 || d.Status.ObservedGeneration != d.Generation {
			return fmt.Errorf("status of the Deployment: %+v", d.Status)
		}
		return nil
	})

	// A changed template replaces pods, a deleted Deployment's pods end with SIGTERM.
	var d appsv1.Deployment
	if err := w.Get(context.Background(), client.ObjectKey{Namespace: w.ns, Name: "worker"}, &d); err != nil {
		t.Fatal(err)
	}
	before := d.DeepCopy()
	d.Spec.Template.Spec.Containers[0].Image = "worker:2"
	one := int32(1)
	d.Spec.Replicas = &one
	if err := w.Patch(context.Background(), &d, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, func() error {
		if p := w.pods(1)[0]; p.Spec.Containers[0].Image != "worker:2" {
			return fmt.Errorf("a pod still runs %s", p.Spec.Containers[0].Image)
		}
		return nil
	})
}

// quiet waits until nothing is written to a pod any more: the stand-in's own last write of its status is a change of the
// pod, too, and has its volumes looked at.
func (w *world) quiet(p corev1.Pod) corev1.Pod {
	w.t.Helper()
	since := time.Now()
	testenv.Eventually(w.t, time.Minute, func() error {
		version := p.ResourceVersion
		if err := w.Get(context.Background(), client.ObjectKeyFromObject(&p), &p); err != nil {
			return err
		}
		if p.ResourceVersion != version {
			since = time.Now()
		}
		if time.Since(since) < time.Second {
			return fmt.Errorf("the pod changed %v ago", time.Since(since))
		}
		return nil
	})
	return p
}

func TestVolumesFollowTheirObjects(t *testing.T) {
	for _, tc := range []struct {
		name   string
		period time.Duration
		poke   bool
	}{
		{"at once", 0, false},
		{"when the pod changes", time.Hour, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := run(t, func(c *kubelet.Config) { c.SyncPeriod = tc.period })
			w.create(w.config("v: 1\n"), w.secret("one"), w.deployment(1))
			p := w.pods(1)[0]
			if tc.poke {
				p = w.quiet(p)
			}
			restarts := p.Status.ContainerStatuses[0].RestartCount
			if err := w.Update(context.Background(), w.config("v: 2\n")); err != nil {
				t.Fatal(err)
			}
			if err := w.Update(context.Background(), w.secret("two")); err != nil {
				t.Fatal(err)
			}
			if tc.poke {
				testenv.Consistently(t, 300*time.Millisecond, func() error {
					if r, err := w.ask(p); err != nil || r.Config != "v: 1\n" {
						return fmt.Errorf("the file changed before the pod did: %q %v", r.Config, err)
					}
					return nil
				})
				patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"poke":"1"}}}`))
				if err := w.Patch(context.Background(), &p, patch); err != nil {
					t.Fatal(err)
				}
			}
			testenv.Eventually(t, time.Minute, func() error {
				r, err := w.ask(p)
				if err != nil || r.Config != "v: 2\n" || r.Secret != "two" {
					return fmt.Errorf("configuration %q, secret %q: %v", r.Config, r.Secret, err)
				}
				return nil
			})
			if got := w.pods(1)[0]; got.UID != p.UID || got.Status.ContainerStatuses[0].RestartCount != restarts {
				t.Error("the pod was replaced or restarted")
			}
		})
	}
}

func TestAPodWaitsForWhatItNeedsAndEndsInItsGracePeriod(t *testing.T) {
	w := run(t, nil)
	w.create(w.deployment(1))
	testenv.Eventually(t, time.Minute, func() error {
		var list corev1.PodList
		if err := w.List(context.Background(), &list, client.InNamespace(w.ns)); err != nil {
			return err
		}
		for _, p := range list.Items {
			for _, c := range p.Status.ContainerStatuses {
				if c.State.Waiting != nil && strings.Contains(c.State.Waiting.Message, `ConfigMap "c" does not exist`) {
					return nil
				}
			}
		}
		return fmt.Errorf("no pod says what it waits for: %+v", list.Items)
	})
	w.create(w.config("v: 1\n"), w.secret("one"))
	p := w.pods(1)[0]
	goodbye := filepath.Join(t.TempDir(), "goodbye")
	// The scratch folder goes with the pod; a link keeps what the process writes at its end.
	if err := os.Symlink(goodbye, filepath.Join(w.dir, w.ns+"_"+p.Name, "volumes", "scratch", "goodbye")); err != nil {
		t.Fatal(err)
	}
	if err := w.Delete(context.Background(), &p); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, func() error {
		var again corev1.Pod
		if err := w.Get(context.Background(), client.ObjectKeyFromObject(&p), &again); !apierrors.IsNotFound(err) && again.UID == p.UID {
			return fmt.Errorf("the pod is still there: %v", err)
		}
		return nil
	})
	if b, err := os.ReadFile(goodbye); err != nil || string(b) != "SIGTERM" {
		t.Errorf("the process did not end by SIGTERM: %q %v", b, err)
	}
	w.pods(1) // and is replaced
}

func TestAServiceAccountReachesTheProcess(t *testing.T) {
	w := run(t, nil)
	d := w.deployment(1)
	d.Spec.Template.Spec.ServiceAccountName = "robot"
	w.create(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "robot"}},
		&rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "robot"}, Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"get"}}}},
		&rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "robot"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "robot"},
			Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Name: "robot", Namespace: w.ns}}},
		w.config("v: 1\n"), w.secret("one"), d)
	r, err := w.ask(w.pods(1)[0])
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", r.Env["KUBECONFIG"])
	if err != nil {
		t.Fatal(err)
	}
	robot, err := client.New(cfg, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := robot.Get(context.Background(), client.ObjectKey{Namespace: w.ns, Name: "c"}, &corev1.ConfigMap{}); err != nil {
		t.Errorf("what the role allows: %v", err)
	}
	if err := robot.Get(context.Background(), client.ObjectKey{Namespace: w.ns, Name: "s"}, &corev1.Secret{}); !apierrors.IsForbidden(err) {
		t.Errorf("what the role does not allow: %v, want Forbidden", err)
	}
}

func selector(t *testing.T, s string) labels.Selector {
	t.Helper()
	sel, err := labels.Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	return sel
}
