package controllers

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/topology"
)

func seconds(n int) *metav1.Duration {
	return &metav1.Duration{Duration: time.Duration(n) * time.Second}
}

func TestOptionsResolveByLayer(t *testing.T) {
	s := openShop(t)
	t.Run("H2", func(t *testing.T) {
		s.patch(s.broker, func() {
			s.broker.Spec.ConsumerDefaults = &v1alpha1.ConsumerOptions{HandlerTimeout: seconds(15), MaxRetries: ptr(int32(3)), Prefetch: ptr(int32(50))}
		})
		g := group("layers", "orders", "")
		g.Spec.MaxRetries = ptr(int32(7))
		s.create(g)
		s.ready(g)
		want := map[string]v1alpha1.EffectiveOption{
			"maxRetries":     {Value: "7", Layer: v1alpha1.LayerConsumerGroup},
			"handlerTimeout": {Value: "15s", Layer: v1alpha1.LayerBroker},
			"prefetch":       {Value: "50", Layer: v1alpha1.LayerBroker},
			"concurrency":    {Value: "10", Layer: v1alpha1.LayerDefault},
		}
		e := g.Status.Effective
		got := map[string]v1alpha1.EffectiveOption{"maxRetries": *e.MaxRetries, "handlerTimeout": *e.HandlerTimeout, "prefetch": *e.Prefetch, "concurrency": *e.Concurrency}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("effective options (-want +got):\n%s", d)
		}
		// The file keeps the layers apart, so that code can come between them.
		c := s.file("layers-shove", consumes("orders"))
		if o := c.Consumers[0].Options; o.HandlerTimeout != nil || o.MaxRetries == nil || *o.MaxRetries != 7 {
			t.Errorf("the group's layer is %+v", o)
		}
		if d := c.Brokers[0].ConsumerDefaults; d.HandlerTimeout == nil || time.Duration(*d.HandlerTimeout) != 15*time.Second {
			t.Errorf("the Broker's layer is %+v", d)
		}
	})
	t.Run("H11", func(t *testing.T) {
		g := group("slow", "orders", "")
		g.Spec.HandlerTimeout = seconds(20 * 60)
		g.Spec.Prefetch = ptr(int32(200))
		s.create(g)
		s.ready(g)
		if p := *g.Status.Effective.Prefetch; p.Value != "10" || p.Layer != v1alpha1.LayerBrokerLimit {
			t.Errorf("effective prefetch %+v, want 10 by the broker's limit", p)
		}
		if meta.FindStatusCondition(g.Status.Conditions, v1alpha1.ConditionHandlerTimeoutAboveBrokerLimit) != nil {
			t.Error("20 minutes are below the limit")
		}
		for _, timeout := range []int{0, 1741} {
			s.patch(g, func() { g.Spec.HandlerTimeout = seconds(timeout) })
			if c := s.conditionIs(g, v1alpha1.ConditionHandlerTimeoutAboveBrokerLimit, metaTrue, ""); !strings.Contains(c.Message, "at most 29m") {
				t.Errorf("the message does not say the limit: %s", c.Message)
			}
			s.ready(g)
		}
	})
}

func TestOptionsThatDoNotFit(t *testing.T) {
	s := openShop(t)
	bare := orders("bare", "rabbit")
	bare.Spec.HoldQueues = nil
	s.create(bare)
	t.Run("H7", func(t *testing.T) {
		g := group("deferring", "bare", "")
		g.Spec.HandlerTimeoutOutcome = ptr(v1alpha1.TimeoutDefer)
		s.create(g)
		if m := s.stalled(g, v1alpha1.ConditionTimeoutDeferWithoutHold); !strings.Contains(m, "add holdQueues") {
			t.Errorf("the fix is not named: %s", m)
		}
		s.file("deferring-shove", consumes())
		s.patch(bare, func() { bare.Spec.HoldQueues = holds(5 * time.Second) })
		s.ready(g)
		s.file("deferring-shove", consumes("bare"))
	})
	t.Run("J3", func(t *testing.T) {
		ext := orders("theirs", "rabbit")
		ext.Spec.External, ext.Spec.Queue = true, "orders"
		// The queue has an owner here; another one would need a queue outside of our own Topologies.
		ext.Spec.HoldQueues = nil
		c := render.Assess(republishing(s.ns, "theirs"), worldOf(s, ext))
		if len(c.Findings) == 0 || c.Findings[0].Condition != v1alpha1.ConditionRepublishOnExternal || !c.Blocked() {
			t.Errorf("findings %+v, want RepublishOnExternal", c.Findings)
		}
		g := republishing(s.ns, "theirs")
		g.Spec.RetryStrategy = nil
		if c := render.Assess(g, worldOf(s, ext)); c.Blocked() || render.Effective(c.Effective, c.Prefetch).RetryStrategy.Value != "InPlace" {
			t.Errorf("findings %+v, strategy %v", c.Findings, c.Effective.Strategy)
		}
	})
	t.Run("a topology that is not there", func(t *testing.T) {
		g := group("early", "later", "")
		s.create(g)
		s.waits(g, v1alpha1.ReasonTopologyNotFound)
		s.create(orders("later", "rabbit"))
		s.ready(g)
	})
	t.Run("paused", func(t *testing.T) {
		g := group("paused", "orders", "")
		g.Spec.Paused = true
		s.create(g)
		s.conditionIs(g, v1alpha1.ConditionPaused, metaTrue, v1alpha1.ReasonPaused)
		s.ready(g)
		if c := s.file("paused-shove", consumes("orders")); !c.Consumers[0].Paused {
			t.Error("the file does not say paused")
		}
	})
}

