package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

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
	stop                                       func() error
}

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

// useKubeconfig takes the current context of the user's kubeconfig.
func useKubeconfig() (*cluster, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig: %w", err)
	}
	p, err := exec.LookPath("kubectl")
	if err != nil {
		return nil, errors.New("CLUSTER=1 needs kubectl on the PATH")
	}
	return &cluster{rest: cfg, kubectl: kubectl{program: p, kubeconfig: os.Getenv("KUBECONFIG")}, stop: func() error { return nil }}, nil
}
