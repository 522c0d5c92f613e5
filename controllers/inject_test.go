package controllers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	applyapps "k8s.io/client-go/applyconfigurations/apps/v1"
	applycore "k8s.io/client-go/applyconfigurations/core/v1"
	applymeta "k8s.io/client-go/applyconfigurations/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/memory"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/topology"
)

// rabbitInMemory is the in-memory broker in the clothes of RabbitMQ.
func rabbitInMemory() broker.Driver {
	d := memory.Driver(memory.New(memory.Options{}))
	d.Kind = topology.RabbitMQ
	d.LeaseLimit = func(json.RawMessage) (time.Duration, error) { return 30 * time.Minute, nil }
	return d
}

// shop is a cluster with a ready Broker "rabbit" and a ready Topology "orders".
type shop struct {
	*cluster
	broker   *v1alpha1.Broker
	topology *v1alpha1.Topology
	pods     *fakePods
	driver   broker.Driver
}

// fakePods answer for what pods would report.
type fakePods struct {
	mu      sync.Mutex
	reports map[string]PodReport
}

func (f *fakePods) set(pod string, r PodReport) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reports[pod] = r
}

func (f *fakePods) report(_ context.Context, p *corev1.Pod) (PodReport, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r, ok := f.reports[p.Name]
	if !ok {
		return PodReport{}, errors.New("connection refused")
	}
	return r, nil
}

func openShop(t *testing.T, more ...string) *shop {
	t.Helper()
	s := &shop{cluster: connect(t), pods: &fakePods{reports: map[string]PodReport{}}, driver: rabbitInMemory()}
	s.create(secret("rabbit-admin", map[string]string{"username": "admin", "password": secretPassword}))
	s.open(more...)
	s.broker, s.topology = rabbitBroker("rabbit", "amqp://rabbit.shop.svc:5672/", "http://rabbit.shop.svc:15672"), orders("orders", "rabbit")
	s.create(s.broker, s.topology)
	s.ready(s.topology)
	return s
}

// open starts the operator (again).
func (s *shop) open(more ...string) {
	s.run(Options{Drivers: []broker.Driver{s.driver}, Namespaces: append([]string{s.ns}, more...), PodReporter: s.pods.report})
}

func group(name, topo, workload string) *v1alpha1.ConsumerGroup {
	g := &v1alpha1.ConsumerGroup{ObjectMeta: metav1.ObjectMeta{Name: name}}
	g.Spec.TopologyRef.Name = topo
	if workload != "" {
		g.Spec.WorkloadRef = &v1alpha1.WorkloadReference{Kind: v1alpha1.WorkloadDeployment, Name: workload}
	}
	return g
}

func deployment(name string, containers ...string) *appsv1.Deployment {
	labels := map[string]string{"app": name}
	d := &appsv1.Deployment{TypeMeta: metav1.TypeMeta{APIVersion: "apps/v1", Kind: "Deployment"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{v1alpha1.AnnotationInject: "true"}}}
	d.Spec.Selector = &metav1.LabelSelector{MatchLabels: labels}
	d.Spec.Template.Labels = labels
	if len(containers) == 0 {
		containers = []string{"app"}
	}
	for _, c := range containers {
		d.Spec.Template.Spec.Containers = append(d.Spec.Template.Spec.Containers, corev1.Container{Name: c, Image: "worker:1", Env: []corev1.EnvVar{{Name: "A", Value: "1"}}})
	}
	return d
}

// file is the configuration that a workload has, once ok says that it is the one that is waited for.
func (s *shop) file(name string, ok func(*config.RuntimeConfig) error) *config.RuntimeConfig {
	s.t.Helper()
	var out *config.RuntimeConfig
	testenv.Eventually(s.t, patience, func() error {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: name}}
		if err := s.client.Get(context.Background(), client.ObjectKeyFromObject(cm), cm); err != nil {
			return err
		}
		c, warnings, err := config.Parse([]byte(cm.Data[render.ConfigFile]))
		if err != nil || len(warnings) > 0 {
			s.t.Fatalf("the rendered file is not valid: %v %v\n%s", err, warnings, cm.Data[render.ConfigFile])
		}
		out = c
		return ok(c)
	})
	return out
}

func consumes(topologies ...string) func(*config.RuntimeConfig) error {
	return func(c *config.RuntimeConfig) error {
		var have []string
		for _, k := range c.Consumers {
			have = append(have, k.Topology)
		}
		if d := cmp.Diff(topologies, have); d != "" {
			return fmt.Errorf("consumers (-want +got):\n%s", d)
		}
		return nil
	}
}