func republishing(ns, topo string) *v1alpha1.ConsumerGroup {
	g := group("g", topo, "")
	g.Namespace = ns
	g.Spec.RetryStrategy = ptr(v1alpha1.RetryRepublish)
	return g
}

// worldOf has the shop's Broker and one Topology.
func worldOf(s *shop, t *v1alpha1.Topology) render.World {
	w := (&lookup{deps: &deps{}}).world()
	w.Topology = func(types.NamespacedName) *v1alpha1.Topology { return t }
	w.Broker = func(types.NamespacedName) *v1alpha1.Broker { return s.broker }
	d := rabbitInMemory()
	drivers := (&deps{drivers: map[topology.Kind]broker.Driver{d.Kind: d}})
	w.Driver = (&lookup{deps: drivers}).world().Driver
	w.Labels = func(string) map[string]string { return nil }
	t.Namespace = s.broker.Namespace
	return w
}

func TestScalingIsLeftAlone(t *testing.T) {
	s := openShop(t)
	d := deployment("worker")
	d.Spec.Replicas = ptr(int32(3))
	first, second := group("first", "orders", "worker"), group("second", "orders", "other")
	first.Spec.Replicas = &v1alpha1.ReplicaBounds{Max: 5}
	second.Spec.Replicas = &v1alpha1.ReplicaBounds{Max: 5}
	s.create(d, deployment("other"), first)
	s.conditionIs(first, v1alpha1.ConditionScalingActive, metaFalse, v1alpha1.ReasonScalingNotAvailable)
	time.Sleep(time.Until(first.CreationTimestamp.Add(1100 * time.Millisecond))) // age has whole seconds
	s.create(second)
	if m := s.stalled(second, v1alpha1.ReasonTopologyScaledByOther); !strings.Contains(m, `"first"`) {
		t.Errorf("the other group is not named: %s", m)
	}
	s.ready(first)
	s.file("other.deployment.shove", consumes("orders")) // it consumes all the same
	s.get(d)
	if *d.Spec.Replicas != 3 {
		t.Errorf("replicas %d, want 3", *d.Spec.Replicas)
	}
	s.patch(second, func() { second.Spec.Replicas = nil })
	s.ready(second)
}

func TestGroupsThatCannotShareAWorkload(t *testing.T) {
	s := openShop(t)
	refunds := orders("refunds", "rabbit")
	s.create(refunds, deployment("worker", "app", "proxy"))
	named := func(name, topo, container string) *v1alpha1.ConsumerGroup {
		g := group(name, topo, "worker")
		g.Spec.WorkloadRef.Container = container
		return g
	}
	a, b, c := named("a", "orders", "app"), named("b", "refunds", "proxy"), named("c", "orders", "app")
	s.create(a)
	s.ready(a)
	s.create(b, c)
	s.stalled(b, v1alpha1.ReasonWorkloadModeConflict)
	s.stalled(c, v1alpha1.ReasonTopologyConsumedByOther)
	s.conditionIs(b, v1alpha1.ConditionConflict, metaTrue, v1alpha1.ReasonWorkloadModeConflict)
	s.file("worker.deployment.shove", consumes("orders"))
	if err := s.client.Delete(context.Background(), a); err != nil {
		t.Fatal(err)
	}
	// The next in age comes in: b was created before c, or has the same second and the earlier name.
	s.ready(b)
}

