// Package kubeenv gives tests a real Kubernetes API server. It is apart from testenv so that tests without
// Kubernetes do not compile its clients.
package kubeenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/shove-dev/shove/internal/testenv"
)

var shared struct {
	once sync.Once
	cfg  *rest.Config
	err  error
}

// ControlPlane returns the configuration of an administrator of an API server with the project's CRDs. It is
// started once for this test binary (about four seconds) and ended by [testenv.Main]. There is no node and no controller:
// Deployments make no pods, and a deleted namespace stays. Use [Namespace] to keep tests apart.
func ControlPlane(tb testing.TB) *rest.Config {
	tb.Helper()
	assets, root := testenv.KubeAssets(tb), testenv.RepositoryRoot(tb)
	s := &shared
	s.once.Do(func() {
		s.cfg, s.err = start(assets, root)
	})
	if s.err != nil {
		tb.Fatal(s.err)
	}
	return rest.CopyConfig(s.cfg)
}

func start(assets, root string) (*rest.Config, error) {
	// The servers of our own build end with this process even when it is killed.
	if err := os.Setenv("CONTROLPLANE_EXIT_WITH_PARENT", "1"); err != nil {
		return nil, err
	}
	env := &envtest.Environment{
		BinaryAssetsDirectory: assets,
		CRDInstallOptions:     envtest.CRDInstallOptions{Paths: []string{filepath.Join(root, "config", "crd")}, ErrorIfPathMissing: true},
	}
	cfg, err := env.Start()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("starting the API server: %w", err), env.Stop())
	}
	cfg.QPS, cfg.Burst = -1, -1 // the client's own rate limit only slows tests
	testenv.AtExit(env.Stop)
	return cfg, nil
}

// Namespace makes a namespace with a name of its own for this test.
func Namespace(tb testing.TB, cfg *rest.Config) string {
	tb.Helper()
	c, err := client.New(cfg, client.Options{})
	if err != nil {
		tb.Fatalf("making a client: %v", err)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "t-"}}
	if err := c.Create(context.Background(), ns); err != nil {
		tb.Fatalf("making a namespace: %v", err)
	}
	return ns.Name
}
