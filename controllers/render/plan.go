package render

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/shove-dev/shove/api/v1alpha1"
)

// Target is what a RuntimeConfig is rendered for: a workload, or a ConsumerGroup without one.
type Target struct {
	// Kind is Deployment, StatefulSet or ConsumerGroup.
	Kind      string
	Namespace string
	Name      string
}

// Rendered reports whether the target is only rendered, not injected into.
func (t Target) Rendered() bool { return t.Kind == v1alpha1.KindConsumerGroup }

func (t Target) String() string { return t.Kind + " " + t.Namespace + "/" + t.Name }

// ObjectName is the name of the ConfigMap and of the Secret that are rendered for the target:
// "{group}-shove" for a ConsumerGroup, "{workload}.{kind}.shove" for a workload. The two never meet, because they
// end differently.
func (t Target) ObjectName() string {
	if t.Rendered() {
		return bounded(t.Name, "-shove", maxName)
	}
	return bounded(t.Name, "."+strings.ToLower(t.Kind)+".shove", maxName)
}

// Bounds of an object's name, of a key in a Secret, and of the keys in CredentialKeys.
const (
	maxName          = 253
	maxKey           = 253
	maxCredentialKey = 15
)

// bounded appends a suffix and keeps within a length.
func bounded(name, suffix string, longest int) string {
	if len(name)+len(suffix) <= longest {
		return name + suffix
	}
	h := shortHash([]byte(name))
	return strings.TrimRight(name[:longest-len(suffix)-len(h)-1], ".-") + "-" + h + suffix
}

// TargetOf is the target of a ConsumerGroup.
func TargetOf(g *v1alpha1.ConsumerGroup) Target {
	if w := g.Spec.WorkloadRef; w != nil {
		return Target{Kind: string(w.Kind), Namespace: g.Namespace, Name: w.Name}
	}
	return Target{Kind: v1alpha1.KindConsumerGroup, Namespace: g.Namespace, Name: g.Name}
}

// PublisherTarget is the target of an entry of a Topology's publishers.
func PublisherTarget(t *v1alpha1.Topology, ref v1alpha1.WorkloadReference) Target {
	return Target{Kind: string(ref.Kind), Namespace: t.Namespace, Name: ref.Name}
}

// Plan is what one target gets: who of its members is served, and how.
type Plan struct {
	Target Target
	// Container gets the configuration. Empty in mode Sidecar and for a target that is only rendered.
	Container string
	// Sidecar is set in mode Sidecar.
	Sidecar    *v1alpha1.Sidecar
	Consumers  []*Consumer
	Publishers []*Publisher
	// Brokers are the connections, sorted by name.
	Brokers []Connection
}

// Connection is one entry of a RuntimeConfig's brokers: a Broker with one set of credentials.
type Connection struct {
	// Name is "{namespace}/{name}"; a second set of credentials for the same Broker adds "@{secret}".
	Name   string
	Prefix string // of the files and keys that belong to it
	Link   Link
	Credentials
}

// Serves says whether a consumer or publisher with this link and these credentials uses the connection.
func (c Connection) Serves(l Link, of Credentials) bool {
	return c.Link.Broker.Namespace == l.Broker.Namespace && c.Link.Broker.Name == l.Broker.Name && c.ownSecret() == of.ownSecret()
}

// Empty says that nobody is served.
func (p *Plan) Empty() bool { return len(p.Consumers) == 0 && len(p.Publishers) == 0 }

// member is a consumer or a publisher on its way into a plan.
type member struct {
	consumer  *Consumer
	publisher *Publisher
	created   time.Time
	name      string
	container string
	sidecar   *v1alpha1.Sidecar
}

func (m member) add(f Finding) {
	if m.consumer != nil {
		m.consumer.Findings = append(m.consumer.Findings, f)
		return
	}
	m.publisher.Findings = append(m.publisher.Findings, f)
}

// NewPlan decides who is served by a target. Members that are blocked are left out. Where two do not fit together
// the older one stays and the younger one gets a Conflict: they share one file, one port and, with a sidecar, one
// agent. containers are the names of the workload's containers; nil means that they are not known.
func NewPlan(target Target, containers []string, consumers []*Consumer, publishers []*Publisher) *Plan {
	p := &Plan{Target: target}
	var accepted []member
	consumed := map[string]string{}
	for _, m := range members(consumers, publishers) {
		container, f := pickContainer(target, containers, m.container)
		if f == nil {
			m.container = container
			f = m.fits(accepted)
		}
		if f == nil && m.consumer != nil {
			if other, taken := consumed[m.consumer.Topology.Name]; taken {
				f = conflict(v1alpha1.ReasonTopologyConsumedByOther, "%s consumes Topology %q in the same workload already: remove one of the two", other, m.consumer.Topology.Name)
			} else {
				consumed[m.consumer.Topology.Name] = m.name
			}
		}
		if f != nil {
			m.add(*f)
			continue
		}
		accepted = append(accepted, m)
		if m.consumer != nil {
			p.Consumers = append(p.Consumers, m.consumer)
		} else {
			p.Publishers = append(p.Publishers, m.publisher)
		}
	}
	for _, m := range accepted {
		p.Container = cmp.Or(p.Container, m.container)
		if p.Sidecar == nil {
			p.Sidecar = m.sidecar
		}
	}
	if p.Sidecar != nil || target.Rendered() {
		p.Container = ""
	}
	p.Brokers = connections(p)
	return p
}

