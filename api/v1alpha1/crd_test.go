package v1alpha1_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/internal/testenv/kubeenv"
)

// TestServerPersistsNoOptionDefaults: a persisted default could not be told from a choice, and the Broker's
// consumerDefaults would never take effect.
func TestServerPersistsNoOptionDefaults(t *testing.T) {
	api, ns := server(t)
	for _, c := range []struct{ kind, spec string }{
		{group, "topologyRef: {name: orders}"},
		{group, "topologyRef: {name: orders}\nmode: Sidecar\nsidecar: {port: 80}\nworkloadRef: {kind: Deployment, name: w}\nreplicas: {max: 2}\nscaling: {}\ndeferLimit: {maxDefers: 3}"},
		{broker, "rabbitmq: {url: 'amqp://rabbit/'}\nconsumerDefaults: {}"},
		{broker, "rabbitmq: {url: 'amqp://rabbit/'}\nconsumerDefaults: {handlerTimeout: 15s}\nallowedNamespaces: {}"},
		{topology, "brokerRef: {name: rabbit}\ndeletionPolicy: Delete\nrabbitmq: {}\nkafka: {}\nallowed: x\nholdQueues: [{delay: 1s}]\ndeadLetter: {}\nsequenced: {}"},
	} {
		u := object(t, c.kind, ns, c.spec)
		want := object(t, c.kind, ns, c.spec).Object["spec"].(map[string]any)
		delete(want, "allowed") // an unknown field is pruned
		if err := api.Create(t.Context(), u); err != nil {
			t.Fatalf("create:\n%s\n%v", c.spec, err)
		}
		got := &unstructured.Unstructured{}
		got.SetGroupVersionKind(u.GroupVersionKind())
		if err := api.Get(t.Context(), client.ObjectKeyFromObject(u), got); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(fmt.Sprint(want), fmt.Sprint(got.Object["spec"])); diff != "" {
			t.Errorf("the server changed the spec of a %s (-written +read):\n%s", c.kind, diff)
		}
		if gen, _, _ := unstructured.NestedInt64(got.Object, "status", "observedGeneration"); gen != -1 {
			t.Errorf("%s: status.observedGeneration of an object that was never reconciled is %d, want -1", c.kind, gen)
		}
	}
}

// TestBounds: limits that are not CEL refuse as well.
func TestBounds(t *testing.T) {
	api, ns := server(t)
	for _, c := range []struct{ kind, spec string }{
		{group, ""},
		{topology, "queue: a"},
		{topology, "brokerRef: {}"},
		{group, "topologyRef: {name: a}\nprefetch: 0"},
		{group, "topologyRef: {name: a}\nprefetch: 65536"},
		{group, "topologyRef: {name: a}\nconcurrency: 0"},
		{group, "topologyRef: {name: a}\nconcurrency: -1"},
		{group, "topologyRef: {name: a}\nmaxRetries: -1"},
		{group, "topologyRef: {name: a}\nmaxRetries: 99999999999"},
		{group, "topologyRef: {name: a}\nmaxReconnectAttempts: 0"},
		{group, "topologyRef: {name: a}\ncrashLimit: -1"},
		{group, "topologyRef: {name: a}\ndeferLimit: {maxDefers: 0}"},
		{group, "topologyRef: {name: a}\nhandlerTimeout: 30"},
		{group, "topologyRef: {name: a}\nhandlerTimeoutOutcome: Drop"},
		{group, "topologyRef: {name: a}\nretryStrategy: Inplace"},
		{group, "topologyRef: {name: a}\nworkloadRef: {kind: DaemonSet, name: a}"},
		{group, "topologyRef: {name: a}\nmaxMessageSize: huge"},
		{topology, "brokerRef: {name: a}\ndeletionPolicy: Keep"},
		{topology, "brokerRef: {name: a}\nqueue: " + strings.Repeat("q", 201)},
		{topology, "brokerRef: {name: a}\nsequenced: {allowMessageLoss: true, shards: 257}"},
		{topology, "brokerRef: {name: a}\nrabbitmq: {queueType: stream}"},
		{topology, "brokerRef: {name: a}\nrabbitmq: {bindings: [{routingKey: x}]}"},
		{topology, "brokerRef: {name: a}\npublishers: [{kind: Deployment, name: a}, {kind: Deployment, name: a, container: b}]"},
		{topology, "brokerRef: {name: a}\nholdQueues:" + tiers(17)},
		{broker, "rabbitmq: {}"},
		{broker, "rabbitmq: {url: 'amqp://r/'}\ncredentials: {}"},
		{broker, "kafka: {bootstrapServers: []}"},
		{broker, "rabbitmq: {url: 'amqp://r/'}\nallowedNamespaces: {queues: []}"},
	} {
		if err := api.Create(t.Context(), object(t, c.kind, ns, c.spec), client.DryRunAll); err == nil {
			t.Errorf("this should be refused:\n%s", c.spec)
		}
	}
	if err := api.Create(t.Context(), object(t, topology, ns, "brokerRef: {name: a}\nholdQueues:"+tiers(16)), client.DryRunAll); err != nil {
		t.Errorf("16 hold queues should be accepted: %v", err)
	}
}

