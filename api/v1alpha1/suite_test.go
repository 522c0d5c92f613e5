package v1alpha1_test

import (
	"fmt"
	"os"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/yaml"

	"github.com/shove-dev/shove/internal/testenv"
)

const crdDir = "../../config/crd"

// apiServer and restConfig are a real API server with the CRDs of this repository, started by TestMain.
var (
	apiServer  client.Client
	restConfig *rest.Config
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if os.Getenv("KUBEBUILDER_ASSETS") == "" {
		return m.Run()
	}
	env := &envtest.Environment{CRDDirectoryPaths: []string{crdDir}, ErrorIfCRDPathMissing: true}
	cfg, err := env.Start()
	if err != nil {
		fmt.Fprintf(os.Stderr, "start the API server: %v\n", err)
		return 1
	}
	defer func() { _ = env.Stop() }()
	restConfig = cfg
	if apiServer, err = client.New(cfg, client.Options{}); err != nil {
		fmt.Fprintf(os.Stderr, "client: %v\n", err)
		return 1
	}
	return m.Run()
}

// api returns a client of the API server.
func api(t *testing.T) client.Client {
	t.Helper()
	if apiServer == nil {
		testenv.Skip(t, "no API server")
	}
	return apiServer
}

// namespace makes a namespace for one test.
func namespace(t *testing.T) string {
	t.Helper()
	ns := &unstructured.Unstructured{}
	ns.SetAPIVersion("v1")
	ns.SetKind("Namespace")
	ns.SetGenerateName("api-")
	if err := api(t).Create(t.Context(), ns); err != nil {
		t.Fatalf("create a namespace: %v", err)
	}
	return ns.GetName()
}

// object makes an object of this API group from the YAML of its spec.
func object(t *testing.T, kind, ns, spec string) *unstructured.Unstructured {
	t.Helper()
	var content map[string]any
	if err := yaml.Unmarshal([]byte(spec), &content); err != nil {
		t.Fatalf("spec: %v", err)
	}
	if content == nil {
		content = map[string]any{}
	}
	u := &unstructured.Unstructured{Object: map[string]any{"spec": content}}
	u.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind(kind))
	u.SetAPIVersion("shove.dev/v1alpha1")
	u.SetNamespace(ns)
	u.SetGenerateName("case-")
	return u
}