// members are those that are not blocked, the oldest first.
func members(consumers []*Consumer, publishers []*Publisher) []member {
	var ms []member
	for _, c := range consumers {
		if c.Blocked() {
			continue
		}
		m := member{consumer: c, created: c.Group.CreationTimestamp.Time, name: fmt.Sprintf("ConsumerGroup %q", c.Group.Name), sidecar: sidecarOf(c.Group)}
		if w := c.Group.Spec.WorkloadRef; w != nil {
			m.container = w.Container
		}
		ms = append(ms, m)
	}
	for _, p := range publishers {
		if p.Blocked() {
			continue
		}
		ms = append(ms, member{publisher: p, created: p.Topology.CreationTimestamp.Time,
			name: fmt.Sprintf("Topology %q (publishers)", p.Topology.Name), container: p.Reference.Container})
	}
	slices.SortStableFunc(ms, func(a, b member) int {
		return cmp.Or(a.created.Compare(b.created), cmp.Compare(a.name, b.name))
	})
	return ms
}

func sidecarOf(g *v1alpha1.ConsumerGroup) *v1alpha1.Sidecar {
	if g.Spec.Mode != v1alpha1.ModeSidecar {
		return nil
	}
	if g.Spec.Sidecar == nil {
		return &v1alpha1.Sidecar{}
	}
	return g.Spec.Sidecar
}

func conflict(reason, format string, args ...any) *Finding {
	return &Finding{Condition: v1alpha1.ConditionConflict, Reason: reason, Message: fmt.Sprintf(format, args...), Blocks: true}
}

// fits says whether m can share a workload with the older members.
func (m member) fits(older []member) *Finding {
	for _, o := range older {
		if f := m.clash(o); f != nil {
			return f
		}
	}
	return nil
}

func (m member) clash(o member) *Finding {
	consumers := m.consumer != nil && o.consumer != nil
	switch {
	case consumers && (m.sidecar == nil) != (o.sidecar == nil):
		return conflict(v1alpha1.ReasonWorkloadModeConflict, "%s uses the same workload in the other mode: a workload consumes either in mode Library or in mode Sidecar", o.name)
	case consumers && m.sidecar != nil:
		if m.sidecar.Image == o.sidecar.Image && reflect.DeepEqual(m.sidecar.Resources, o.sidecar.Resources) {
			return nil
		}
		return conflict(v1alpha1.ReasonWorkloadModeConflict, "%s asks for another image or other resources of the one agent in this workload: make sidecar.image and sidecar.resources equal", o.name)
	case m.sidecar != nil || o.sidecar != nil: // a publisher goes by the mode of the consumers
		return nil
	case m.container != o.container:
		return conflict(v1alpha1.ReasonWorkloadModeConflict, "%s gets the configuration into container %q and this one into %q: one container of a pod holds the runtime", o.name, o.container, m.container)
	default:
		return nil
	}
}

// pickContainer resolves the container that a reference means.
func pickContainer(target Target, containers []string, want string) (string, *Finding) {
	injected := func(reason, format string, args ...any) *Finding {
		return &Finding{Condition: v1alpha1.ConditionInjected, Reason: reason, Message: fmt.Sprintf(format, args...), Blocks: true}
	}
	switch {
	case target.Rendered() || containers == nil:
		return want, nil
	case want == "" && len(containers) == 1:
		return containers[0], nil
	case want == "":
		return "", injected(v1alpha1.ReasonContainerAmbiguous, "%s has the containers %s: name one of them in the reference", target, strings.Join(containers, ", "))
	case !slices.Contains(containers, want):
		return "", injected(v1alpha1.ReasonContainerNotFound, "%s has no container %q: it has %s", target, want, strings.Join(containers, ", "))
	default:
		return want, nil
	}
}

// connections lists the distinct pairs of Broker and credentials. The Broker's own credentials get the plain name,
// else the first of the others by name does.
func connections(p *Plan) []Connection {
	byBroker := map[types.NamespacedName]map[string]Connection{}
	note := func(l Link, c Credentials) {
		key := types.NamespacedName{Namespace: l.Broker.Namespace, Name: l.Broker.Name}
		if byBroker[key] == nil {
			byBroker[key] = map[string]Connection{}
		}
		id := c.ownSecret()
		if _, known := byBroker[key][id]; !known {
			byBroker[key][id] = Connection{Link: l, Credentials: c}
		}
	}
	for _, c := range p.Consumers {
		note(c.Link, c.Credentials)
	}
	for _, q := range p.Publishers {
		note(q.Link, p.publisherCredentials(q))
	}
	var out []Connection
	for key, set := range byBroker {
		var cs []Connection
		for _, c := range set {
			cs = append(cs, c)
		}
		slices.SortFunc(cs, func(a, b Connection) int { return cmp.Compare(a.ownSecret(), b.ownSecret()) })
		for i, c := range cs {
			c.Name, c.Prefix = key.String(), key.Namespace+"."+key.Name
			if i > 0 {
				c.Name, c.Prefix = c.Name+"@"+c.secretName(), c.Prefix+"_"+c.secretName()
			}
			c.Prefix = bounded(c.Prefix, ".", maxKey-maxCredentialKey)
			out = append(out, c)
		}
	}
	slices.SortFunc(out, func(a, b Connection) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// publisherCredentials are those of the group that consumes the same Topology in this workload, if there is one:
// a Topology has one connection per workload.
func (p *Plan) publisherCredentials(q *Publisher) Credentials {
	for _, c := range p.Consumers {
		if c.Topology.Name == q.Topology.Name {
			return c.Credentials
		}
	}
	return q.Credentials
}

// ownSecret tells the credentials of one Broker's users apart: the Broker's own are "".
func (c Credentials) ownSecret() string {
	if !c.Own {
		return ""
	}
	return c.secretName()
}

func (c Credentials) secretName() string {
	if c.Secret == nil {
		return ""
	}
	return c.Secret.Name
}