// taken waits until nothing of an injection is left in the workload and beside it, and compares the workload with
// what it was.
func (s *shop) taken(before, now *appsv1.Deployment) {
	s.t.Helper()
	name := render.Target{Kind: "Deployment", Namespace: s.ns, Name: now.Name}.ObjectName()
	testenv.Eventually(s.t, patience, func() error {
		s.get(now)
		for _, m := range now.ManagedFields {
			if m.Manager == render.FieldOwner {
				return fmt.Errorf("the operator still owns %s", m.FieldsV1.GetRawString())
			}
		}
		for _, o := range []client.Object{&corev1.ConfigMap{}, &corev1.Secret{}} {
			if err := s.client.Get(context.Background(), types.NamespacedName{Namespace: s.ns, Name: name}, o); !apierrors.IsNotFound(err) {
				return fmt.Errorf("%T %s is still there: %v", o, name, err)
			}
		}
		return nil
	})
	if d := cmp.Diff(before.Spec, now.Spec); d != "" {
		s.t.Errorf("the spec is not what it was (-before +after):\n%s", d)
	}
	if d := cmp.Diff(before.Annotations, now.Annotations); d != "" {
		s.t.Errorf("the annotations are not what they were (-before +after):\n%s", d)
	}
}

func TestTwoGroupsShareOneWorkload(t *testing.T) {
	s := openShop(t)
	refunds := orders("refunds", "rabbit")
	d := deployment("worker")
	s.create(refunds, d)
	before := d.DeepCopy()
	first, second := group("orders-worker", "orders", "worker"), group("refunds-worker", "refunds", "worker")
	s.create(first, second)
	s.ready(first)
	s.ready(second)
	s.file("worker.deployment.shove", consumes("orders", "refunds"))

	s.get(d)
	injected := d.DeepCopy()
	want := before.Spec.Template.DeepCopy()
	want.Spec.Volumes = []corev1.Volume{{Name: "shove", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
		DefaultMode: ptr(int32(0o644)), Sources: []corev1.VolumeProjection{
			{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "worker.deployment.shove"}}},
			{Secret: &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "worker.deployment.shove"}, Optional: ptr(true)}},
		}}}}}
	c := &want.Spec.Containers[0]
	c.Env = append(c.Env, corev1.EnvVar{Name: "SHOVE_CONFIG", Value: "/etc/shove/config.yaml"})
	c.VolumeMounts = []corev1.VolumeMount{{Name: "shove", MountPath: "/etc/shove", ReadOnly: true}}
	if diff := cmp.Diff(*want, d.Spec.Template); diff != "" {
		t.Errorf("pod template (-want +got):\n%s", diff)
	}
	if got := d.Generation; got > before.Generation+2 {
		t.Errorf("two groups made %d rollouts", got-before.Generation)
	}

	if err := s.client.Delete(context.Background(), first); err != nil {
		t.Fatal(err)
	}
	s.file("worker.deployment.shove", consumes("refunds"))
	s.get(d)
	if d.Generation != injected.Generation {
		t.Errorf("removing one of two groups started a rollout: generation %d, was %d", d.Generation, injected.Generation)
	}
	if err := s.client.Delete(context.Background(), second); err != nil {
		t.Fatal(err)
	}
	s.taken(before, d)
}

func ptr[T any](v T) *T { return &v }

