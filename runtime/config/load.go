package config

import (
	"errors"
	"fmt"
	"os"
	"slices"

	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// Features that a file may require and this runtime has.
var Features = []string{"hold-queues", "dead-letter", "defer-limit", "crash-limit", "external", "sequenced-keys"}

// Load reads and validates a file. Warnings are unknown fields; they do not refuse the file.
func Load(path string) (c *RuntimeConfig, warnings []string, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, fmt.Errorf("read configuration: %w", err)
	}
	c, warnings, err = Parse(b)
	if err != nil {
		return nil, nil, fmt.Errorf("configuration %q: %w", path, err)
	}
	return c, warnings, nil
}

// Parse reads YAML or JSON and validates it.
func Parse(b []byte) (c *RuntimeConfig, warnings []string, err error) {
	j, err := yaml.YAMLToJSON(b)
	if err != nil {
		return nil, nil, fmt.Errorf("not YAML: %w", err)
	}
	c = &RuntimeConfig{}
	strict, err := kjson.UnmarshalStrict(j, c)
	if err != nil {
		return nil, nil, err
	}
	for _, w := range strict {
		warnings = append(warnings, w.Error())
	}
	if err := c.Validate(); err != nil {
		return nil, nil, err
	}
	return c, warnings, nil
}

// Marshal writes the file's YAML.
func Marshal(c *RuntimeConfig) ([]byte, error) { return yaml.Marshal(c) }

// Validate checks identity, required features, references and every topology's and consumer's values. The error
// joins all problems.
func (c *RuntimeConfig) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.APIVersion != APIVersion || c.Kind != Kind {
		return fmt.Errorf("apiVersion %q, kind %q: want %s, %s", c.APIVersion, c.Kind, APIVersion, Kind)
	}
	for _, f := range c.Requires {
		if !slices.Contains(Features, f) {
			bad("requires: this runtime does not know %q: use a newer one", f)
		}
	}
	brokers := map[string]bool{}
	for i, b := range c.Brokers {
		if b.Name == "" || b.Kind == "" {
			bad("brokers[%d]: name and kind are needed", i)
		}
		if brokers[b.Name] {
			bad("brokers[%d].name: %q is there twice", i, b.Name)
		}
		brokers[b.Name] = true
	}
	topologies := map[string]Topology{}
	for i, t := range c.Topologies {
		if _, dup := topologies[t.Name]; dup || t.Name == "" {
			bad("topologies[%d].name: %q is empty or there twice", i, t.Name)
		}
		topologies[t.Name] = t
		if !brokers[t.Broker] {
			bad("topologies[%d].broker: no broker is called %q", i, t.Broker)
		}
		if _, err := t.Declaration(); err != nil {
			errs = append(errs, err)
		}
	}
	groups := map[string]bool{}
	for i, k := range c.Consumers {
		t, ok := topologies[k.Topology]
		if !ok {
			bad("consumers[%d].topology: no topology is called %q", i, k.Topology)
		}
		if groups[k.Topology] {
			bad("consumers[%d].topology: %q has two consumers in this workload", i, k.Topology)
		}
		groups[k.Topology] = true
		if _, err := Resolve(Traits{External: t.External}, Layer{LayerConsumerGroup, k.Options}, Layer{LayerBroker, c.brokerDefaults(t.Broker)}); err != nil {
			bad("consumers[%d] (%s): %w", i, k.Group, err)
		}
	}
	errs = append(errs, c.validatePublish(topologies)...)
	return errors.Join(errs...)
}

func (c *RuntimeConfig) validatePublish(topologies map[string]Topology) (errs []error) {
	for i, p := range c.Publish {
		if _, ok := topologies[p.Topology]; !ok {
			errs = append(errs, fmt.Errorf("publish[%d].topology: no topology is called %q", i, p.Topology))
		}
		if p.MaxMessageSize < 0 {
			errs = append(errs, fmt.Errorf("publish[%d].maxMessageSize: %d: use 0 (the default) or more", i, p.MaxMessageSize))
		}
	}
	return errs
}

func (c *RuntimeConfig) brokerDefaults(name string) Options {
	for _, b := range c.Brokers {
		if b.Name == name {
			return b.ConsumerDefaults
		}
	}
	return Options{}
}

// Broker finds a broker by name.
func (c *RuntimeConfig) Broker(name string) (Broker, bool) {
	i := slices.IndexFunc(c.Brokers, func(b Broker) bool { return b.Name == name })
	if i < 0 {
		return Broker{}, false
	}
	return c.Brokers[i], true
}

// Topology finds a topology by name.
func (c *RuntimeConfig) Topology(name string) (Topology, bool) {
	i := slices.IndexFunc(c.Topologies, func(t Topology) bool { return t.Name == name })
	if i < 0 {
		return Topology{}, false
	}
	return c.Topologies[i], true
}
