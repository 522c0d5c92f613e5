package controllers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	natsgo "github.com/nats-io/nats.go"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/internal/kubelet"
	"github.com/shove-dev/shove/internal/testenv"
)

// The orders example as it is: the server runs as the pod that the operator renders, worker and publisher reach it with
// what the operator put into theirs. The operator is replaced by one of another version while messages flow: the pod
// goes on. Then the pod is deleted: it comes back as the new version, with the messages.
func TestEmbedded_EndToEnd(t *testing.T) {
	c := connect(t)
	bin := buildPrograms(t)
	runPods(c, bin)
	b := &v1alpha1.Broker{}
	for _, file := range []string{"broker.yaml", "topology.yaml", "consumergroup.yaml", "publisher.yaml", "worker.yaml"} {
		c.create(example(t, file))
	}
	b.Name, b.Namespace = "shop", c.ns
	o := embeddedOptionsOf(c.ns, "shove-operator:v1")
	o.EmbeddedServers = func(b *v1alpha1.Broker) []v1alpha1.NATSServer {
		pod, err := c.podOf(b)
		if err != nil || pod.Status.PodIP == "" {
			return []v1alpha1.NATSServer{"nats://127.0.0.1:1"}
		}
		return []v1alpha1.NATSServer{v1alpha1.NATSServer("nats://" + pod.Status.PodIP + ":4222")}
	}
	c.run(o)
	c.eventuallyReady(b)
	group, topo := &v1alpha1.ConsumerGroup{}, &v1alpha1.Topology{}
	group.Name, group.Namespace, topo.Name, topo.Namespace = "orders-worker", c.ns, "orders", c.ns
	c.eventuallyReady(topo)
	c.eventuallyReady(group)
	c.moves(b)
	first, err := c.podOf(b)
	if err != nil {
		t.Fatal(err)
	}

	c.stop()
	o.EmbeddedImage = "shove-operator:v2"
	c.run(o)
	testenv.Eventually(t, time.Minute, func() error {
		c.get(b)
		if !meta.IsStatusConditionTrue(b.Status.Conditions, v1alpha1.ConditionUpdateAvailable) || !meta.IsStatusConditionTrue(b.Status.Conditions, v1alpha1.ConditionReady) {
			return errors.New(describe(b))
		}
		return nil
	})
	if same, err := c.podOf(b); err != nil || same.UID != first.UID || same.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Fatalf("the update of the operator touched the pod: %v", err)
	}

	if err := c.client.Delete(context.Background(), first); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, func() error {
		p, err := c.podOf(b)
		switch {
		case err != nil:
			return err
		case p.UID == first.UID || p.Spec.Containers[0].Image != "shove-operator:v2":
			return fmt.Errorf("pod %s with %s", p.UID, p.Spec.Containers[0].Image)
		}
		return nil
	})
	testenv.Eventually(t, time.Minute, func() error {
		c.get(b)
		if meta.FindStatusCondition(b.Status.Conditions, v1alpha1.ConditionUpdateAvailable) != nil || !meta.IsStatusConditionTrue(b.Status.Conditions, v1alpha1.ConditionReady) {
			return errors.New(describe(b))
		}
		return nil
	})
	c.eventuallyReady(topo)
	c.moves(b)
}

// moves waits until messages flow: until the worker has messages held that the publisher sent after this call began.
func (c *cluster) moves(b *v1alpha1.Broker) {
	c.t.Helper()
	testenv.Eventually(c.t, time.Minute, func() error {
		pod, err := c.podOf(b)
		if err != nil {
			return err
		}
		users := secret(render.EmbeddedName(b), nil)
		users.Namespace = c.ns
		if err := c.client.Get(context.Background(), client.ObjectKeyFromObject(users), users); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		conn, err := natsgo.Connect("nats://"+pod.Status.PodIP+":4222", natsgo.UserInfo(string(users.Data["username"]), string(users.Data["password"])), natsgo.NoReconnect())
		if err != nil {
			return err
		}
		defer conn.Close()
		// A copy that is stored now tells that a message was published, delivered, retried.
		held := make(chan *natsgo.Msg, 1000)
		if _, err := conn.ChanSubscribe("orders-hold-1s.>", held); err != nil {
			return err
		}
		select {
		case <-held:
			return nil
		case <-ctx.Done():
			return errors.New("nothing is held")
		}
	})
}

func (c *cluster) eventuallyReady(o v1alpha1.ConditionedObject) {
	c.t.Helper()
	testenv.Eventually(c.t, 90*time.Second, func() error {
		if err := c.client.Get(context.Background(), client.ObjectKeyFromObject(o.(client.Object)), o.(client.Object)); err != nil {
			return err
		}
		if !meta.IsStatusConditionTrue(o.GetConditions(), v1alpha1.ConditionReady) {
			return errors.New(describe(o))
		}
		return nil
	})
}

func (c *cluster) podOf(b *v1alpha1.Broker) (*corev1.Pod, error) {
	p := &corev1.Pod{}
	err := c.client.Get(context.Background(), client.ObjectKey{Namespace: b.Namespace, Name: render.EmbeddedPod(b)}, p)
	return p, err
}

func buildPrograms(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "bin")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", bin+"/", "./cmd/operator", "./examples/orders/worker", "./examples/orders/publisher")
	build.Dir = testenv.RepositoryRoot(t)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v: %s", err, out)
	}
	return bin
}

// runPods runs the test's pods with the programs of bin.
func runPods(c *cluster, bin string) {
	dir := c.t.TempDir()
	programs := map[string]string{"shove-operator:v1": "operator", "shove-operator:v2": "operator", "orders-worker": "worker", "orders-publisher": "publisher"}
	node := kubelet.New(kubelet.Config{
		REST: c.cfg, Dir: dir, Namespace: c.ns,
		Env: []string{"SHOVE_EMBEDDED_HOST=$(POD_IP)", "SHOVE_HTTP_ADDR=$(POD_IP):9464"},
		Images: func(image string) ([]string, bool) {
			return []string{filepath.Join(bin, programs[image])}, programs[image] != ""
		},
	})
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- node.Run(ctx) }()
	c.t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			c.t.Errorf("the stand-in for kubelet: %v", err)
		}
		if c.t.Failed() {
			files, _ := filepath.Glob(filepath.Join(dir, c.ns+"_*", "*.log"))
			for _, f := range files {
				text, _ := os.ReadFile(f)
				c.t.Logf("%s\n%s", f, text[max(0, len(text)-2000):])
			}
		}
	})
}

// example is an object of the orders example, with the programs of this test as images.
func example(t *testing.T, file string) client.Object {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(testenv.RepositoryRoot(t), "examples", "orders", "manifests", file))
	if err != nil {
		t.Fatal(err)
	}
	var kind metav1.TypeMeta
	if err := yaml.Unmarshal(text, &kind); err != nil {
		t.Fatal(err)
	}
	o := map[string]client.Object{"Broker": &v1alpha1.Broker{}, "Topology": &v1alpha1.Topology{}, "ConsumerGroup": &v1alpha1.ConsumerGroup{}, "Deployment": &appsv1.Deployment{}}[kind.Kind]
	if err := yaml.UnmarshalStrict(bytes.TrimSpace(text), o); err != nil {
		t.Fatal(err)
	}
	if d, ok := o.(*appsv1.Deployment); ok {
		d.Spec.Template.Spec.Containers[0].Image = d.Name
	}
	return o
}