func TestTheSidecarIsRendered(t *testing.T) {
	s := openShop(t)
	d := deployment("worker")
	g := group("worker", "orders", "worker")
	g.Spec.Mode = v1alpha1.ModeSidecar
	g.Spec.Sidecar = &v1alpha1.Sidecar{Port: 8080, Path: "/messages", DeadLetters: true}
	s.create(d, g)
	s.stalled(g, v1alpha1.ReasonSidecarImageMissing)
	s.patch(g, func() { g.Spec.Sidecar.Image = "shove-agent:1" })
	s.ready(g)
	s.get(d)
	spec := d.Spec.Template.Spec
	if len(spec.InitContainers) != 1 || len(spec.Containers[0].VolumeMounts) > 0 {
		t.Fatalf("pod template: %+v", spec)
	}
	agent := spec.InitContainers[0]
	if agent.RestartPolicy == nil || *agent.RestartPolicy != corev1.ContainerRestartPolicyAlways || agent.Image != "shove-agent:1" || agent.Lifecycle == nil {
		t.Errorf("agent: %+v", agent)
	}
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "worker.deployment.shove"}}
	s.get(cm)
	if _, _, err := config.Parse([]byte(cm.Data[render.ConfigFile])); err == nil || !strings.Contains(err.Error(), "sidecar") {
		t.Errorf("a library that knows no sidecar takes the file: %v", err)
	}
}

// pod makes a running pod of a workload, as a kubelet would.
func (s *shop) pod(name string, d *appsv1.Deployment, started time.Time) *corev1.Pod {
	s.t.Helper()
	s.get(d)
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: d.Spec.Template.Labels}, Spec: *d.Spec.Template.Spec.DeepCopy()}
	p.Spec.NodeName = "n"
	s.create(p)
	p.Status.Phase, p.Status.PodIP = corev1.PodRunning, "127.0.0.1"
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "app", Image: "worker:1", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(started)}}}}
	if err := s.client.Status().Update(context.Background(), p); err != nil {
		s.t.Fatal(err)
	}
	return p
}

func TestChangesReachRunningPods(t *testing.T) {
	s := openShop(t)
	d, g := deployment("worker"), group("worker", "orders", "worker")
	s.create(d, g)
	s.ready(g)
	s.conditionIs(g, v1alpha1.ConditionConfigDelivered, metaFalse, v1alpha1.ReasonWaitingForPods)
	p := s.pod("worker-1", d, time.Now())
	first := g.Status.ConfigGeneration
	s.pods.set(p.Name, PodReport{Generation: first})
	s.conditionIs(g, v1alpha1.ConditionConfigDelivered, metaTrue, v1alpha1.ReasonDelivered)
	s.get(d)
	injected := d.DeepCopy()

	token := func(not string) string {
		out := ""
		testenv.Eventually(t, patience, func() error {
			s.get(p)
			if out = p.Annotations[v1alpha1.AnnotationConfigGeneration]; out == not {
				return fmt.Errorf("the pod is annotated %q still", out)
			}
			return nil
		})
		return out
	}
	t.Run("an option", func(t *testing.T) {
		s.patch(g, func() { g.Spec.MaxRetries = ptr(int32(3)) })
		s.conditionIs(g, v1alpha1.ConditionConfigDelivered, metaFalse, v1alpha1.ReasonWaitingForPods)
		s.ready(g)
		if g.Status.ConfigGeneration == first || !strings.HasPrefix(token(""), g.Status.ConfigGeneration) {
			t.Errorf("generation %s, was %s; pod %v", g.Status.ConfigGeneration, first, p.Annotations)
		}
		s.pods.set(p.Name, PodReport{Generation: first, ReloadError: "no handler"})
		s.stalled(g, v1alpha1.ReasonConfigRejected)
		s.pods.set(p.Name, PodReport{Generation: g.Status.ConfigGeneration})
		s.conditionIs(g, v1alpha1.ConditionConfigDelivered, metaTrue, v1alpha1.ReasonDelivered)
		if g.Status.TopologyGeneration != s.topology.Generation {
			t.Errorf("topologyGeneration %d, want %d", g.Status.TopologyGeneration, s.topology.Generation)
		}
	})
	t.Run("a rotated Secret", func(t *testing.T) {
		before := token("")
		s.get(g)
		generation := g.Status.ConfigGeneration
		sec := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "rabbit-admin"}}
		s.patch(sec, func() { sec.Data["password"] = []byte("rotated") })
		s.secretIs("worker.deployment.shove", map[string]string{s.ns + ".rabbit.username": "admin", s.ns + ".rabbit.password": "rotated"})
		token(before)
		s.get(g)
		if g.Status.ConfigGeneration != generation {
			t.Error("the file's generation depends on a secret")
		}
	})
	t.Run("what a pod cannot take over", func(t *testing.T) {
		time.Sleep(1100 * time.Millisecond) // times of containers have whole seconds
		s.patch(g, func() { g.Spec.RetryStrategy = ptr(v1alpha1.RetryInPlace) })
		if c := s.conditionIs(g, v1alpha1.ConditionRestartRequired, metaTrue, ""); !strings.Contains(c.Message, "worker-1") {
			t.Errorf("the pod is not named: %s", c.Message)
		}
		if err := s.client.Delete(context.Background(), p, client.GracePeriodSeconds(0)); err != nil {
			t.Fatal(err)
		}
		s.pods.set("worker-2", PodReport{Generation: g.Status.ConfigGeneration})
		s.pod("worker-2", d, time.Now().Add(2*time.Second))
		s.patch(d, func() { d.Labels = map[string]string{"event": "1"} }) // as its status would change
		testenv.Eventually(t, patience, func() error {
			s.get(g)
			if meta.FindStatusCondition(g.Status.Conditions, v1alpha1.ConditionRestartRequired) != nil {
				return errors.New("a restart is still asked for")
			}
			return nil
		})
	})
	s.get(d)
	if d.Generation != injected.Generation {
		t.Errorf("a rollout was started: %s", cmp.Diff(injected.Spec, d.Spec))
	}
}

