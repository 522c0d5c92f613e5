package kafka

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

const roleDead = topology.RoleDeadLetter

// describeBatch bounds the topics whose settings are read in one request.
const describeBatch = 500

// topicState is a topic as it is.
type topicState struct {
	missing     bool
	err         error // why nothing is known of it, such as a right that is missing
	partitions  int32
	replication int
	led         bool // every partition has a leader
	// config are the settings that were asked for; known only where known is set, else configErr says why not.
	config    map[string]string
	known     bool
	configErr error
}

// names are all topics that a plan is about.
func (p *plan) names() []string {
	var out []string
	if p.verify != "" {
		out = append(out, p.verify)
	}
	for _, t := range p.topics {
		out = append(out, t.name)
	}
	return append(out, p.retired...)
}

// dangerous are settings that endanger messages, whoever made them.
var dangerous = []string{configCleanup, configUnclean}

// keys are the settings that a plan compares.
func (p *plan) keys() []string {
	out := slices.Clone(dangerous)
	for _, t := range p.topics {
		for _, s := range t.settings {
			if s.demand != onCreation {
				out = append(out, s.key)
			}
		}
	}
	return out
}

// Observe compares declarations with the cluster: one request for all topics, and one for the settings of each 500.
func (a *admin) Observe(ctx context.Context, ds []broker.Declaration) ([]broker.Observation, error) {
	plans := make([]plan, len(ds))
	var names, keys []string
	for i, d := range ds {
		p, err := newPlan(d)
		if err != nil {
			return nil, fmt.Errorf("observe %q: %w", d.Topology.Queue, err)
		}
		a.learn(p)
		plans[i], names, keys = p, append(names, p.names()...), append(keys, p.keys()...)
	}
	seen, err := a.look(ctx, names, keys)
	if err != nil {
		return nil, err
	}
	out := make([]broker.Observation, len(ds))
	for i, p := range plans {
		out[i] = p.compare(seen)
	}
	return out, nil
}

