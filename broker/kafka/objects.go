package kafka

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// plan is what a declaration leads to. A sequenced topology has no shards of its own: the partitions of the main topic
// are its shards, and its messages wait in place.
type plan struct {
	topology topology.Topology
	options  options
	// source is the topic that is read, main the one that is published to; the same unless a source is named.
	source, main string
	// holds are the hold topics in the order of the tiers, and at the end what else is read in that way: retired ones, and
	// the main topic where another one is the source, with no delay. None where nothing is held.
	holds []holdTopic
	tiers int // how many of holds are tiers
	// retired are hold topics that left the spec.
	retired []string
	dead    string
	// group reads source and holds, deadGroup the dead letters.
	group, deadGroup string
	// verify is a topic of somebody else, which must exist; empty: none.
	verify string
	// topics are those to declare, the targets of copies first.
	topics []topicSpec
}

type holdTopic struct {
	name  string
	delay time.Duration
}

// Settings of topics (https://kafka.apache.org/documentation/#topicconfigs).
const (
	configTimestamp  = "message.timestamp.type"
	configCleanup    = "cleanup.policy"
	configRetention  = "retention.ms"
	configRetainSize = "retention.bytes"
	configUnclean    = "unclean.leader.election.enable"
	configMinISR     = "min.insync.replicas"
	configMaxMessage = "max.message.bytes"
	configCompress   = "compression.type"

	logAppendTime = "LogAppendTime"
	cleanDelete   = "delete"
	forever       = "-1"
)

// defaultPartitions of the main topic and of hold topics (T).
const defaultPartitions = 8

// defaultRetention is Kafka's own, log.retention.hours.
const defaultRetention = 7 * 24 * time.Hour

// demand says when a topic that exists differs from what a setting asks for.
type demand uint8

const (
	exactly demand = iota
	// atLeast is for numbers of which -1 is the largest.
	atLeast
	// onCreation is given to a topic that we make, and never compared.
	onCreation
)

// setting is one setting of a topic.
type setting struct {
	key, value string
	demand     demand
}

// topicSpec is a topic as it is to be declared.
type topicSpec struct {
	name        string
	role        topology.Role
	partitions  int32
	grows       bool  // one with fewer partitions gets more, one with more is a conflict
	replication int16 // 0: the cluster's default
	settings    []setting
}

func newPlan(d broker.Declaration) (plan, error) {
	o, err := parseOptions(d.Options)
	if err != nil {
		return plan{}, fmt.Errorf("%w: %w", err, broker.ErrUnsupported)
	}
	t := d.Topology
	if t.Sequenced != nil {
		return plan{}, fmt.Errorf("sequenced topologies on Kafka: %w yet", broker.ErrUnsupported)
	}
	p := plan{topology: t, options: o, source: physical(t, t.Source), main: physical(t, t.Queue), group: o.GroupID}
	if p.group == "" {
		p.group = physical(t, t.Queue)
	}
	if t.DeadLetter != "" {
		p.dead = physical(t, t.DeadLetter)
		p.deadGroup = p.dead
	}
	if !t.External {
		for _, h := range t.Holds {
			p.holds = append(p.holds, holdTopic{physical(t, h.Queue), h.Delay})
		}
		p.tiers = len(p.holds)
		for _, q := range d.Retired {
			p.retired = append(p.retired, physical(t, q.Name))
			p.holds = append(p.holds, holdTopic{physical(t, q.Name), q.Delay})
		}
		if p.source != p.main {
			// What comes back at once, or is published to this topology alone, must not be seen by others of the source.
			p.holds = append(p.holds, holdTopic{p.main, 0})
		}
	}
	if t.External && (o.Partitions != 0 || o.ReplicationFactor != 0 || len(o.Config) > 0) {
		return plan{}, &topology.FieldError{Field: "kafka.config", Problem: "an external topology declares no topic: remove partitions, replicationFactor and config"}
	}
	return p, p.addTopics()
}

func (p *plan) addTopics() error {
	if p.topology.External || p.source != p.main {
		p.verify = p.source
	}
	if p.dead != "" {
		p.topics = append(p.topics, p.deadTopic())
	}
	if p.verify == "" || slices.ContainsFunc(p.holds, func(h holdTopic) bool { return h.name == p.main }) {
		p.topics = append(p.topics, p.mainTopic())
	}
	for _, h := range p.holds[:p.tiers] {
		t, err := p.holdTopic(h)
		if err != nil {
			return err
		}
		p.topics = append(p.topics, t)
	}
	return nil
}

// partitions of the main topic and of hold topics.
func (p *plan) partitions() int32 {
	if p.options.Partitions > 0 {
		return p.options.Partitions
	}
	return defaultPartitions
}

