package render

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path"
	"slices"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// Where a workload finds its configuration.
const (
	MountPath  = "/etc/shove"
	ConfigFile = "config.yaml" // also the key in the ConfigMap
)

// Keys of Secrets, and of the files made from them.
const (
	KeyCA      = "ca.crt"
	KeyTLSCert = "tls.crt"
	KeyTLSKey  = "tls.key"
)

// CredentialKeys are the keys that are read from a Secret with credentials. Nothing else of it is copied.
func CredentialKeys() []string {
	return []string{"username", "password", "token", "nkey", "creds", "accessKeyId", "secretAccessKey", "sessionToken", KeyTLSCert, KeyTLSKey}
}

// FeatureSidecar is required by configurations that only the sidecar understands.
const FeatureSidecar = "sidecar"

// Facts is what only the Secrets of a Connection tell.
type Facts struct {
	// ClientCert says that there is a client certificate with its key.
	ClientCert bool
}

// OfflineFacts are Facts for when no Secret can be read: every certificate that a Broker names is there.
func OfflineFacts(c Connection) Facts { return Facts{ClientCert: c.ClientCert != nil} }

// Config is the RuntimeConfig of a plan: sorted, and with a generation that changes exactly when the rest does. It
// holds no secret. The result passes its own validation; an error is a defect in this package or in a manifest that
// the API server should have refused.
func Config(p *Plan, facts func(Connection) Facts) (*config.RuntimeConfig, error) {
	c := &config.RuntimeConfig{APIVersion: config.APIVersion, Kind: config.Kind}
	for _, conn := range p.Brokers {
		b, err := brokerEntry(conn, facts(conn))
		if err != nil {
			return nil, fmt.Errorf("Broker %q: %w", conn.Name, err)
		}
		c.Brokers = append(c.Brokers, b)
	}
	for _, k := range p.Consumers {
		c.Topologies = append(c.Topologies, topologyEntry(p, k.Link, k.Credentials))
		c.Consumers = append(c.Consumers, consumerEntry(k))
	}
	for _, q := range p.Publishers {
		name := q.Topology.Name
		if !slices.ContainsFunc(c.Topologies, func(t config.Topology) bool { return t.Name == name }) {
			c.Topologies = append(c.Topologies, topologyEntry(p, q.Link, q.Credentials))
		}
		c.Publish = append(c.Publish, config.Publish{Topology: name})
	}
	slices.SortFunc(c.Topologies, func(a, b config.Topology) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(c.Consumers, func(a, b config.Consumer) int { return cmp.Compare(a.Topology, b.Topology) })
	slices.SortFunc(c.Publish, func(a, b config.Publish) int { return cmp.Compare(a.Topology, b.Topology) })
	c.Requires = requires(c)
	b, err := json.Marshal(c)
	if err != nil {
		return nil, fmt.Errorf("encode RuntimeConfig of %s: %w", p.Target, err)
	}
	c.Generation = shortHash(b)
	return c, validate(c)
}

// validate is the runtime's own validation, with the sidecar's feature allowed.
func validate(c *config.RuntimeConfig) error {
	known := *c
	known.Requires = slices.DeleteFunc(slices.Clone(c.Requires), func(f string) bool { return f == FeatureSidecar })
	return known.Validate()
}

func brokerEntry(c Connection, f Facts) (config.Broker, error) {
	endpoint, err := WorkloadEndpoint(c.Link.Broker)
	if err != nil {
		return config.Broker{}, err
	}
	defaults, err := Options(c.Link.Broker.Spec.ConsumerDefaults)
	if err != nil {
		return config.Broker{}, err
	}
	b := config.Broker{Name: c.Name, Kind: c.Link.Kind, Endpoint: endpoint, ConsumerDefaults: defaults}
	if c.Secret != nil {
		b.CredentialsDir, b.CredentialsPrefix = MountPath, c.Prefix
	}
	file := func(key string) string { return path.Join(MountPath, c.Prefix+key) }
	t := config.TLS{}
	if spec := c.Link.Broker.Spec.TLS; spec != nil {
		t.ServerName = spec.ServerName
	}
	if c.CA != nil {
		t.CAFile = file(KeyCA)
	}
	if f.ClientCert {
		t.CertFile, t.KeyFile = file(KeyTLSCert), file(KeyTLSKey)
	}
	// A URL says whether there is TLS; addresses of Kafka and Redis do not, so that tls: {} does.
	if bare := c.Link.Kind == topology.Kafka || c.Link.Kind == topology.Redis; t != (config.TLS{}) || bare && c.Link.Broker.Spec.TLS != nil {
		b.TLS = &t
	}
	return b, nil
}

func topologyEntry(p *Plan, l Link, c Credentials) config.Topology {
	name := ""
	for _, conn := range p.Brokers {
		if conn.Serves(l, c) {
			name = conn.Name
		}
	}
	d := l.Declaration
	if l.Driver.Capabilities != nil && l.Driver.Capabilities(d.Options).ReadsHolds { // else they return by themselves
		d.Retired = RetiredQueues(l.Topology)
	}
	return config.FromDeclaration(l.Topology.Name, l.Topology.Namespace, name, d)
}

func consumerEntry(k *Consumer) config.Consumer {
	c := config.Consumer{Group: k.Group.Name, Topology: k.Topology.Name, Paused: k.Group.Spec.Paused, Options: k.Options}
	if s := sidecarOf(k.Group); s != nil {
		c.Sidecar = &config.Sidecar{Port: int(s.Port), Path: s.Path, ReadinessPath: s.ReadinessPath, DeadLetters: s.DeadLetters}
	}
	return c
}

// requires lists the features that a runtime must have so as not to misread the file.
func requires(c *config.RuntimeConfig) []string {
	need := map[string]bool{}
	for _, t := range c.Topologies {
		need["hold-queues"] = need["hold-queues"] || len(t.HoldQueues) > 0
		need["dead-letter"] = need["dead-letter"] || t.DeadLetter != ""
		need["external"] = need["external"] || t.External
		need["sequenced-keys"] = need["sequenced-keys"] || t.Sequenced != nil
	}
	layer := func(o config.Options) {
		need["defer-limit"] = need["defer-limit"] || o.DeferLimit != nil
		need["crash-limit"] = need["crash-limit"] || o.CrashLimit != nil && *o.CrashLimit > 0
	}
	for _, b := range c.Brokers {
		layer(b.ConsumerDefaults)
	}
	for _, k := range c.Consumers {
		layer(k.Options)
		need[FeatureSidecar] = need[FeatureSidecar] || k.Sidecar != nil
	}
	var out []string
	for f, needed := range need {
		if needed {
			out = append(out, f)
		}
	}
	slices.Sort(out)
	return out
}

func shortHash(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:6])
}

