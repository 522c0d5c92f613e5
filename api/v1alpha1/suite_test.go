package v1alpha1_test

import (
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/kubeenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// server returns a client of a real API server that has the CRDs of this repository, and a namespace of its own.
func server(t *testing.T) (client.Client, string) {
	t.Helper()
	cfg := kubeenv.ControlPlane(t)
	c, err := client.New(cfg, client.Options{})
	if err != nil {
		t.Fatalf("make a client: %v", err)
	}
	return c, kubeenv.Namespace(t, cfg)
}

// object makes an object of this API group from the YAML of its spec.
func object(t *testing.T, kind, ns, spec string) *unstructured.Unstructured {
	t.Helper()
	content := map[string]any{}
	if err := yaml.Unmarshal([]byte(spec), &content); err != nil {
		t.Fatalf("spec: %v", err)
	}
	u := &unstructured.Unstructured{Object: map[string]any{"spec": content}}
	u.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(kind))
	u.SetNamespace(ns)
	u.SetGenerateName("case-")
	return u
}