func tiers(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "\n- delay: %ds", i+1)
	}
	return b.String()
}

// TestPrinterColumns reads the tables that "kubectl get" prints.
func TestPrinterColumns(t *testing.T) {
	api, ns := server(t)
	tables := map[string]struct{ spec, status, resource, columns, row string }{
		broker: {
			spec: "rabbitmq: {url: 'amqp://rabbit/'}", resource: "brokers",
			status:  "{kind: rabbitmq, serverVersion: 4.0.5, dependents: 2, observedGeneration: 1, conditions: [" + readyCondition + "]}",
			columns: "Name Ready Kind Version Dependents* Status* Age",
			row:     "True rabbitmq 4.0.5 2 fine",
		},
		topology: {
			spec: "brokerRef: {name: rabbit}", resource: "topologies",
			status:  "{queue: orders, counts: {ready: 12, held: 4, dead: 0}, conditions: [" + readyCondition + "]}",
			columns: "Name Ready Queue Broker Messages Held Dead Status* Age",
			row:     "True orders rabbit 12 4 0 fine",
		},
		group: {
			spec: "topologyRef: {name: orders}\nworkloadRef: {kind: Deployment, name: worker}", resource: "consumergroups",
			status:  "{replicas: 2, readyReplicas: 1, backlog: {ready: 12, inFlight: 3}, conditions: [" + readyCondition + "]}",
			columns: "Name Ready Topology Workload Replicas Backlog In flight* Held* Dead* Status* Age",
			row:     "True orders worker 2 12 3 <nil> <nil> fine",
		},
	}
	for kind, want := range tables {
		u := object(t, kind, ns, want.spec)
		if err := api.Create(t.Context(), u); err != nil {
			t.Fatal(err)
		}
		var status map[string]any
		if err := yaml.Unmarshal([]byte(want.status), &status); err != nil {
			t.Fatal(err)
		}
		u.Object["status"] = status
		if err := api.Status().Update(t.Context(), u); err != nil {
			t.Fatal(err)
		}
		columns, row := table(t, ns, want.resource)
		if columns != want.columns || row != want.row {
			t.Errorf("%s:\n got %s | %s\nwant %s | %s", kind, columns, row, want.columns, want.row)
		}
	}
}

const readyCondition = "{type: Ready, status: 'True', reason: Ready, message: fine, lastTransitionTime: '2026-01-01T00:00:00Z'}"