// SecretData are the keys of a target's Secret that belong to one connection, from what its source Secrets hold. A
// client certificate comes from the credentials where they have one, else from the Broker's.
func SecretData(c Connection, credentials, ca, clientCert map[string][]byte) (map[string][]byte, Facts) {
	out := map[string][]byte{}
	for _, k := range CredentialKeys() {
		if v, ok := credentials[k]; ok && k != KeyTLSCert && k != KeyTLSKey {
			out[c.Prefix+k] = v
		}
	}
	if v, ok := ca[KeyCA]; ok {
		out[c.Prefix+KeyCA] = v
	}
	pair := clientCert
	if credentials[KeyTLSCert] != nil && credentials[KeyTLSKey] != nil {
		pair = credentials
	}
	if pair[KeyTLSCert] != nil && pair[KeyTLSKey] != nil {
		out[c.Prefix+KeyTLSCert], out[c.Prefix+KeyTLSKey] = pair[KeyTLSCert], pair[KeyTLSKey]
		return out, Facts{ClientCert: true}
	}
	return out, Facts{}
}

// ScalingConflict finds an older group that scales the same workload or the same Topology. It does not block: the
// younger group consumes, and does not scale.
func ScalingConflict(g *v1alpha1.ConsumerGroup, others []v1alpha1.ConsumerGroup) *Finding {
	if !scales(g) {
		return nil
	}
	for i := range others {
		o := &others[i]
		if o.Namespace != g.Namespace || o.UID == g.UID && o.Name == g.Name || !scales(o) || !older(o, g) {
			continue
		}
		reason, what := "", ""
		switch {
		case TargetOf(o) == TargetOf(g) && g.Spec.WorkloadRef != nil:
			reason, what = v1alpha1.ReasonWorkloadScaledByOther, TargetOf(g).String()
		case o.Spec.TopologyRef.Name == g.Spec.TopologyRef.Name:
			reason, what = v1alpha1.ReasonTopologyScaledByOther, fmt.Sprintf("a workload on Topology %q", g.Spec.TopologyRef.Name)
		default:
			continue
		}
		f := conflict(reason, "ConsumerGroup %q is older and scales %s already: remove replicas from one of the two", o.Name, what)
		f.Blocks = false
		return f
	}
	return nil
}

func scales(g *v1alpha1.ConsumerGroup) bool {
	return g.Spec.Replicas != nil && (g.Spec.Scaling == nil || g.Spec.Scaling.Mode != v1alpha1.ScalingNone)
}

func older(a, b *v1alpha1.ConsumerGroup) bool {
	return cmp.Or(a.CreationTimestamp.Time.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name)) < 0
}

// RestartKey is what a running pod cannot change about a consumer.
func RestartKey(c *Consumer) string {
	strategy := "Republish"
	if c.Effective.Strategy == settle.InPlace {
		strategy = "InPlace"
	}
	return fmt.Sprintf("%s, retryStrategy %s, exactlyOnce %t", c.Kind, strategy, c.Effective.ExactlyOnce)
}
