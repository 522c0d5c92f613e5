package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/controllers/render"
)

// manifests are the objects that matter to rendering; others are counted and left alone.
type manifests struct {
	namespace  string // of objects that name none
	brokers    map[types.NamespacedName]*v1alpha1.Broker
	topologies map[types.NamespacedName]*v1alpha1.Topology
	groups     []*v1alpha1.ConsumerGroup
	workloads  map[render.Target]*workload
	seen       map[string]string // where each object came from
}

// workload is what rendering needs of a Deployment or StatefulSet.
type workload struct {
	optedIn    bool
	containers []string
}

func newManifests(namespace string) *manifests {
	return &manifests{namespace: namespace, brokers: map[types.NamespacedName]*v1alpha1.Broker{}, topologies: map[types.NamespacedName]*v1alpha1.Topology{},
		workloads: map[render.Target]*workload{}, seen: map[string]string{}}
}

// load reads files, folders (their *.yaml, *.yml and *.json) and, for "-", in. All problems are reported together.
func (m *manifests) load(paths []string, in io.Reader) error {
	var errs []error
	for _, path := range paths {
		if path == "-" {
			errs = append(errs, m.read("standard input", in))
			continue
		}
		files, err := filesAt(path)
		if err != nil {
			errs = append(errs, err)
		}
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				errs = append(errs, fmt.Errorf("read manifest: %w", err))
				continue
			}
			errs = append(errs, m.read(f, bytes.NewReader(b)))
		}
	}
	return errors.Join(errs...)
}

func filesAt(path string) ([]string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("read manifest: %w", err)
	}
	if !info.IsDir() {
		return []string{path}, nil
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, fmt.Errorf("read manifests: %w", err)
	}
	var files []string
	for _, e := range entries {
		if !e.IsDir() && slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(e.Name())) {
			files = append(files, filepath.Join(path, e.Name()))
		}
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("read manifests: %q holds no .yaml, .yml or .json file", path)
	}
	return files, nil
}

// read takes every document of a stream.
func (m *manifests) read(from string, r io.Reader) error {
	var errs []error
	docs := utilyaml.NewYAMLReader(newLineReader(r))
	for n := 1; ; n++ {
		doc, err := docs.Read()
		if errors.Is(err, io.EOF) {
			return errors.Join(errs...)
		}
		where := fmt.Sprintf("%s, document %d", from, n)
		if err != nil {
			return errors.Join(append(errs, fmt.Errorf("%s: %w", where, err))...)
		}
		j, err := yaml.YAMLToJSON(doc)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: not YAML: %w", where, err))
			continue
		}
		if string(bytes.TrimSpace(j)) == "null" { // only comments
			continue
		}
		if err := m.add(where, j); err != nil {
			errs = append(errs, err)
		}
	}
}

// add takes one object, or a List of them.
func (m *manifests) add(where string, j []byte) error {
	var head struct {
		metav1.TypeMeta `json:",inline"`
		Items           []rawObject `json:"items"`
	}
	if err := kjson.UnmarshalCaseSensitivePreserveInts(j, &head); err != nil {
		return fmt.Errorf("%s: not a Kubernetes object: %w", where, err)
	}
	if head.APIVersion == "" || head.Kind == "" {
		return fmt.Errorf("%s: apiVersion and kind are needed", where)
	}
	if head.Kind == "List" && head.APIVersion == "v1" {
		var errs []error
		for i, item := range head.Items {
			errs = append(errs, m.add(fmt.Sprintf("%s, item %d", where, i+1), item))
		}
		return errors.Join(errs...)
	}
	group, version, _ := strings.Cut(head.APIVersion, "/")
	switch {
	case group == v1alpha1.GroupVersion.Group:
		if version != v1alpha1.GroupVersion.Version {
			return fmt.Errorf("%s: %s %s: this release knows version %s", where, head.APIVersion, head.Kind, v1alpha1.GroupVersion)
		}
		return m.addOwn(where, head.Kind, j)
	case head.APIVersion == appsv1.SchemeGroupVersion.String() && (head.Kind == "Deployment" || head.Kind == "StatefulSet"):
		return m.addWorkload(where, head.Kind, j)
	default:
		return nil
	}
}

type rawObject []byte

// UnmarshalJSON keeps the text.
func (r *rawObject) UnmarshalJSON(b []byte) error { *r = append((*r)[:0], b...); return nil }

func (m *manifests) addOwn(where, kind string, j []byte) error {
	var o v1alpha1.ConditionedObject
	switch kind {
	case v1alpha1.KindBroker:
		o = &v1alpha1.Broker{}
	case v1alpha1.KindTopology:
		o = &v1alpha1.Topology{}
	case v1alpha1.KindConsumerGroup:
		o = &v1alpha1.ConsumerGroup{}
	default:
		return fmt.Errorf("%s: kind %q: there are Broker, Topology and ConsumerGroup", where, kind)
	}
	strict, err := kjson.UnmarshalStrict(j, o)
	if err != nil {
		return fmt.Errorf("%s: %s: %w", where, kind, err)
	}
	what, err := m.identify(where, kind, o)
	if err != nil {
		return err
	}
	if len(strict) > 0 {
		return fmt.Errorf("%s: %s: %w", where, what, errors.Join(strict...))
	}
	key := types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
	switch o := o.(type) {
	case *v1alpha1.Broker:
		m.brokers[key] = o
	case *v1alpha1.Topology:
		m.topologies[key] = o
	case *v1alpha1.ConsumerGroup:
		m.groups = append(m.groups, o)
	}
	return nil
}

// identify gives an object its namespace, and refuses one without a name or that is there twice.
func (m *manifests) identify(where, kind string, o metav1.Object) (string, error) {
	if o.GetName() == "" {
		return "", fmt.Errorf("%s: %s: metadata.name is needed", where, kind)
	}
	if o.GetNamespace() == "" {
		o.SetNamespace(m.namespace)
	}
	what := fmt.Sprintf("%s %s/%s", kind, o.GetNamespace(), o.GetName())
	if before, twice := m.seen[what]; twice {
		return "", fmt.Errorf("%s: %s is there twice: also in %s", where, what, before)
	}
	m.seen[what] = where
	return what, nil
}

func (m *manifests) addWorkload(where, kind string, j []byte) error {
	var o appsv1.Deployment // a StatefulSet has the same shape where it matters
	if err := kjson.UnmarshalCaseSensitivePreserveInts(j, &o); err != nil {
		return fmt.Errorf("%s: %s: %w", where, kind, err)
	}
	if _, err := m.identify(where, kind, &o); err != nil {
		return err
	}
	w := &workload{optedIn: o.Annotations[v1alpha1.AnnotationInject] == "true", containers: []string{}}
	for _, c := range o.Spec.Template.Spec.Containers {
		w.containers = append(w.containers, c.Name)
	}
	m.workloads[render.Target{Kind: kind, Namespace: o.Namespace, Name: o.Name}] = w
	return nil
}