// look reads topics and their settings.
func (a *admin) look(ctx context.Context, names, keys []string) (map[string]topicState, error) {
	slices.Sort(names)
	names = slices.Compact(names)
	out := make(map[string]topicState, len(names))
	if len(names) == 0 {
		return out, nil
	}
	all, err := a.topics(ctx, names)
	if err != nil {
		return nil, fmt.Errorf("read topics: %w", mapError(err))
	}
	var there []string
	for _, name := range names {
		t, ok := all[name]
		switch err := kerr.ErrorForCode(t.ErrorCode); {
		case !ok || errors.Is(err, kerr.UnknownTopicOrPartition):
			out[name] = topicState{missing: true}
		case err != nil:
			out[name] = topicState{err: right{"Describe", "topic", name}.on(err)}
		default:
			s := topicState{partitions: int32(len(t.Partitions)), led: len(t.Partitions) > 0} //nolint:gosec // a broker's own number
			for _, p := range t.Partitions {
				s.replication = len(p.Replicas)
				s.led = s.led && p.ErrorCode == 0 && p.Leader >= 0
			}
			out[name], there = s, append(there, name)
		}
	}
	slices.Sort(keys)
	keys = slices.Compact(keys)
	for batch := range slices.Chunk(there, describeBatch) {
		if err := a.describe(ctx, batch, keys, out); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// topics asks for topics by name. One that does not exist is not made.
func (a *admin) topics(ctx context.Context, names []string) (map[string]kmsg.MetadataResponseTopic, error) {
	req := kmsg.NewPtrMetadataRequest()
	for _, name := range names {
		t := kmsg.NewMetadataRequestTopic()
		t.Topic = &name
		req.Topics = append(req.Topics, t)
	}
	resp, err := req.RequestWith(ctx, a.client)
	if err != nil {
		return nil, err
	}
	out := make(map[string]kmsg.MetadataResponseTopic, len(resp.Topics))
	for _, t := range resp.Topics {
		if t.Topic != nil {
			out[*t.Topic] = t
		}
	}
	return out, nil
}

// describe reads settings of topics that exist.
func (a *admin) describe(ctx context.Context, names, keys []string, into map[string]topicState) error {
	req := kmsg.NewPtrDescribeConfigsRequest()
	for _, name := range names {
		r := kmsg.NewDescribeConfigsRequestResource()
		r.ResourceType, r.ResourceName, r.ConfigNames = kmsg.ConfigResourceTypeTopic, name, keys
		req.Resources = append(req.Resources, r)
	}
	for _, shard := range a.client.RequestSharded(ctx, req) {
		if shard.Err != nil {
			return fmt.Errorf("read settings of topics: %w", mapError(shard.Err))
		}
		resp, ok := shard.Resp.(*kmsg.DescribeConfigsResponse)
		if !ok {
			return fmt.Errorf("read settings of topics: %w: an answer to something else", broker.ErrUnavailable)
		}
		for _, r := range resp.Resources {
			s := into[r.ResourceName]
			switch err := answer(r.ErrorCode, r.ErrorMessage); {
			case errors.Is(err, kerr.UnknownTopicOrPartition): // deleted in between
				s = topicState{missing: true}
			case err != nil:
				s.configErr = right{"DescribeConfigs", "topic", r.ResourceName}.on(err)
			default:
				s.known, s.config = true, map[string]string{}
				for _, c := range r.Configs {
					if c.Value != nil {
						s.config[c.Name] = *c.Value
					}
				}
			}
			into[r.ResourceName] = s
		}
	}
	return nil
}

// compare is what was seen of one declaration.
func (p *plan) compare(seen map[string]topicState) broker.Observation {
	o := broker.Observation{DriftKnown: true}
	unreadable := func(err error) {
		o.DriftKnown = false
		o.Warnings = append(o.Warnings, err.Error())
	}
	if p.verify != "" {
		have := seen[p.verify]
		o.Objects = append(o.Objects, broker.ObservedObject{Object: p.verified(), Missing: have.missing || have.err != nil})
		if have.err != nil {
			unreadable(have.err)
		}
	}
	for _, t := range p.topics {
		have := seen[t.name]
		o.Objects = append(o.Objects, broker.ObservedObject{Object: t.object(), Missing: have.missing || have.err != nil, Diffs: t.diff(have)})
		switch {
		case have.err != nil:
			// Declaring fails with this error, and so tells whom it concerns.
			unreadable(have.err)
		case have.configErr != nil:
			unreadable(fmt.Errorf("the settings of topic %q are unknown: %w", t.name, have.configErr))
		default:
			o.Warnings = append(o.Warnings, t.warnings(have)...)
		}
	}
	for _, name := range p.retired {
		if have := seen[name]; !have.missing && have.err == nil { // one that is gone is done with
			o.Objects = append(o.Objects, broker.ObservedObject{Object: broker.Object{Kind: kindTopic, Name: name, Role: topology.RoleRetired}})
		}
	}
	return o
}

// diff compares what is asked for with what is there.
func (t topicSpec) diff(have topicState) []broker.Diff {
	if have.missing || have.err != nil {
		return nil
	}
	var out []broker.Diff
	number := strconv.Itoa
	if t.grows && have.partitions != t.partitions && (t.role == topology.RoleMain || have.partitions < t.partitions) {
		d := broker.Diff{Property: "partitions", Want: number(int(t.partitions)), Have: number(int(have.partitions)), Repairable: have.partitions < t.partitions}
		if !d.Repairable {
			d.Remedy = fmt.Sprintf("a topic's partitions can only grow: write kafka.partitions: %d or more, or leave it out", have.partitions)
		}
		out = append(out, d)
	}
	if t.replication > 0 && t.role != roleDead && have.replication != int(t.replication) {
		out = append(out, broker.Diff{Property: "replication factor", Want: number(int(t.replication)), Have: number(have.replication),
			Remedy: fmt.Sprintf("move its replicas with kafka-reassign-partitions, or write kafka.replicationFactor: %d", have.replication)})
	}
	if !have.known {
		return out
	}
	for _, s := range t.settings {
		value, ok := have.config[s.key]
		if s.met(value) {
			continue
		}
		if !ok {
			value = "none"
		}
		out = append(out, broker.Diff{Property: s.key, Want: s.value, Have: value, Repairable: true})
	}
	return out
}

// warnings are settings of a topic that endanger messages and that nobody asked us to change.
func (t topicSpec) warnings(have topicState) []string {
	var out []string
	if t.role != topology.RoleHold && have.known && containsWord(have.config[configCleanup], "compact") {
		out = append(out, fmt.Sprintf("topic %q has cleanup.policy %s: of messages with one key only the last is kept, handled or not; set it to delete", t.name, have.config[configCleanup]))
	}
	if have.known && have.config[configUnclean] == "true" && have.replication > 1 {
		out = append(out, fmt.Sprintf("topic %q has unclean.leader.election.enable: a replica that lacks confirmed messages may become its leader; set it to false", t.name))
	}
	return out
}

// containsWord looks for a word in a list such as "compact,delete".
func containsWord(list, word string) bool {
	return slices.Contains(strings.Split(plainValue(list), ","), word)
}