// TestOtherToolsAfterwards: a workload that is applied again by whoever made it keeps what was injected, and no
// rollout starts.
func TestOtherToolsAfterwards(t *testing.T) {
	s := openShop(t)
	for name, tool := range map[string]struct {
		create func(*appsv1.Deployment)
		again  func(manifest, live *appsv1.Deployment) error
	}{
		// kubectl apply and helm upgrade: a three-way strategic merge of the last manifest, the new one and the live object.
		"client-side": {
			create: func(m *appsv1.Deployment) { s.create(m.DeepCopy()) },
			again: func(m, live *appsv1.Deployment) error {
				manifest, err := json.Marshal(m)
				if err != nil {
					return err
				}
				current, err := json.Marshal(live)
				if err != nil {
					return err
				}
				lookup, err := strategicpatch.NewPatchMetaFromStruct(appsv1.Deployment{})
				if err != nil {
					return err
				}
				patch, err := strategicpatch.CreateThreeWayMergePatch(manifest, manifest, current, lookup, true)
				if err != nil {
					return err
				}
				return s.client.Patch(context.Background(), live, client.RawPatch(types.StrategicMergePatchType, patch), client.FieldOwner("helm"))
			},
		},
		// kubectl apply --server-side, Flux, Argo CD, Helm 4.
		"server-side": {
			create: func(m *appsv1.Deployment) {
				if err := s.client.Apply(context.Background(), serverSide(m), client.FieldOwner("flux")); err != nil {
					t.Fatal(err)
				}
			},
			again: func(m, _ *appsv1.Deployment) error {
				return s.client.Apply(context.Background(), serverSide(m), client.FieldOwner("flux"))
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			manifest := deployment(name)
			manifest.Namespace = s.ns
			tool.create(manifest)
			topo := orders(name, "rabbit")
			g := group(name, name, name)
			s.create(topo, g)
			s.ready(g)
			live := manifest.DeepCopy()
			s.get(live)
			injected := live.DeepCopy()
			for range 2 {
				if err := tool.again(manifest, live); err != nil {
					t.Fatal(err)
				}
			}
			testenv.Consistently(t, 500*time.Millisecond, func() error {
				s.get(live)
				if live.Generation != injected.Generation {
					return fmt.Errorf("generation %d, was %d: %s", live.Generation, injected.Generation, cmp.Diff(injected.Spec, live.Spec))
				}
				return nil
			})
			// A real change of the manifest is one rollout and keeps the injection.
			manifest.Spec.Template.Spec.Containers[0].Image = "worker:2"
			if err := tool.again(manifest, live); err != nil {
				t.Fatal(err)
			}
			testenv.Consistently(t, 300*time.Millisecond, func() error {
				s.get(live)
				want := injected.Spec.DeepCopy()
				want.Template.Spec.Containers[0].Image = "worker:2"
				if live.Generation != injected.Generation+1 {
					return fmt.Errorf("generation %d, was %d", live.Generation, injected.Generation)
				}
				if d := cmp.Diff(*want, live.Spec); d != "" {
					return fmt.Errorf("spec (-want +got):\n%s", d)
				}
				return nil
			})
		})
	}
}

// serverSide is a manifest as an apply configuration.
func serverSide(d *appsv1.Deployment) *applyapps.DeploymentApplyConfiguration {
	c := d.Spec.Template.Spec.Containers[0]
	return applyapps.Deployment(d.Name, d.Namespace).WithAnnotations(d.Annotations).WithSpec(applyapps.DeploymentSpec().
		WithSelector(applymeta.LabelSelector().WithMatchLabels(d.Spec.Selector.MatchLabels)).
		WithTemplate(applycore.PodTemplateSpec().WithLabels(d.Spec.Template.Labels).WithSpec(applycore.PodSpec().
			WithContainers(applycore.Container().WithName(c.Name).WithImage(c.Image).WithEnv(applycore.EnvVar().WithName("A").WithValue("1"))))))
}

func TestGracePeriod(t *testing.T) {
	s := openShop(t)
	t.Run("somebody else's is left alone and the number is said", func(t *testing.T) {
		d := deployment("owned")
		d.Spec.Template.Spec.TerminationGracePeriodSeconds = ptr(int64(20))
		g := group("owned", "orders", "owned")
		s.create(d, g)
		c := s.conditionIs(g, v1alpha1.ConditionGracePeriodTooShort, metaTrue, "")
		if !strings.Contains(c.Message, "needs 35") {
			t.Errorf("the message does not say the number: %s", c.Message)
		}
		s.ready(g)
		s.get(d)
		if got := *d.Spec.Template.Spec.TerminationGracePeriodSeconds; got != 20 {
			t.Errorf("grace period %d, want the user's 20", got)
		}
		// Its owner does as told.
		before := d.DeepCopy()
		d.Spec.Template.Spec.TerminationGracePeriodSeconds = ptr(int64(35))
		if err := s.client.Patch(context.Background(), d, client.MergeFrom(before)); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, patience, func() error {
			s.get(g)
			if meta.FindStatusCondition(g.Status.Conditions, v1alpha1.ConditionGracePeriodTooShort) != nil {
				return errors.New("the warning is still there")
			}
			return nil
		})
	})
	t.Run("nobody's is set, and an option does not move it", func(t *testing.T) {
		d := deployment("free")
		d.Namespace = s.ns
		if err := s.client.Apply(context.Background(), serverSide(d), client.FieldOwner("flux")); err != nil {
			t.Fatal(err)
		}
		topo, g := orders("free", "rabbit"), group("free", "free", "free")
		s.create(topo, g)
		s.ready(g)
		s.get(d)
		if got := *d.Spec.Template.Spec.TerminationGracePeriodSeconds; got != 35 {
			t.Errorf("grace period %d, want 35: 30 s of drain and a margin", got)
		}
		injected := d.DeepCopy()
		s.patch(g, func() { g.Spec.DrainTimeout = &metav1.Duration{Duration: 2 * time.Minute} })
		c := s.conditionIs(g, v1alpha1.ConditionGracePeriodTooShort, metaTrue, "")
		if !strings.Contains(c.Message, "needs 125") {
			t.Errorf("the message does not say the number: %s", c.Message)
		}
		s.get(d)
		if d.Generation != injected.Generation {
			t.Errorf("an option started a rollout: %s", cmp.Diff(injected.Spec, d.Spec))
		}
	})
}

