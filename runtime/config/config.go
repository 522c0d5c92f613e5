// Package config is the RuntimeConfig: the file that tells a runtime which brokers, topologies and consumers it works
// with. The operator renders it, people may write it by hand, and the library and the sidecar run on it alone,
// without any cluster. It also resolves consumer options from their layers (H2).
package config

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// Identity of the file format. It is a fixed contract.
const (
	APIVersion = "runtime.shove.dev/v1alpha1"
	Kind       = "RuntimeConfig"
	// EnvPath names the environment variable with the file's path; the operator sets it to DefaultPath.
	EnvPath     = "SHOVE_CONFIG"
	DefaultPath = "/etc/shove/config.yaml"
)

// RuntimeConfig is one workload's configuration.
type RuntimeConfig struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	// Generation identifies this version of the file; the runtime reports it. Any text; the operator writes a hash.
	Generation string `json:"generation,omitempty"`
	// Requires lists features without which a runtime must refuse this file. See Features.
	Requires   []string   `json:"requires,omitempty"`
	Brokers    []Broker   `json:"brokers,omitempty"`
	Topologies []Topology `json:"topologies,omitempty"`
	Consumers  []Consumer `json:"consumers,omitempty"`
	Publish    []Publish  `json:"publish,omitempty"`
}

// Broker is one connection.
type Broker struct {
	// Name is referred to by topologies. The operator writes "{namespace}/{name}".
	Name string        `json:"name"`
	Kind topology.Kind `json:"kind"`
	// Endpoint is the section of the Broker's spec that is named like its kind.
	Endpoint json.RawMessage `json:"endpoint,omitempty"`
	// CredentialsDir holds one file per secret key (username, password, token, …); empty: none. Secrets are never
	// written into this file.
	CredentialsDir string `json:"credentialsDir,omitempty"`
	// CredentialsPrefix is put before each key to make the file's name, so that the files of several brokers fit into
	// one directory, which a volume made of one Secret is. See CredentialFile.
	CredentialsPrefix string `json:"credentialsPrefix,omitempty"`
	TLS               *TLS   `json:"tls,omitempty"`
	// ConsumerDefaults is the third layer of options: below a consumer's own and the code's.
	ConsumerDefaults Options `json:"consumerDefaults,omitzero"`
}

// CredentialFile is the path of the file that may hold a secret key; "" when the broker has no credentials. Of the
// files only the ones that the kind of credentials needs exist.
func (b Broker) CredentialFile(key string) string {
	if b.CredentialsDir == "" {
		return ""
	}
	return filepath.Join(b.CredentialsDir, b.CredentialsPrefix+key)
}

// SameConnection says whether two entries lead to the same connection: all but the defaults are equal.
func (b Broker) SameConnection(other Broker) bool {
	b.ConsumerDefaults, other.ConsumerDefaults = Options{}, Options{}
	return reflect.DeepEqual(b, other)
}

// TLS names files.
type TLS struct {
	CAFile     string `json:"caFile,omitempty"`
	CertFile   string `json:"certFile,omitempty"`
	KeyFile    string `json:"keyFile,omitempty"`
	ServerName string `json:"serverName,omitempty"`
}

// Topology is a topology with every name in it.
type Topology struct {
	// Name is what handlers and publishers are bound to: the Topology object's name.
	Name       string `json:"name"`
	Namespace  string `json:"namespace,omitempty"`
	Broker     string `json:"broker"`
	Queue      string `json:"queue"`
	Source     string `json:"source,omitempty"`
	HoldQueues []Hold `json:"holdQueues,omitempty"`
	// RetiredHoldQueues are tiers that left the topology and may still hold messages. They are read where consumers
	// read hold queues themselves (Kafka), and never written to.
	RetiredHoldQueues []Hold `json:"retiredHoldQueues,omitempty"`
	// DeadLetter is the dead-letter queue's name; empty: none.
	DeadLetter string     `json:"deadLetter,omitempty"`
	Sequenced  *Sequenced `json:"sequenced,omitempty"`
	External   bool       `json:"external,omitempty"`
	// Options is the section of the Topology's spec that is named like the broker's kind.
	Options json.RawMessage `json:"options,omitempty"`
}

// Hold is one retry tier.
type Hold struct {
	Queue string   `json:"queue"`
	Delay Duration `json:"delay"`
}

// Sequenced asks for strict order per key.
type Sequenced struct {
	OnFailure        topology.OnFailure `json:"onFailure,omitempty"`
	OnDefer          topology.OnDefer   `json:"onDefer,omitempty"`
	Shards           int                `json:"shards,omitempty"`
	Key              string             `json:"key,omitempty"`
	MaxPendingPerKey int                `json:"maxPendingPerKey,omitempty"`
	AllowMessageLoss bool               `json:"allowMessageLoss,omitempty"`
}

