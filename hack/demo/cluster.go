package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/shove-dev/shove/internal/kubelet"
	"github.com/shove-dev/shove/internal/testenv/kubeassets"
)

// cluster is the Kubernetes that the demo runs on.
type cluster struct {
	kubectl kubectl
	rest    *rest.Config
	// images are what the Deployments name.
	operatorImage, workerImage, publisherImage string
	// context is that of the user's kubeconfig; empty: the control plane is ours.
	context string
	stop    func() error
}

// mine says that the demo started the cluster.
func (c *cluster) mine() bool { return c.context == "" }

// startControlPlane starts an API server on this machine, and a stand-in for kubelet that runs pods as processes.
func startControlPlane(ctx context.Context, dir string) (*cluster, error) {
	assets, err := kubeassets.Find()
	if err != nil {
		return nil, err
	}
	// The servers of our own build end with this process even when it is killed.
	if err := os.Setenv("CONTROLPLANE_EXIT_WITH_PARENT", "1"); err != nil {
		return nil, err
	}
	env := &envtest.Environment{BinaryAssetsDirectory: assets}
	cfg, err := env.Start()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the API server: %w", err), env.Stop())
	}
	cfg.QPS, cfg.Burst = -1, -1
	c := &cluster{rest: cfg, operatorImage: "shove-operator:demo", workerImage: "orders-worker:demo", publisherImage: "orders-publisher:demo"}
	c.kubectl = kubectl{program: kubectlProgram(assets), kubeconfig: filepath.Join(dir, "kubeconfig")}
	if err := os.WriteFile(c.kubectl.kubeconfig, env.KubeConfig, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("write the kubeconfig: %w", err), env.Stop())
	}
	stopPods := c.runPods(ctx, dir)
	c.stop = func() error { return errors.Join(stopPods(), env.Stop()) }
	return c, nil
}

// kubectlProgram prefers the machine's own.
func kubectlProgram(assets string) string {
	if p, err := exec.LookPath("kubectl"); err == nil {
		return p
	}
	return filepath.Join(assets, "kubectl")
}

// runPods starts the stand-in for kubelet. The function that it returns ends it with all its processes.
func (c *cluster) runPods(ctx context.Context, dir string) (stop func() error) {
	programs := map[string]string{c.operatorImage: "operator", c.workerImage: "worker", c.publisherImage: "publisher"}
	node := kubelet.New(kubelet.Config{
		REST: c.rest, Dir: filepath.Join(dir, "pods"),
		Images: func(image string) ([]string, bool) {
			p, ok := programs[image]
			return []string{filepath.Join(dir, "bin", p)}, ok
		},
	})
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan error, 1)
	go func() { done <- node.Run(ctx) }()
	return func() error {
		cancel()
		return <-done
	}
}

// useKubeconfig takes the current context of the user's kubeconfig, where the demo's namespaces must not exist: it
// deletes them in the end.
func useKubeconfig(ctx context.Context, dir string) (*cluster, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	loading := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil)
	raw, err := loading.RawConfig()
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig: %w", err)
	}
	cfg, err := loading.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig: %w", err)
	}
	p, err := exec.LookPath("kubectl")
	if err != nil {
		return nil, errors.New("CLUSTER=1 needs kubectl on the PATH")
	}
	tag := strings.ToLower(rand.Text()[:8])
	c := &cluster{rest: cfg, kubectl: kubectl{program: p}, context: raw.CurrentContext, operatorImage: "docker.io/shove-dev/demo-operator:" + tag}
	c.workerImage = "docker.io/shove-dev/demo-orders:" + tag
	c.publisherImage = c.workerImage
	found, err := c.kubectl.run(ctx, "get", "namespace", operatorNamespace, namespace, "--ignore-not-found", "-o", "name")
	if err != nil {
		return nil, err
	}
	if found != "" {
		return nil, fmt.Errorf("%s exists in the cluster of context %q: the demo makes it and deletes it in the end, so it does not touch one that is there",
			strings.Join(strings.Fields(found), " and "), c.context)
	}
	hadCRDs, err := c.kubectl.run(ctx, "get", "crd", "brokers.shove.dev", "--ignore-not-found", "-o", "name")
	if err != nil {
		return nil, err
	}
	c.stop = func() error { return c.removeAll(dir, hadCRDs != "") }
	return c, c.loadImages(ctx, dir)
}

// loadImages makes the images of the operator and of the example and gets them into the nodes.
func (c *cluster) loadImages(ctx context.Context, dir string) error {
	command, err := loader(c.context, os.Getenv("LOAD"))
	if err != nil {
		return err
	}
	bin := filepath.Join(dir, "bin")
	for file, image := range map[string]struct {
		ref      string
		programs []program
	}{
		"operator.tar": {c.operatorImage, []program{{"shove-operator", filepath.Join(bin, "operator")}}},
		"orders.tar":   {c.workerImage, []program{{"orders-worker", filepath.Join(bin, "worker")}, {"orders-publisher", filepath.Join(bin, "publisher")}}},
	} {
		path := filepath.Join(dir, file)
		if err := writeImage(path, image.ref, image.programs...); err != nil {
			return fmt.Errorf("make image %s: %w", image.ref, err)
		}
		if err := loadImage(ctx, command, path); err != nil {
			return err
		}
	}
	return nil
}

// removeAll deletes what the demo made in the user's cluster. The objects go before the operator that they wait for.
func (c *cluster) removeAll(dir string, keepCRDs bool) error {
	ctx := context.Background()
	remove := func(args ...string) error {
		_, err := c.kubectl.run(ctx, append([]string{"delete", "--ignore-not-found", "--wait", "--timeout=120s"}, args...)...)
		return err
	}
	orders := filepath.Join(dir, "apply", "orders")
	var errs []error
	if _, err := os.Stat(orders); err == nil {
		errs = append(errs, remove("-k", orders))
	}
	errs = append(errs, remove("namespace", namespace, operatorNamespace), remove("clusterrole", "shove-operator"))
	if !keepCRDs {
		errs = append(errs, remove("crd", "brokers.shove.dev", "topologies.shove.dev", "consumergroups.shove.dev"))
	}
	return errors.Join(errs...)
}
