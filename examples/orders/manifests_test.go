// Package orders holds a whole application on shove: the manifests, a worker and a publisher. Its tests keep the
// manifests readable to the API.
package orders

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/examples/orders/order"
	"github.com/shove-dev/shove/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func TestManifests(t *testing.T) {
	files, err := filepath.Glob("manifests/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("found %d files, %v", len(files), err)
	}
	others, err := filepath.Glob("brokers/*.yaml")
	if err != nil || len(others) == 0 {
		t.Fatalf("found %d other brokers, %v", len(others), err)
	}
	files = append(files, others...)
	kinds := map[string]int{}
	brokers := map[string]string{} // name by file
	var topology v1alpha1.Topology
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, doc := range strings.Split(string(b), "\n---\n") {
			var meta metav1.TypeMeta
			if err := yaml.Unmarshal([]byte(doc), &meta); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			kinds[meta.Kind]++
			var broker v1alpha1.Broker
			into, known := map[string]any{
				"Secret": &corev1.Secret{}, "Deployment": &appsv1.Deployment{}, "Broker": &broker, "Topology": &topology, "ConsumerGroup": &v1alpha1.ConsumerGroup{},
			}[meta.Kind]
			if !known {
				t.Fatalf("%s: a %s is not expected", file, meta.Kind)
			}
			if err := yaml.UnmarshalStrict([]byte(doc), into); err != nil {
				t.Errorf("%s: %v", file, err)
			}
			if broker.Name != "" {
				brokers[file] = broker.Name
			}
		}
	}
	for _, file := range append(others, filepath.Join("manifests", "broker.yaml")) {
		if brokers[file] != topology.Spec.BrokerRef.Name {
			t.Errorf("%s: the Broker is called %q, the Topology wants %q", file, brokers[file], topology.Spec.BrokerRef.Name)
		}
	}
	for _, kind := range []string{"Secret", "Deployment", "Broker", "Topology", "ConsumerGroup"} {
		if kinds[kind] == 0 {
			t.Errorf("no %s", kind)
		}
	}
	if topology.Name != order.Topology {
		t.Errorf("the Topology is called %q, the programs are bound to %q", topology.Name, order.Topology)
	}
}