// Consumer is one consumer group of the workload.
type Consumer struct {
	Group    string `json:"group"`
	Topology string `json:"topology"`
	// Paused stops fetching; what is in work is finished.
	Paused  bool    `json:"paused,omitempty"`
	Options Options `json:"options,omitzero"`
	// Sidecar is set when the messages go to an application over HTTP. Only the sidecar understands it, so a file
	// with it requires the feature "sidecar".
	Sidecar *Sidecar `json:"sidecar,omitempty"`
}

// Sidecar is where the sidecar sends the messages of a consumer: http://127.0.0.1:{port}{path}.
type Sidecar struct {
	Port int `json:"port"`
	// Path gets the messages; empty: /messages.
	Path string `json:"path,omitempty"`
	// ReadinessPath is asked before messages are sent; empty: the port accepting connections is enough.
	ReadinessPath string `json:"readinessPath,omitempty"`
	// DeadLetters drains the dead-letter queue to {path}/dead.
	DeadLetters bool `json:"deadLetters,omitempty"`
}

// Publish is one topology that the workload may publish to.
type Publish struct {
	Topology string `json:"topology"`
	// MaxMessageSize in bytes refuses larger bodies before sending; 0: DefaultMaxMessageSize.
	MaxMessageSize int64 `json:"maxMessageSize,omitempty"`
}

// Declaration turns the entry into what a driver takes. The names are derived anew and compared, so that a file
// whose names disagree with the rules is refused instead of splitting a queue in two.
func (t Topology) Declaration() (broker.Declaration, error) {
	spec := topology.Spec{Queue: t.Queue, Source: t.Source, External: t.External, DeadLetter: t.DeadLetter != "", DeadLetterQueue: t.DeadLetter}
	for _, h := range t.HoldQueues {
		spec.Holds = append(spec.Holds, time.Duration(h.Delay))
	}
	if s := t.Sequenced; s != nil {
		spec.Sequenced = &topology.SequencedSpec{OnFailure: s.OnFailure, OnDefer: s.OnDefer, Shards: s.Shards, Key: s.Key,
			MaxPendingPerKey: s.MaxPendingPerKey, AllowMessageLoss: s.AllowMessageLoss}
	}
	topo, err := topology.Derive(spec)
	if err != nil {
		return broker.Declaration{}, fmt.Errorf("topology %q: %w", t.Name, err)
	}
	for i, h := range t.HoldQueues {
		if h.Queue != "" && h.Queue != topo.Holds[i].Queue {
			return broker.Declaration{}, fmt.Errorf("topology %q: holdQueues[%d].queue: %q is not the name of this tier, which is %q", t.Name, i, h.Queue, topo.Holds[i].Queue)
		}
	}
	d := broker.Declaration{Topology: topo, Options: t.Options}
	for i, h := range t.RetiredHoldQueues {
		switch {
		case h.Queue == "" || h.Delay <= 0:
			return broker.Declaration{}, fmt.Errorf("topology %q: retiredHoldQueues[%d]: needs a queue and a delay above zero", t.Name, i)
		case slices.ContainsFunc(topo.Holds, func(t topology.Hold) bool { return t.Queue == h.Queue }):
			continue // it is back
		}
		d.Retired = append(d.Retired, topology.Queue{Name: h.Queue, Role: topology.RoleRetired, Delay: time.Duration(h.Delay)})
	}
	return d, nil
}

// FromDeclaration is the entry for a derived topology.
func FromDeclaration(name, namespace, brokerName string, d broker.Declaration) Topology {
	t := Topology{Name: name, Namespace: namespace, Broker: brokerName, Queue: d.Topology.Queue,
		DeadLetter: d.Topology.DeadLetter, External: d.Topology.External, Options: d.Options}
	if d.Topology.Source != d.Topology.Queue {
		t.Source = d.Topology.Source
	}
	for _, h := range d.Topology.Holds {
		t.HoldQueues = append(t.HoldQueues, Hold{Queue: h.Queue, Delay: Duration(h.Delay)})
	}
	for _, q := range d.Retired {
		t.RetiredHoldQueues = append(t.RetiredHoldQueues, Hold{Queue: q.Name, Delay: Duration(q.Delay)})
	}
	if s := d.Topology.Sequenced; s != nil {
		t.Sequenced = &Sequenced{OnFailure: s.OnFailure, OnDefer: s.OnDefer, Shards: len(s.Shards), Key: s.Key, MaxPendingPerKey: s.MaxPendingPerKey,
			AllowMessageLoss: d.Topology.DeadLetter == "" || len(d.Topology.Holds) == 0}
	}
	return t
}

// Duration is a time.Duration that is text like "30s" in the file.
type Duration time.Duration

// MarshalJSON writes the text form.
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(d).String()) }

// UnmarshalJSON reads the text form of time.ParseDuration.
func (d *Duration) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return fmt.Errorf("a duration is text like \"30s\", not %s", b)
	}
	v, err := time.ParseDuration(s)
	if err != nil {
		return fmt.Errorf("%q is not a duration: write it like \"30s\" or \"1m30s\"", s)
	}
	*d = Duration(v)
	return nil
}