// patch changes an object by a merge patch.
func (c *cluster) patch(o client.Object, change func()) {
	c.t.Helper()
	c.get(o)
	before := o.DeepCopyObject().(client.Object)
	change()
	if err := c.client.Patch(context.Background(), o, client.MergeFrom(before)); err != nil {
		c.t.Fatal(err)
	}
}

func TestAFieldThatSomebodyElseSetsIsNotForced(t *testing.T) {
	s := openShop(t)
	d := deployment("worker")
	d.Namespace = s.ns
	mine := serverSide(d)
	mine.Spec.Template.Spec.Containers[0].WithEnv(applycore.EnvVar().WithName(config.EnvPath).WithValue("/mine.yaml"))
	if err := s.client.Apply(context.Background(), mine, client.FieldOwner("flux")); err != nil {
		t.Fatal(err)
	}
	g := group("worker", "orders", "worker")
	s.create(g)
	message := s.stalled(g, v1alpha1.ReasonFieldOwnedByOther)
	for _, part := range []string{"flux", config.EnvPath} {
		if !strings.Contains(message, part) {
			t.Errorf("the message does not name %q: %s", part, message)
		}
	}
	s.get(d)
	if len(d.Spec.Template.Spec.Volumes) > 0 || d.Spec.Template.Spec.Containers[0].Env[1].Value != "/mine.yaml" {
		t.Errorf("something was injected: %+v", d.Spec.Template.Spec)
	}
	// When it is removed, the injection goes on by itself.
	if err := s.client.Apply(context.Background(), serverSide(d), client.FieldOwner("flux")); err != nil {
		t.Fatal(err)
	}
	s.ready(g)
}

func TestTheWorkloadHasToAgree(t *testing.T) {
	s := openShop(t)
	g := group("worker", "orders", "worker")
	s.create(g)
	s.waits(g, v1alpha1.ReasonWorkloadNotFound)
	d := deployment("worker")
	d.Annotations = nil
	s.create(d)
	before := d.DeepCopy()
	s.stalled(g, v1alpha1.ReasonInjectionNotAllowed)
	s.get(d)
	if d.Generation != before.Generation {
		t.Error("a workload was changed that does not allow it")
	}
	s.patch(d, func() { d.Annotations = map[string]string{v1alpha1.AnnotationInject: "true"} })
	s.ready(g)
	s.patch(d, func() { delete(d.Annotations, v1alpha1.AnnotationInject) })
	s.stalled(g, v1alpha1.ReasonInjectionNotAllowed)
	s.taken(before, d)
}

func TestAContainerHasToBeNamed(t *testing.T) {
	s := openShop(t)
	g := group("worker", "orders", "worker")
	s.create(deployment("worker", "app", "proxy"), g)
	if m := s.stalled(g, v1alpha1.ReasonContainerAmbiguous); !strings.Contains(m, "app, proxy") {
		t.Errorf("the containers are not listed: %s", m)
	}
	other := group("other", "orders", "worker")
	other.Spec.WorkloadRef.Container = "nobody"
	s.create(other)
	s.stalled(other, v1alpha1.ReasonContainerNotFound)
}

func TestStatefulSetsAreWorkloadsToo(t *testing.T) {
	s := openShop(t)
	d := deployment("worker")
	w := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: "worker", Annotations: d.Annotations}}
	w.Spec.Selector, w.Spec.Template = d.Spec.Selector, d.Spec.Template
	g := group("worker", "orders", "worker")
	g.Spec.WorkloadRef.Kind = v1alpha1.WorkloadStatefulSet
	s.create(w, g)
	before := w.DeepCopy()
	s.ready(g)
	s.get(w)
	if len(w.Spec.Template.Spec.Volumes) != 1 || len(w.Spec.Template.Spec.Containers[0].VolumeMounts) != 1 {
		t.Errorf("pod template: %+v", w.Spec.Template.Spec)
	}
	if err := s.client.Delete(context.Background(), g); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, func() error {
		s.get(w)
		if diff := cmp.Diff(before.Spec, w.Spec); diff != "" {
			return fmt.Errorf("spec (-before +after):\n%s", diff)
		}
		return nil
	})
}
