// Package charts holds the Helm chart. Its tests render the chart, compare it with the plain manifests in config/, and
// run the operator from it with no more rights than it gives.
package charts

import (
	"bytes"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/shove-dev/shove/internal/testenv"
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard()) // of the stand-in for kubelet; the operator writes its own
	testenv.Main(m)
}

const release, releaseNamespace = "shove", "shove-system"

// render is `helm template` with values as for --set; ok is false when helm refuses them, and out is what it said.
func render(t *testing.T, values ...string) (out string, ok bool) {
	t.Helper()
	helm, err := exec.LookPath("helm")
	if err != nil {
		testenv.Skip(t, "no helm on the PATH: `make test` builds the pinned one")
	}
	args := []string{"template", release, "shove", "--namespace", releaseNamespace}
	for _, v := range values {
		args = append(args, "--set", v)
	}
	cmd := exec.Command(helm, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err = cmd.Run()
	var refused *exec.ExitError
	if errors.As(err, &refused) {
		return stderr.String(), false
	}
	if err != nil {
		t.Fatal(err)
	}
	return stdout.String(), true
}

func mustRender(t *testing.T, values ...string) []*unstructured.Unstructured {
	t.Helper()
	out, ok := render(t, values...)
	if !ok {
		t.Fatalf("helm template %v: %s", values, out)
	}
	return decode(t, strings.NewReader(out))
}

func decode(t *testing.T, r io.Reader) []*unstructured.Unstructured {
	t.Helper()
	var out []*unstructured.Unstructured
	for d := yaml.NewYAMLOrJSONDecoder(r, 4096); ; {
		u := &unstructured.Unstructured{}
		switch err := d.Decode(u); {
		case errors.Is(err, io.EOF):
			return out
		case err != nil:
			t.Fatal(err)
		case len(u.Object) > 0:
			out = append(out, u)
		}
	}
}

// plainManifests are the objects of config/.
func plainManifests(t *testing.T) []*unstructured.Unstructured {
	t.Helper()
	var out []*unstructured.Unstructured
	for _, dir := range []string{"crd", "rbac", "manager"} {
		files, err := filepath.Glob(filepath.Join("..", "config", dir, "*.yaml"))
		if err != nil || len(files) == 0 {
			t.Fatalf("config/%s: found %d files, %v", dir, len(files), err)
		}
		for _, f := range files {
			if filepath.Base(f) == "kustomization.yaml" {
				continue
			}
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, decode(t, bytes.NewReader(b))...)
		}
	}
	return out
}

// alike leaves out what only Helm adds, what the two say in different ways (rights, see rightsOf), and the
// namespace, which Helm does not make.
func alike(objects []*unstructured.Unstructured) map[string]map[string]any {
	out := map[string]map[string]any{}
	for _, u := range objects {
		if u.GetKind() == "Namespace" || u.GroupVersionKind().Group == rbacv1.GroupName {
			continue
		}
		u = u.DeepCopy()
		labels, annotations := u.GetLabels(), u.GetAnnotations()
		for _, l := range []string{"app.kubernetes.io/version", "app.kubernetes.io/managed-by", "helm.sh/chart"} {
			delete(labels, l)
		}
		if u.GetKind() == "ServiceAccount" { // in config/ it has none
			labels = nil
		}
		delete(annotations, "helm.sh/resource-policy")
		u.SetLabels(labels)
		u.SetAnnotations(annotations)
		out[u.GetKind()+" "+u.GetNamespace()+"/"+u.GetName()] = u.Object
	}
	return out
}

// everywhere is the key of rights that hold in all namespaces.
const everywhere = "*"

// rightsOf are the rules that the operator's ServiceAccount ends up with, by namespace: bindings resolved, whether a
// rule stands in a Role or in a ClusterRole.
func rightsOf(t *testing.T, objects []*unstructured.Unstructured) map[string][]string {
	t.Helper()
	rules := map[string][]rbacv1.PolicyRule{}
	for _, u := range objects {
		switch u.GetKind() {
		case "Role", "ClusterRole":
			r := &rbacv1.Role{}
			convert(t, u, r)
			rules[u.GetKind()+" "+u.GetNamespace()+"/"+u.GetName()] = r.Rules
		}
	}
	out := map[string][]string{}
	for _, u := range objects {
		namespace := u.GetNamespace()
		switch u.GetKind() {
		case "ClusterRoleBinding":
			namespace = everywhere
		case "RoleBinding":
		default:
			continue
		}
		b := &rbacv1.RoleBinding{}
		convert(t, u, b)
		want := []rbacv1.Subject{{Kind: "ServiceAccount", Name: "shove-operator", Namespace: releaseNamespace}}
		if d := cmp.Diff(want, b.Subjects); d != "" {
			t.Errorf("%s %s/%s: subjects (-want +got):\n%s", u.GetKind(), u.GetNamespace(), u.GetName(), d)
		}
		key := b.RoleRef.Kind + " /" + b.RoleRef.Name
		if b.RoleRef.Kind == "Role" {
			key = "Role " + u.GetNamespace() + "/" + b.RoleRef.Name
		}
		bound, ok := rules[key]
		if !ok {
			t.Errorf("%s %s/%s binds %s, which is not there", u.GetKind(), u.GetNamespace(), u.GetName(), key)
		}
		out[namespace] = append(out[namespace], spell(bound)...)
	}
	for ns := range out {
		slices.Sort(out[ns])
		out[ns] = slices.Compact(out[ns])
	}
	return out
}