// table asks for a resource the way kubectl does. It returns the columns, wide ones with a star, and the cells of the
// only row but its name and age.
func table(t *testing.T, ns, resource string) (columns, row string) {
	t.Helper()
	cfg := kubeenv.ControlPlane(t)
	cfg.GroupVersion, cfg.APIPath, cfg.NegotiatedSerializer = &v1alpha1.GroupVersion, "/apis", scheme.Codecs.WithoutConversion()
	c, err := rest.RESTClientFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := c.Get().Namespace(ns).Resource(resource).SetHeader("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").Do(t.Context()).Raw()
	if err != nil {
		t.Fatal(err)
	}
	var got metav1.Table
	if err := yaml.Unmarshal(raw, &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Rows) != 1 {
		t.Fatalf("%d rows of %s, want 1", len(got.Rows), resource)
	}
	var names, cells []string
	for i, c := range got.ColumnDefinitions {
		name := c.Name
		if c.Priority > 0 {
			name += "*"
		}
		names = append(names, name)
		if c.Name != "Name" && c.Name != "Age" {
			cells = append(cells, fmt.Sprint(got.Rows[0].Cells[i]))
		}
	}
	return strings.Join(names, " "), strings.Join(cells, " ")
}

// TestNamesOfResources: what people type.
func TestNamesOfResources(t *testing.T) {
	want := map[string][]string{broker: {"brokers", "brk"}, topology: {"topologies", "topo"}, group: {"consumergroups", "cgrp"}}
	for kind, crd := range crds(t) {
		n := crd.Spec.Names
		if got := append([]string{n.Plural}, n.ShortNames...); !slices.Equal(got, want[kind]) || !slices.Equal(n.Categories, []string{"shove"}) {
			t.Errorf("%s: names %v, categories %v", kind, got, n.Categories)
		}
	}
}

// TestSamples applies every object under config/samples, and the whole of testdata, which sets every block that the
// three kinds have.
func TestSamples(t *testing.T) {
	api, ns := server(t)
	var files []string
	for _, glob := range []string{"../../config/samples/*.yaml", "testdata/*.yaml"} {
		found, err := filepath.Glob(glob)
		if err != nil || len(found) == 0 {
			t.Fatalf("%s: %v, %v", glob, found, err)
		}
		files = append(files, found...)
	}
	kinds := map[string]int{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for doc := range strings.SplitSeq("\n"+string(text), "\n---") {
			u := &unstructured.Unstructured{}
			if err := yaml.Unmarshal([]byte(doc), &u.Object); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			if len(u.Object) == 0 {
				continue
			}
			kinds[u.GetKind()]++
			u.SetNamespace(ns)
			strict(t, file, u)
			if err := api.Create(t.Context(), u, &client.CreateOptions{DryRun: []string{metav1.DryRunAll}, Raw: &metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}}); err != nil {
				t.Errorf("%s: %s %s: %v", file, u.GetKind(), u.GetName(), err)
			}
		}
	}
	for _, kind := range []string{broker, topology, group} {
		if kinds[kind] < 2 {
			t.Errorf("the samples have %d objects of kind %s", kinds[kind], kind)
		}
	}
}

// strict decodes an object into its Go type and back: nothing is unknown, nothing is lost.
func strict(t *testing.T, file string, u *unstructured.Unstructured) {
	t.Helper()
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{v1alpha1.AddToScheme, scheme.AddToScheme} {
		if err := add(s); err != nil {
			t.Fatal(err)
		}
	}
	typed, err := s.New(u.GroupVersionKind())
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(u.Object, typed, true); err != nil {
		t.Errorf("%s: %s: %v", file, u.GetKind(), err)
	}
	if _, core := typed.(*corev1.Secret); core || u.GroupVersionKind().Group != v1alpha1.GroupVersion.Group {
		return
	}
	back, err := runtime.DefaultUnstructuredConverter.ToUnstructured(typed)
	if err != nil {
		t.Fatal(err)
	}
	again, err := s.New(u.GroupVersionKind())
	if err != nil {
		t.Fatal(err)
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(back, again); err != nil {
		t.Fatal(err)
	}
	if !apiequality.Semantic.DeepEqual(typed, again) {
		t.Errorf("%s: %s does not survive a round trip:\n%s", file, u.GetKind(), cmp.Diff(typed, again))
	}
}