func TestPublishersGetTheirSide(t *testing.T) {
	s := openShop(t)
	d := deployment("checkout")
	s.create(d)
	before := d.DeepCopy()
	s.patch(s.topology, func() {
		s.topology.Spec.Publishers = []v1alpha1.WorkloadReference{{Kind: v1alpha1.WorkloadDeployment, Name: "checkout"}, {Kind: v1alpha1.WorkloadStatefulSet, Name: "gone"}}
	})
	s.conditionIs(s.topology, v1alpha1.ConditionInjected, metaFalse, v1alpha1.ReasonWorkloadNotFound)
	s.patch(s.topology, func() { s.topology.Spec.Publishers = s.topology.Spec.Publishers[:1] })
	s.conditionIs(s.topology, v1alpha1.ConditionInjected, metaTrue, v1alpha1.ReasonInjected)
	s.ready(s.topology)
	c := s.file("checkout.deployment.shove", consumes())
	if len(c.Publish) != 1 || c.Publish[0].Topology != "orders" || len(c.Topologies) != 1 {
		t.Errorf("configuration %+v", c)
	}
	if d := cmp.Diff([]v1alpha1.WorkloadReference{{Kind: v1alpha1.WorkloadDeployment, Name: "checkout"}}, s.topology.Status.InjectedPublishers); d != "" {
		t.Errorf("injected publishers (-want +got):\n%s", d)
	}
	s.patch(s.topology, func() { s.topology.Spec.Publishers = nil })
	s.taken(before, d)
	testenv.Eventually(t, patience, func() error {
		s.get(s.topology)
		if meta.FindStatusCondition(s.topology.Status.Conditions, v1alpha1.ConditionInjected) != nil || len(s.topology.Status.InjectedPublishers) > 0 {
			return fmt.Errorf("the status still has %+v", s.topology.Status.InjectedPublishers)
		}
		return nil
	})
	s.ready(s.topology)
}

func TestARestartOfTheOperatorWritesNothing(t *testing.T) {
	s := openShop(t)
	d, g := deployment("worker"), group("worker", "orders", "worker")
	s.patch(s.topology, func() {
		s.topology.Spec.Publishers = []v1alpha1.WorkloadReference{{Kind: v1alpha1.WorkloadDeployment, Name: "worker"}}
	})
	s.create(d, g)
	s.ready(g)
	s.conditionIs(s.topology, v1alpha1.ConditionInjected, metaTrue, "")
	p := s.pod("worker-1", d, time.Now())
	s.pods.set(p.Name, PodReport{Generation: g.Status.ConfigGeneration})
	s.conditionIs(g, v1alpha1.ConditionConfigDelivered, metaTrue, v1alpha1.ReasonDelivered)
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "worker.deployment.shove"}}
	sec := &corev1.Secret{ObjectMeta: cm.ObjectMeta}
	objects := []client.Object{d, g, s.topology, cm, sec, p}
	versions := map[string]string{}
	for _, o := range objects {
		s.get(o)
		versions[fmt.Sprintf("%T", o)] = o.GetResourceVersion()
	}
	s.stop()
	s.open()
	testenv.Consistently(t, 2*time.Second, func() error {
		for _, o := range objects {
			s.get(o)
			if v := versions[fmt.Sprintf("%T", o)]; v != o.GetResourceVersion() {
				return fmt.Errorf("%T was written: version %s, was %s\n%v", o, o.GetResourceVersion(), v, o.GetManagedFields())
			}
		}
		return nil
	})
}
