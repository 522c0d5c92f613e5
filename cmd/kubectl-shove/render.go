package main

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/internal/drivers"
	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/topology"
)

func newLineReader(r io.Reader) *bufio.Reader { return bufio.NewReaderSize(r, 64<<10) }

func renderCommand() *cobra.Command {
	var files []string
	var namespace, format string
	cmd := &cobra.Command{
		Use:   "render -f FILE [-f FILE ...]",
		Short: "Print the broker objects and the RuntimeConfig that manifests lead to",
		Long: `Print, offline, what the operator would declare on the broker for each Topology, and the RuntimeConfig that it
would hand to each workload. It uses the operator's own functions and asks neither a cluster nor a broker.

Give all manifests that belong together: a ConsumerGroup needs its Topology and its Broker. Deployments and
StatefulSets are looked at if they are there. What the API server checks with the CRDs' rules is not checked here.

The exit code is 1 when something would not be served; what it is stands on standard error.`,
		Example: `  kubectl shove render -f manifests/
  kustomize build . | kubectl shove render -f - --output json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if len(files) == 0 {
				return errors.New("which manifests? Use -f FILE, -f FOLDER or -f - for standard input")
			}
			write, ok := writers[format]
			if !ok {
				return fmt.Errorf("--output %q: use yaml or json", format)
			}
			m := newManifests(namespace)
			if err := m.load(files, cmd.InOrStdin()); err != nil {
				return err
			}
			result, problems := m.render()
			if len(result.Topologies) == 0 && len(result.Workloads) == 0 && len(problems) == 0 {
				return errors.New("the manifests hold no Topology and no ConsumerGroup")
			}
			if err := write(cmd.OutOrStdout(), result); err != nil {
				return err
			}
			return report(cmd.ErrOrStderr(), problems)
		},
	}
	cmd.Flags().StringArrayVarP(&files, "filename", "f", nil, "manifest, folder of manifests, or - for standard input; may be repeated")
	cmd.Flags().StringVarP(&namespace, "namespace", "n", "default", "namespace of objects that name none")
	cmd.Flags().StringVarP(&format, "output", "o", "yaml", "yaml or json")
	return cmd
}

// problem is a finding about an object.
type problem struct {
	object string
	render.Finding
}

// report prints findings; the error says how many of them keep something from working.
func report(w io.Writer, problems []problem) error {
	blocking := 0
	for _, p := range problems {
		word := "Warning"
		if p.Blocks {
			word = "Problem"
			blocking++
		}
		if _, err := fmt.Fprintf(w, "%s: %s: %s (%s)\n", word, p.object, strings.ReplaceAll(p.Message, "\n", "; "), p.Reason); err != nil {
			return err
		}
	}
	if blocking > 0 {
		return fmt.Errorf("%d of these keep something from being served", blocking)
	}
	return nil
}

// result is what is printed.
type result struct {
	Topologies []topologyObjects `json:"topologies"`
	Workloads  []workloadConfig  `json:"workloads"`
}

// topologyObjects are what one Topology leads to on its broker.
type topologyObjects struct {
	Namespace string          `json:"namespace"`
	Name      string          `json:"name"`
	Broker    string          `json:"broker"`
	Kind      topology.Kind   `json:"kind"`
	Objects   []broker.Object `json:"objects"`
}

// workloadConfig is what one workload gets.
type workloadConfig struct {
	Kind      string                `json:"kind"`
	Namespace string                `json:"namespace"`
	Name      string                `json:"name"`
	Container string                `json:"container,omitempty"`
	ConfigMap string                `json:"configMap"`
	Secret    string                `json:"secret"`
	Config    *config.RuntimeConfig `json:"runtimeConfig"`
}

func (m *manifests) world() render.World {
	byKind := map[topology.Kind]broker.Driver{}
	for _, d := range drivers.All() {
		byKind[d.Kind] = d
	}
	return render.World{
		Topology: func(k types.NamespacedName) *v1alpha1.Topology { return m.topologies[k] },
		Broker:   func(k types.NamespacedName) *v1alpha1.Broker { return m.brokers[k] },
		Labels:   func(ns string) map[string]string { return map[string]string{"kubernetes.io/metadata.name": ns} },
		Driver: func(k topology.Kind) (broker.Driver, bool) {
			d, ok := byKind[k]
			return d, ok
		},
	}
}

// render is everything that the manifests lead to, sorted, and what is wrong with them.
func (m *manifests) render() (result, []problem) {
	w := m.world()
	r := result{Topologies: []topologyObjects{}, Workloads: []workloadConfig{}}
	var problems []problem
	consumers, publishers := map[render.Target][]*render.Consumer{}, map[render.Target][]*render.Publisher{}
	for _, key := range slices.SortedFunc(maps.Keys(m.topologies), compareKeys) {
		t := m.topologies[key]
		objects, ps := renderTopology(t, w)
		problems = append(problems, ps...)
		if objects != nil {
			r.Topologies = append(r.Topologies, *objects)
		}
		for _, ref := range t.Spec.Publishers {
			target := render.PublisherTarget(t, ref)
			publishers[target] = append(publishers[target], render.AssessPublisher(t, ref, w))
		}
	}
	all := make([]v1alpha1.ConsumerGroup, len(m.groups))
	for i, g := range m.groups {
		all[i] = *g
	}
	for _, g := range m.groups {
		c := render.Assess(g, w)
		if f := render.ScalingConflict(g, all); f != nil {
			c.Findings = append(c.Findings, *f)
		}
		consumers[render.TargetOf(g)] = append(consumers[render.TargetOf(g)], c)
	}
	targets := map[render.Target]bool{}
	for t := range consumers {
		targets[t] = true
	}
	for t := range publishers {
		targets[t] = true
	}
	for _, t := range slices.SortedFunc(maps.Keys(targets), compareTargets) {
		wc, ps := m.renderWorkload(t, consumers[t], publishers[t])
		problems = append(problems, ps...)
		if wc != nil {
			r.Workloads = append(r.Workloads, *wc)
		}
	}
	return r, problems
}

// renderTopology is nil where the Topology cannot be on its broker. Findings that its consumers repeat are theirs.
func renderTopology(t *v1alpha1.Topology, w render.World) (*topologyObjects, []problem) {
	name := fmt.Sprintf("Topology %s/%s", t.Namespace, t.Name)
	link, f := render.Resolve(t, w)
	if f != nil {
		return nil, []problem{{name, *f}}
	}
	objects, err := link.Driver.Objects(link.Declaration)
	if err != nil {
		return nil, []problem{{name, render.Finding{Reason: v1alpha1.ReasonUnsupported, Message: err.Error(), Blocks: true}}}
	}
	var problems []problem
	for _, warning := range link.Declaration.Topology.Warnings() {
		problems = append(problems, problem{name, render.Finding{Reason: string(warning), Message: warning.Text()}})
	}
	return &topologyObjects{Namespace: t.Namespace, Name: t.Name, Broker: link.Broker.Namespace + "/" + link.Broker.Name, Kind: link.Kind, Objects: objects}, problems
}

// renderWorkload is nil where nobody is served.
func (m *manifests) renderWorkload(t render.Target, consumers []*render.Consumer, publishers []*render.Publisher) (*workloadConfig, []problem) {
	var problems []problem
	var containers []string
	if w := m.workloads[t]; w != nil {
		containers = w.containers
		if !w.optedIn {
			problems = append(problems, problem{t.String(), render.Finding{Reason: v1alpha1.ReasonInjectionNotAllowed, Blocks: true,
				Message: fmt.Sprintf("set the annotation %s: \"true\" on it, or nothing is injected", v1alpha1.AnnotationInject)}})
		}
	}
	plan := render.NewPlan(t, containers, consumers, publishers)
	for _, c := range consumers {
		for _, f := range c.Findings {
			problems = append(problems, problem{fmt.Sprintf("ConsumerGroup %s/%s", c.Group.Namespace, c.Group.Name), f})
		}
	}
	for _, p := range publishers {
		for _, f := range p.Findings {
			if f.Condition != v1alpha1.ConditionTopologyReady { // said about the Topology
				problems = append(problems, problem{fmt.Sprintf("Topology %s/%s, publisher %s", p.Topology.Namespace, p.Topology.Name, p.Reference.Name), f})
			}
		}
	}
	if plan.Empty() {
		return nil, problems
	}
	cfg, err := render.Config(plan, render.OfflineFacts)
	if err != nil {
		return nil, append(problems, problem{t.String(), render.Finding{Reason: v1alpha1.ReasonInvalidSpec, Message: err.Error(), Blocks: true}})
	}
	return &workloadConfig{Kind: t.Kind, Namespace: t.Namespace, Name: t.Name, Container: plan.Container,
		ConfigMap: t.ObjectName(), Secret: t.ObjectName(), Config: cfg}, problems
}

func compareKeys(a, b types.NamespacedName) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}

func compareTargets(a, b render.Target) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name))
}