// spell writes rules as "group/resource verb", one each.
func spell(rules []rbacv1.PolicyRule) []string {
	var out []string
	for _, r := range rules {
		for _, g := range r.APIGroups {
			for _, res := range r.Resources {
				for _, v := range r.Verbs {
					out = append(out, g+"/"+res+" "+v)
				}
			}
		}
	}
	return out
}

func convert(t *testing.T, u *unstructured.Unstructured, into any) {
	t.Helper()
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, into); err != nil {
		t.Fatal(err)
	}
}

func TestChartAndConfigAreTheSame(t *testing.T) {
	t.Parallel()
	chart := mustRender(t, "image.repository=shove-operator", "image.tag=dev")
	config := plainManifests(t)
	if d := cmp.Diff(alike(config), alike(chart)); d != "" {
		t.Errorf("objects (-config +chart):\n%s", d)
	}
	if d := cmp.Diff(rightsOf(t, config), rightsOf(t, chart)); d != "" {
		t.Errorf("rights (-config +chart):\n%s", d)
	}
}

func TestRightsAreInListedNamespacesOnly(t *testing.T) {
	t.Parallel()
	objects := mustRender(t, "watchNamespaces={shop,billing}")
	for _, u := range objects {
		if u.GetKind() == "ClusterRole" || u.GetKind() == "ClusterRoleBinding" {
			t.Errorf("there is a %s", u.GetKind())
		}
	}
	rights := rightsOf(t, objects)
	if d := cmp.Diff([]string{"billing", "shop", releaseNamespace}, slices.Sorted(maps.Keys(rights))); d != "" {
		t.Fatalf("namespaces (-want +got):\n%s", d)
	}
	if d := cmp.Diff(rights["shop"], rights["billing"]); d != "" {
		t.Errorf("rights differ (-shop +billing):\n%s", d)
	}
	for _, r := range rights[releaseNamespace] {
		if strings.Contains(r, "secrets") {
			t.Errorf("in its own namespace, which is not listed, the operator may: %s", r)
		}
	}
	for ns, all := range rights {
		for _, r := range all {
			if strings.Contains(r, "*") {
				t.Errorf("a wildcard in %s: %s", ns, r)
			}
		}
	}
	if args := operatorArgs(t, objects); !slices.Contains(args, "--namespaces=shop,billing") {
		t.Errorf("arguments %q name other namespaces", args)
	}
}

func TestWholeClusterIsAnOptIn(t *testing.T) {
	t.Parallel()
	objects := mustRender(t, "clusterWide=true")
	rights := rightsOf(t, objects)
	if d := cmp.Diff([]string{everywhere, releaseNamespace}, slices.Sorted(maps.Keys(rights))); d != "" {
		t.Fatalf("namespaces (-want +got):\n%s", d)
	}
	listed := rightsOf(t, mustRender(t, "watchNamespaces={shop}"))
	if d := cmp.Diff(listed["shop"], rights[everywhere]); d != "" {
		t.Errorf("rights (-in a listed namespace +in the cluster):\n%s", d)
	}
	for _, a := range operatorArgs(t, objects) {
		if strings.HasPrefix(a, "--namespaces") {
			t.Errorf("the operator is told %s", a)
		}
	}
}

func operatorArgs(t *testing.T, objects []*unstructured.Unstructured) []string {
	t.Helper()
	for _, u := range objects {
		if u.GetKind() == "Deployment" {
			d := &appsv1.Deployment{}
			convert(t, u, d)
			return d.Spec.Template.Spec.Containers[0].Args
		}
	}
	t.Fatal("there is no Deployment")
	return nil
}

func TestRefusedValues(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		values []string
		says   string
	}{
		"unknown":              {[]string{"watchNamespace=shop"}, "watchNamespace"},
		"listed and wide":      {[]string{"watchNamespaces={shop}", "clusterWide=true"}, "exclude each other"},
		"not a namespace":      {[]string{"watchNamespaces={Shop_1}"}, "watchNamespaces"},
		"account without name": {[]string{"serviceAccount.create=false"}, "serviceAccount.name"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, ok := render(t, c.values...)
			if ok || !strings.Contains(out, c.says) {
				t.Errorf("accepted %t, said %q; want a refusal with %q", ok, out, c.says)
			}
		})
	}
}

func TestCRDsCanBeLeftOutAndStay(t *testing.T) {
	t.Parallel()
	for _, u := range mustRender(t) {
		if u.GetKind() == "CustomResourceDefinition" && u.GetAnnotations()["helm.sh/resource-policy"] != "keep" {
			t.Errorf("removing the release removes %s, and every object of it", u.GetName())
		}
	}
	for _, u := range mustRender(t, "crds.install=false") {
		if u.GetKind() == "CustomResourceDefinition" {
			t.Errorf("%s is rendered with crds.install=false", u.GetName())
		}
	}
}
