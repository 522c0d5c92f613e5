package controllers

import (
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/controllers/render"
)

const (
	metaTrue    = metav1.ConditionTrue
	metaFalse   = metav1.ConditionFalse
	metaUnknown = metav1.ConditionUnknown
)

// finding is a condition as a pass found it; the zero value: nothing was found out.
type finding struct {
	status          metav1.ConditionStatus
	reason, message string
}

// outcome is what a pass over a target found. It is not changed once it is kept.
type outcome struct {
	members *membersFound
	// generation of the rendered configuration, and of each Topology in it.
	generation string
	injection  finding
	delivery   finding
	// grace says which grace period a pod needs, where somebody else sets a shorter one.
	grace string
	// restarts name the pods that have to be restarted, by Topology.
	restarts        map[string]string
	replicas, ready *int32
	// carried says that the workload's template carries the injection.
	carried bool
	plan    *render.Plan
}

func newOutcome(m *membersFound) *outcome { return &outcome{members: m} }

func (o *outcome) injected(status metav1.ConditionStatus, reason, message string) {
	o.injection = finding{status, reason, message}
}

func (o *outcome) delivered(status metav1.ConditionStatus, reason, message string) {
	o.delivery = finding{status, reason, message}
}

func (o *outcome) scale(w *workload) { o.replicas, o.ready = w.replicas(), w.readyReplicas() }

func (o *outcome) served(p *render.Plan, generation string) { o.plan, o.generation = p, generation }

// group finds a ConsumerGroup as it was assessed; nil where the outcome is not about this generation of it.
func (o *outcome) group(g *v1alpha1.ConsumerGroup) *render.Consumer {
	for _, c := range o.members.consumers {
		if c.Group.UID == g.UID && c.Group.Generation == g.Generation {
			return c
		}
	}
	return nil
}

func (o *outcome) publisher(t *v1alpha1.Topology) *render.Publisher {
	for _, p := range o.members.publishers {
		if p.Topology.UID == t.UID && p.Topology.Generation == t.Generation {
			return p
		}
	}
	return nil
}

func (o *outcome) topologyKeys() []types.NamespacedName {
	var out []types.NamespacedName
	for _, p := range o.members.publishers {
		out = append(out, client.ObjectKeyFromObject(p.Topology))
	}
	return out
}

// outcomes keeps the last outcome of every target.
type outcomes struct {
	mu sync.Mutex
	m  map[render.Target]*outcome
	// brought remembers what pods were told last, and which generation all of them reported.
	brought map[render.Target]brought
}

type brought struct {
	token     string
	delivered string
	attempts  int
}

func newOutcomes() *outcomes {
	return &outcomes{m: map[render.Target]*outcome{}, brought: map[render.Target]brought{}}
}

func (o *outcomes) put(t render.Target, out *outcome) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.m[t] = out
}

func (o *outcomes) get(t render.Target) *outcome {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.m[t]
}

func (o *outcomes) drop(t render.Target) *outcome {
	o.mu.Lock()
	defer o.mu.Unlock()
	old := o.m[t]
	delete(o.m, t)
	delete(o.brought, t)
	return old
}

func (o *outcomes) broughtTo(t render.Target) brought {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.brought[t]
}

func (o *outcomes) setBrought(t render.Target, b brought) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.brought[t] = b
}
