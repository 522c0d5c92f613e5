package kubeenv_test

import (
	"context"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/kubeenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func TestControlPlaneServesTheCRDs(t *testing.T) {
	cfg := kubeenv.ControlPlane(t)
	version, err := discovery.NewDiscoveryClientForConfigOrDie(cfg).ServerVersion()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("API server %s", version.GitVersion)
	scheme := runtime.NewScheme()
	if err := apiextensionsv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	var crd apiextensionsv1.CustomResourceDefinition
	for _, name := range []string{"brokers.shove.dev", "topologies.shove.dev", "consumergroups.shove.dev"} {
		if err := c.Get(context.Background(), client.ObjectKey{Name: name}, &crd); err != nil {
			t.Error(err)
		}
	}
	if kubeenv.Namespace(t, cfg) == "" {
		t.Error("a namespace without a name")
	}
}
