package render

import (
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// World is what references are resolved with. A nil result means that the object does not exist.
type World struct {
	Topology func(types.NamespacedName) *v1alpha1.Topology
	Broker   func(types.NamespacedName) *v1alpha1.Broker
	// Labels are a namespace's labels.
	Labels func(namespace string) map[string]string
	Driver func(topology.Kind) (broker.Driver, bool)
}

// Finding is something that a person should know about an object: a condition in the cluster, a line on a terminal.
type Finding struct {
	// Condition is the condition's type, and with abnormal-true conditions also its reason.
	Condition string
	Reason    string
	Message   string
	// Blocks says that the object is not served until it is mended.
	Blocks bool
	// Waits says that nobody has done anything wrong yet: the object it needs may still appear.
	Waits bool
}

func (f *Finding) Error() string { return f.Message }

// Link is a Topology with what it refers to.
type Link struct {
	Topology    *v1alpha1.Topology
	Broker      *v1alpha1.Broker
	Kind        topology.Kind
	Driver      broker.Driver
	Declaration broker.Declaration
}

// Resolve follows a Topology to its Broker and derives its declaration. Everything found along the way stays in the
// Link, also when there is a Finding.
func Resolve(t *v1alpha1.Topology, w World) (Link, *Finding) {
	l := Link{Topology: t}
	refuse := func(reason, format string, args ...any) *Finding {
		return &Finding{Condition: v1alpha1.ConditionTopologyReady, Reason: reason, Message: fmt.Sprintf(format, args...), Blocks: true}
	}
	key := BrokerKey(t)
	if l.Broker = w.Broker(key); l.Broker == nil {
		f := refuse(v1alpha1.ReasonBrokerNotFound, "Topology %q refers to Broker %q, which does not exist: create it, or correct brokerRef", t.Name, key)
		f.Waits = true
		return l, f
	}
	l.Kind = Kind(l.Broker)
	driver, ok := w.Driver(l.Kind)
	if !ok {
		return l, refuse(v1alpha1.ReasonBackendNotAvailable, "Broker %q is of kind %s, which this release cannot use", key, l.Broker.Spec.Kind())
	}
	l.Driver = driver
	d, err := Declaration(t, l.Kind)
	if err != nil {
		return l, refuse(v1alpha1.ReasonInvalidSpec, "Topology %q: %v", t.Name, err)
	}
	l.Declaration = d
	if r := Access(l.Broker, t.Namespace, w.Labels(t.Namespace), Claims(d.Topology)); r != nil {
		return l, refuse(r.Reason, "%s", r.Message)
	}
	if _, err := driver.Objects(d); err != nil {
		return l, refuse(v1alpha1.ReasonUnsupported, "Topology %q: %v", t.Name, err)
	}
	return l, nil
}

// Consumer is a ConsumerGroup with everything that follows from its spec and its references.
type Consumer struct {
	Link
	Group       *v1alpha1.ConsumerGroup
	Options     config.Options // the group's own layer
	Effective   config.Effective
	Prefetch    int // what the broker's lease leaves of Effective.Prefetch (H11)
	Credentials Credentials
	Findings    []Finding
}

// Blocked says whether the group is not served.
func (c *Consumer) Blocked() bool { return blocked(c.Findings) }

// Resolved says whether the options could be resolved.
func (c *Consumer) Resolved() bool { return c.Effective.From != nil }

func blocked(fs []Finding) bool {
	for _, f := range fs {
		if f.Blocks {
			return true
		}
	}
	return false
}

// Assess resolves a ConsumerGroup and checks what the API server cannot see because it needs other objects.
func Assess(g *v1alpha1.ConsumerGroup, w World) *Consumer {
	c := &Consumer{Group: g}
	add := func(f *Finding) {
		if f != nil {
			c.Findings = append(c.Findings, *f)
		}
	}
	key := types.NamespacedName{Namespace: g.Namespace, Name: g.Spec.TopologyRef.Name}
	t := w.Topology(key)
	if t == nil {
		add(&Finding{Condition: v1alpha1.ConditionTopologyReady, Reason: v1alpha1.ReasonTopologyNotFound, Blocks: true, Waits: true,
			Message: fmt.Sprintf("Topology %q does not exist in namespace %q: create it, or correct topologyRef", key.Name, key.Namespace)})
		return c
	}
	link, f := Resolve(t, w)
	c.Link = link
	add(f)
	if link.Broker == nil {
		return c
	}
	c.Credentials, f = credentialsFor(g, link.Broker, g.Namespace)
	add(f)
	c.resolveOptions(add)
	return c
}

// resolveOptions fills Options, Effective and Prefetch, and checks them against the Topology and the broker.
func (c *Consumer) resolveOptions(add func(*Finding)) {
	invalid := func(err error) {
		add(&Finding{Condition: v1alpha1.ConditionInvalidOptions, Reason: v1alpha1.ConditionInvalidOptions, Message: err.Error(), Blocks: true})
	}
	own, err := Options(&c.Group.Spec.ConsumerOptions)
	if err != nil {
		invalid(err)
		return
	}
	defaults, err := Options(c.Broker.Spec.ConsumerDefaults)
	if err != nil {
		invalid(fmt.Errorf("consumerDefaults of Broker %q: %w", c.Broker.Name, err))
		return
	}
	c.Options = own
	traits := config.Traits{External: c.Topology.Spec.External}
	if c.Driver.Capabilities != nil {
		caps := c.Driver.Capabilities(c.Declaration.Options)
		traits.CrashLimitDefault, traits.TimeoutLeavesPending = caps.CrashLimitDefault, caps.TimeoutLeavesPending
	}
	if f := republishOnExternal(traits.External, own, defaults, c.Broker.Name); f != nil {
		add(f)
		// It is said once, here; the other options still resolve.
		own.RetryStrategy, defaults.RetryStrategy = nil, nil
	}
	e, err := config.Resolve(traits, config.Layer{Name: config.LayerConsumerGroup, Options: own}, config.Layer{Name: config.LayerBroker, Options: defaults})
	if err != nil {
		invalid(err)
		return
	}
	c.Effective, c.Prefetch = e, e.Prefetch
	if e.TimeoutOutcome == settle.VerdictDefer && e.HandlerTimeout > 0 && len(c.Topology.Spec.HoldQueues) == 0 {
		add(&Finding{Condition: v1alpha1.ConditionTimeoutDeferWithoutHold, Reason: v1alpha1.ConditionTimeoutDeferWithoutHold, Blocks: true,
			Message: fmt.Sprintf("handlerTimeoutOutcome is Defer and Topology %q has no hold queue to wait in: add holdQueues, or use Retry, Reject or Ack", c.Topology.Name)})
	}
	if e.TimeoutOutcome == settle.VerdictAck && e.HandlerTimeout > 0 {
		add(&Finding{Condition: v1alpha1.ConditionTimeoutAckLosesWork, Reason: v1alpha1.ConditionTimeoutAckLosesWork,
			Message: "handlerTimeoutOutcome is Ack: a message whose handler is too slow is removed although its work may not be done"})
	}
	add(c.leaseLimit())
}

func republishOnExternal(external bool, own, defaults config.Options, brokerName string) *Finding {
	explicit, from := own.RetryStrategy, "retryStrategy"
	if explicit == nil {
		explicit, from = defaults.RetryStrategy, fmt.Sprintf("consumerDefaults.retryStrategy of Broker %q", brokerName)
	}
	if !external || explicit == nil || *explicit != string(v1alpha1.RetryRepublish) {
		return nil
	}
	return &Finding{Condition: v1alpha1.ConditionRepublishOnExternal, Reason: v1alpha1.ConditionRepublishOnExternal, Blocks: true,
		Message: from + " is Republish and the Topology is external, where nothing is ever written: leave it out, or use InPlace"}
}

// leaseMargin is how far below the broker's limit a handler timeout has to stay (H11).
const leaseMargin = 60 * time.Second

// leaseLimit lowers Prefetch to what the broker's limit allows, and finds handler timeouts that no prefetch saves.
func (c *Consumer) leaseLimit() *Finding {
	if c.Driver.LeaseLimit == nil {
		return nil
	}
	endpoint, err := Endpoint(c.Broker)
	if err != nil {
		return nil // the Broker's own conditions say so
	}
	limit, err := c.Driver.LeaseLimit(endpoint)
	if err != nil || limit <= 0 {
		return nil
	}
	e := c.Effective
	c.Prefetch = broker.EffectivePrefetch(e.Prefetch, e.Concurrency, e.HandlerTimeout, limit)
	if e.HandlerTimeout > 0 && e.HandlerTimeout <= limit-leaseMargin {
		return nil
	}
	have := "handlerTimeout is off"
	if e.HandlerTimeout > 0 {
		have = "handlerTimeout is " + duration(e.HandlerTimeout)
	}
	return &Finding{Condition: v1alpha1.ConditionHandlerTimeoutAboveBrokerLimit, Reason: v1alpha1.ConditionHandlerTimeoutAboveBrokerLimit,
		Message: fmt.Sprintf("%s and the broker takes a message back that is not settled within %s: use at most %s, or raise the limit on the server and in the Broker",
			have, duration(limit), duration(limit-leaseMargin))}
}

// TimeoutsDiffer finds handler timeouts of the groups of one Topology that are further apart than a factor of two, on a
// broker where a message that was not renewed for two of them goes to another consumer (H10).
func TimeoutsDiffer(c *Consumer, beside []*Consumer) *Finding {
	if !c.Resolved() || c.Driver.Capabilities == nil || !c.Driver.Capabilities(c.Declaration.Options).TimeoutLeavesPending {
		return nil
	}
	for _, o := range beside {
		if !o.Resolved() || o.Group.UID == c.Group.UID || o.Topology.UID != c.Topology.UID {
			continue
		}
		mine, theirs := c.Effective.HandlerTimeout, o.Effective.HandlerTimeout
		if mine == theirs || mine > 0 && theirs > 0 && mine <= 2*theirs && theirs <= 2*mine {
			continue
		}
		return &Finding{Condition: v1alpha1.ConditionHandlerTimeoutsDiffer, Reason: v1alpha1.ConditionHandlerTimeoutsDiffer,
			Message: fmt.Sprintf("handlerTimeout is %s here and %s in ConsumerGroup %q, which reads the same stream: bring them within a factor of two, so that neither takes away what the other is still working on",
				timeoutText(mine), timeoutText(theirs), o.Group.Name)}
	}
	return nil
}

func timeoutText(d time.Duration) string {
	if d <= 0 {
		return "off"
	}
	return duration(d)
}

// Publisher is one entry of a Topology's publishers.
type Publisher struct {
	Link
	Reference   v1alpha1.WorkloadReference
	Credentials Credentials
	Findings    []Finding
}

// Blocked says whether the workload does not get the publishing side.
func (p *Publisher) Blocked() bool { return blocked(p.Findings) }

// AssessPublisher resolves one publishing workload of a Topology.
func AssessPublisher(t *v1alpha1.Topology, ref v1alpha1.WorkloadReference, w World) *Publisher {
	link, f := Resolve(t, w)
	p := &Publisher{Link: link, Reference: ref}
	if f != nil {
		p.Findings = append(p.Findings, *f)
	}
	if link.Broker == nil {
		return p
	}
	p.Credentials, f = credentialsFor(nil, link.Broker, t.Namespace)
	if f != nil {
		p.Findings = append(p.Findings, *f)
	}
	if t.Spec.External {
		p.Findings = append(p.Findings, Finding{Condition: v1alpha1.ConditionInjected, Reason: v1alpha1.ReasonInvalidSpec, Blocks: true,
			Message: "the Topology is external: shove does not publish to a queue that it does not own"})
	}
	return p
}

// Credentials say which Secrets a workload's connection is made from. Nil: none is needed.
type Credentials struct {
	Secret *types.NamespacedName
	// Own says that the Secret is the ConsumerGroup's, not the Broker's.
	Own bool
	// CA and ClientCert are the Broker's TLS Secrets. ClientCert stays in the Broker's namespace, because it holds a
	// private key: workloads elsewhere bring tls.crt and tls.key in their credentials.
	CA         *types.NamespacedName
	ClientCert *types.NamespacedName
}

// credentialsFor decides what a workload of a namespace connects with: the group's own credentials, else the
// Broker's workloadCredentials, else (in the Broker's namespace only) its credentials, which may be generated ones.
func credentialsFor(g *v1alpha1.ConsumerGroup, b *v1alpha1.Broker, namespace string) (Credentials, *Finding) {
	var c Credentials
	secret := func(ns, name string) *types.NamespacedName { return &types.NamespacedName{Namespace: ns, Name: name} }
	if t := b.Spec.TLS; t != nil {
		if t.CASecretRef != nil {
			c.CA = secret(b.Namespace, t.CASecretRef.Name)
		}
		if t.ClientCertSecretRef != nil && namespace == b.Namespace {
			c.ClientCert = secret(b.Namespace, t.ClientCertSecretRef.Name)
		}
	}
	switch {
	case g != nil && g.Spec.Credentials != nil:
		c.Secret, c.Own = secret(g.Namespace, g.Spec.Credentials.SecretRef.Name), true
	case b.Spec.WorkloadCredentials != nil:
		c.Secret = secret(b.Namespace, b.Spec.WorkloadCredentials.SecretRef.Name)
	case OperatorCredentials(b) == nil:
	case namespace == b.Namespace:
		c.Secret = secret(b.Namespace, OperatorCredentials(b).SecretRef.Name)
	default:
		return c, &Finding{Condition: v1alpha1.ConditionCredentialsReady, Reason: v1alpha1.ReasonWorkloadCredentialsMissing, Blocks: true,
			Message: fmt.Sprintf("Broker %s/%s has no workloadCredentials, and its own never leave its namespace: set credentials on a ConsumerGroup here, or ask its owner for workloadCredentials",
				b.Namespace, b.Name)}
	}
	return c, nil
}
