package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// Change is one difference between two configurations.
type Change struct {
	// Field is where it is: consumers[orders].options.prefetch.
	Field string
	// Old and New are its values, where they are short and no secret; else empty.
	Old, New string
}

func (c Change) String() string {
	if c.Old == "" && c.New == "" {
		return c.Field
	}
	return fmt.Sprintf("%s: %s -> %s", c.Field, c.Old, c.New)
}

// Diff lists what differs, in a fixed order, and tells what a running process can take into use (live) from what
// needs another one (restart): exactlyOnce, retryStrategy, a broker's kind, whether a topology is external or
// sequenced, a group's name, and a consumer that is new or gone. Live is what leads to KeepFixed, restart what is left then.
func Diff(current, next *RuntimeConfig) (live, restart []Change) {
	between := KeepFixed(current, next)
	return changes(current, between), changes(between, next)
}

// KeepFixed returns next with everything that cannot change live as it is in current: the two differ in exactly the
// restart part of Diff until the process restarts. A consumer that left next stays, paused, so that it fetches
// nothing more; one that is new is left out. Neither argument is changed.
func KeepFixed(current, next *RuntimeConfig) *RuntimeConfig {
	m := *next
	m.Brokers, m.Topologies = slices.Clone(next.Brokers), slices.Clone(next.Topologies)
	for i, b := range m.Brokers {
		if old, ok := current.Broker(b.Name); ok {
			defaults := keepDefaults(next, b.Name, old.ConsumerDefaults, b.ConsumerDefaults)
			if old.Kind != b.Kind { // the rest of the entry belongs to the kind
				b = old
			}
			b.ConsumerDefaults = defaults
			m.Brokers[i] = b
		}
	}
	for i, t := range m.Topologies {
		if old, ok := current.Topology(t.Name); ok && fixedTopology(current, next, old, t) {
			m.Topologies[i] = old
			m.needBroker(current, old.Broker)
		}
	}
	m.Consumers = nil
	for _, old := range current.Consumers {
		k, ok := next.consumer(old.Topology)
		if !ok {
			k = old
			k.Paused = true
			if _, ok := m.Topology(k.Topology); !ok {
				t, _ := current.Topology(k.Topology)
				m.Topologies = append(m.Topologies, t)
				m.needBroker(current, t.Broker)
			}
		}
		k.Group, k.Options = old.Group, keepOptions(old.Options, k.Options)
		m.Consumers = append(m.Consumers, k)
	}
	return &m
}

func (c *RuntimeConfig) needBroker(from *RuntimeConfig, name string) {
	if _, ok := c.Broker(name); ok {
		return
	}
	if b, ok := from.Broker(name); ok {
		c.Brokers = append(c.Brokers, b)
	}
}

func (c *RuntimeConfig) consumer(topology string) (Consumer, bool) {
	i := slices.IndexFunc(c.Consumers, func(k Consumer) bool { return k.Topology == topology })
	if i < 0 {
		return Consumer{}, false
	}
	return c.Consumers[i], true
}

func keepOptions(old, next Options) Options {
	next.ExactlyOnce, next.RetryStrategy = old.ExactlyOnce, old.RetryStrategy
	return next
}

// keepDefaults is keepOptions for a broker's defaults: one that reaches no consumer, because each has its own, may
// change.
func keepDefaults(c *RuntimeConfig, broker string, old, next Options) Options {
	for _, k := range c.Consumers {
		t, ok := c.Topology(k.Topology)
		if !ok || t.Broker != broker {
			continue
		}
		if k.Options.ExactlyOnce == nil {
			next.ExactlyOnce = old.ExactlyOnce
		}
		if k.Options.RetryStrategy == nil {
			next.RetryStrategy = old.RetryStrategy
		}
	}
	return next
}

// fixedTopology says whether a topology cannot become its new form in a running process.
func fixedTopology(current, next *RuntimeConfig, old, t Topology) bool {
	return old.External != t.External || (old.Sequenced == nil) != (t.Sequenced == nil) || !reflect.DeepEqual(old.Sequenced, t.Sequenced) ||
		current.kindOf(old) != next.kindOf(t)
}

func (c *RuntimeConfig) kindOf(t Topology) string {
	b, _ := c.Broker(t.Broker)
	return string(b.Kind)
}

// changes lists every difference, in a fixed order.
func changes(current, next *RuntimeConfig) []Change {
	var all []Change
	all = append(all, entries("brokers", current.Brokers, next.Brokers, func(b Broker) string { return b.Name })...)
	all = append(all, entries("topologies", current.Topologies, next.Topologies, func(t Topology) string { return t.Name })...)
	all = append(all, entries("consumers", current.Consumers, next.Consumers, func(k Consumer) string { return k.Topology })...)
	return append(all, entries("publish", current.Publish, next.Publish, func(p Publish) string { return p.Topology })...)
}

// entries compares two lists entry by entry and field by field; an entry is known by its name.
func entries[T any](list string, old, next []T, name func(T) string) []Change {
	a, b := byName(old, name), byName(next, name)
	var all []Change
	for _, n := range both(a, b) {
		field := fmt.Sprintf("%s[%s]", list, n)
		was, had := a[n]
		is, has := b[n]
		switch {
		case !has:
			all = append(all, Change{Field: field, Old: "present", New: "absent"})
		case !had:
			all = append(all, Change{Field: field, Old: "absent", New: "present"})
		default:
			all = append(all, fields(field, object(was), object(is), false)...)
		}
	}
	return all
}

// fields compares the fields of two objects. Options are compared one by one and shown with their values; of anything
// else only the name is shown, because an endpoint may hold what is nobody's business.
func fields(prefix string, old, next map[string]json.RawMessage, show bool) []Change {
	var all []Change
	for _, name := range both(old, next) {
		was, is := old[name], next[name]
		if bytes.Equal(was, is) {
			continue
		}
		field := prefix + "." + name
		switch {
		case !show && (name == "options" && strings.HasPrefix(prefix, "consumers[") || name == "consumerDefaults"):
			all = append(all, fields(field, object(was), object(is), true)...)
		case show || name == "paused" || name == "kind" || name == "group":
			all = append(all, Change{Field: field, Old: shown(was), New: shown(is)})
		default:
			all = append(all, Change{Field: field})
		}
	}
	return all
}

// shown is a value for people.
func shown(v json.RawMessage) string {
	if v == nil {
		return "unset"
	}
	return string(v)
}

// object is the JSON fields of a value, none for a value that is absent. Everything in a configuration has a JSON form
// but an endpoint or option section that is not JSON; that compares as one unnamed field.
func object(v any) map[string]json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		return map[string]json.RawMessage{"": fmt.Appendf(nil, "%+v", v)}
	}
	var all map[string]json.RawMessage
	_ = json.Unmarshal(b, &all) // it was just made; null is no field
	return all
}

func byName[T any](list []T, name func(T) string) map[string]T {
	m := make(map[string]T, len(list))
	for _, v := range list {
		m[name(v)] = v
	}
	return m
}

// both lists the keys of two maps, each once, in order.
func both[V any](a, b map[string]V) []string {
	all := make(map[string]struct{}, len(a)+len(b))
	for _, m := range []map[string]V{a, b} {
		for k := range m {
			all[k] = struct{}{}
		}
	}
	return slices.Sorted(maps.Keys(all))
}