func (p *plan) topic(name string, role topology.Role) topicSpec {
	return topicSpec{name: name, role: role, partitions: p.partitions(), grows: p.options.Partitions > 0, replication: p.options.ReplicationFactor}
}

func (p *plan) mainTopic() topicSpec {
	t := p.topic(p.main, topology.RoleMain)
	for _, k := range slices.Sorted(maps.Keys(p.options.Config)) {
		t.settings = append(t.settings, setting{k, p.options.Config[k], exactly})
	}
	if _, own := p.options.Config[configTimestamp]; !own {
		// A message's time is then the broker's, not the publisher's.
		t.settings = append(t.settings, setting{configTimestamp, logAppendTime, onCreation})
	}
	return t
}

// shared are settings of the main topic that concern the safety and size of a message, wherever it is.
func (p *plan) shared() []setting {
	var out []setting
	for _, k := range []string{configCompress, configMaxMessage, configMinISR, configUnclean} {
		if v, ok := p.options.Config[k]; ok {
			out = append(out, setting{k, v, exactly})
		}
	}
	return out
}

// holdTopic says that when a message is due is told by the broker's clock, and that no message leaves before that: not by
// age, and not by another one of the same key.
func (p *plan) holdTopic(h holdTopic) (topicSpec, error) {
	t := p.topic(h.name, topology.RoleHold)
	keep := defaultRetention
	if v, ok := p.options.Config[configRetention]; ok {
		ms, err := strconv.ParseInt(v, 10, 64)
		if err != nil || ms < -1 {
			return t, &topology.FieldError{Field: "kafka.config[retention.ms]", Problem: fmt.Sprintf("%q: use a number of milliseconds, or -1 for ever", v)}
		}
		keep = max(keep, time.Duration(min(ms, maxMillis))*time.Millisecond)
		if ms == -1 {
			keep = -1
		}
	}
	retention := forever
	if keep >= 0 {
		retention = strconv.FormatInt((keep + h.delay).Milliseconds(), 10)
	}
	t.settings = append([]setting{
		{configCleanup, cleanDelete, exactly},
		{configTimestamp, logAppendTime, exactly},
		{configRetainSize, forever, atLeast},
		{configRetention, retention, atLeast},
	}, p.shared()...)
	return t, nil
}

// maxMillis keeps sums of durations from overflowing: 100 years.
const maxMillis = 100 * 365 * 24 * 60 * 60 * 1000

// deadTopic keeps dead letters until somebody decides otherwise. It may be shared with topologies of other settings, so
// that what it is like is decided when it is made, and not compared: two of them would take turns in repairing it.
func (p *plan) deadTopic() topicSpec {
	t := topicSpec{name: p.dead, role: topology.RoleDeadLetter, partitions: 1, replication: p.options.ReplicationFactor}
	t.settings = append([]setting{
		{key: configCleanup, value: cleanDelete},
		{key: configTimestamp, value: logAppendTime},
		{key: configRetainSize, value: forever},
		{key: configRetention, value: forever},
	}, p.shared()...)
	for i := range t.settings {
		t.settings[i].demand = onCreation
	}
	return t
}

func physical(t topology.Topology, name string) string { return t.Physical(topology.Kafka, name) }

// objects lists what a declaration leads to, in the order of declaring.
func objects(d broker.Declaration) ([]broker.Object, error) {
	p, err := newPlan(d)
	if err != nil {
		return nil, err
	}
	var out []broker.Object
	if p.verify != "" {
		out = append(out, p.verified())
	}
	for _, t := range p.topics {
		out = append(out, t.object())
	}
	return out, nil
}

const kindTopic = "topic"

// verified is the topic of somebody else.
func (p *plan) verified() broker.Object {
	return broker.Object{Kind: kindTopic, Name: p.verify, Role: topology.RoleMain}
}

func (t topicSpec) object() broker.Object {
	props := map[string]any{"partitions": t.partitions}
	if t.replication > 0 {
		props["replicationFactor"] = t.replication
	}
	for _, s := range t.settings {
		props[s.key] = s.value
	}
	return broker.Object{Kind: kindTopic, Name: t.name, Role: t.role, Properties: props}
}

// met says whether a topic's value of a setting is what is asked for.
func (s setting) met(have string) bool {
	switch s.demand {
	case onCreation:
		return true
	case atLeast:
		h, err1 := strconv.ParseInt(have, 10, 64)
		w, err2 := strconv.ParseInt(s.value, 10, 64)
		return err1 == nil && err2 == nil && (h < 0 || w >= 0 && h >= w)
	default:
		return plainValue(s.value) == plainValue(have)
	}
}

// plainValue takes away what a broker may write differently: spaces in lists, and case.
func plainValue(v string) string { return strings.ToLower(strings.ReplaceAll(v, " ", "")) }
