package nats

import (
	"fmt"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// duplicateWindow is how long a stream remembers message ids (T).
const duplicateWindow = 2 * time.Minute

// parkedConsumer is the durable that reads parked messages, on servers without scheduled messages.
const parkedConsumer = "shove-parked"

// stream is a stream as it is to be declared.
type stream struct {
	name     string
	role     topology.Role
	subjects []string
	options  options
	// holds says that the stream keeps scheduled messages.
	holds bool
	// source is the stream of somebody else that the topology reads as well; empty: none.
	source string
}

// consumer is a durable pull consumer as it is to be declared.
type consumer struct {
	stream, name string
	role         topology.Role
	filter       string // empty: everything in the stream
	ackWait      time.Duration
	// foreign says that somebody else declared the stream. A durable that exists there is adopted as far as possible.
	foreign bool
}

// sourceKey is where a stream's metadata name its source, so that the durable there can be deleted with the stream.
const sourceKey = "shove-source"

// plan is what a declaration leads to.
type plan struct {
	topology  topology.Topology
	options   options
	verify    string // a stream of somebody else, which must exist; empty: none
	streams   []stream
	consumers []consumer
	holds     []hold
}

// hold is where the messages of one tier wait: subjects in the main queue's stream.
type hold struct {
	name  string // the physical name of the hold queue
	delay time.Duration
}

// A hold queue's subjects. The last token is the message's own, because a subject keeps one scheduled message.
func holdFilter(name string) string { return name + ".>" }
func scheduled(name string) string  { return name + ".at." }
func parked(name string) string     { return name + ".parked." }

func physical(t topology.Topology, name string) string { return t.Physical(topology.NATS, name) }

func newPlan(d broker.Declaration) (plan, error) {
	o, err := parseOptions(d.Options)
	if err != nil {
		return plan{}, fmt.Errorf("%w: %w", err, broker.ErrUnsupported)
	}
	t := d.Topology
	if t.Sequenced != nil {
		return plan{}, fmt.Errorf("sequenced topologies on NATS: %w yet", broker.ErrUnsupported)
	}
	p := plan{topology: t, options: o}
	if t.DeadLetter != "" {
		name := physical(t, t.DeadLetter)
		p.streams = append(p.streams, stream{name: name, role: topology.RoleDeadLetter, subjects: []string{name}, options: o})
		p.consumers = append(p.consumers, consumer{stream: name, name: name, role: topology.RoleDeadLetter, filter: name, ackWait: o.ackWait})
	}
	main := physical(t, t.Queue)
	if t.External || t.Source != t.Queue {
		p.verify = physical(t, t.Source)
		p.consumers = append(p.consumers, consumer{stream: p.verify, name: main, role: topology.RoleMain, ackWait: o.ackWait, foreign: true})
	}
	if t.External {
		return p, nil
	}
	s := stream{name: main, role: topology.RoleMain, subjects: []string{main}, options: o, holds: true, source: p.verify}
	for _, h := range t.Holds {
		name := physical(t, h.Queue)
		p.holds = append(p.holds, hold{name: name, delay: h.Delay})
		s.subjects = append(s.subjects, holdFilter(name))
	}
	p.streams = append(p.streams, s)
	p.consumers = append(p.consumers, consumer{stream: main, name: main, role: topology.RoleMain, filter: main, ackWait: o.ackWait})
	return p, nil
}

// fixed are the properties of a stream that cannot change, or not without touching messages.
func (s stream) fixed() map[string]any {
	out := map[string]any{"retention": "workqueue", "discard": "old"}
	if s.options.storage != "" {
		out["storage"] = s.options.storage
	}
	return out
}

// mutable are those that Declare mends.
func (s stream) mutable(schedules bool) map[string]any {
	out := map[string]any{"duplicate_window": int64(duplicateWindow)}
	if s.options.replicas > 0 {
		out["num_replicas"] = s.options.replicas
	}
	if s.holds && schedules {
		out["allow_msg_schedules"] = true
	}
	return out
}

// create is a stream's configuration where there is none yet.
func (s stream) create(schedules bool) map[string]any {
	out := map[string]any{
		"name": s.name, "subjects": s.subjects, "storage": storageFile, "num_replicas": 1, "allow_direct": true,
		"max_consumers": -1, "max_msgs": -1, "max_bytes": -1, "max_msgs_per_subject": -1, "max_msg_size": -1, "max_age": 0,
	}
	if s.source != "" {
		out["metadata"] = map[string]string{sourceKey: s.source}
	}
	for k, v := range s.fixed() {
		out[k] = v
	}
	for k, v := range s.mutable(schedules) {
		out[k] = v
	}
	return out
}

// fixed are the properties of a consumer that cannot change.
func (c consumer) fixed() map[string]any {
	out := map[string]any{"ack_policy": "explicit", "deliver_subject": ""}
	if !c.foreign {
		out["deliver_policy"] = "all"
	}
	return out
}

// mutable are those that Declare mends. There is no limit of deliveries: what bounds a message is the consumer's crash
// limit (C10). There is none of unacknowledged ones either, because messages that wait count as such.
func (c consumer) mutable() map[string]any {
	out := map[string]any{"ack_wait": int64(c.ackWait), "max_deliver": -1, "max_ack_pending": -1}
	if c.filter != "" {
		out["filter_subject"] = c.filter
	}
	return out
}

func (c consumer) create() (settings, error) {
	cfg, err := settings(nil).with(map[string]any{"durable_name": c.name, "name": c.name, "deliver_policy": "all", "replay_policy": "instant"})
	if err != nil {
		return nil, err
	}
	if cfg, err = cfg.with(c.mutable()); err != nil {
		return nil, err
	}
	return cfg.with(map[string]any{"ack_policy": "explicit"})
}

// objects lists what a declaration leads to, in the order of declaring.
func objects(d broker.Declaration) ([]broker.Object, error) {
	p, err := newPlan(d)
	if err != nil {
		return nil, err
	}
	return p.objects(), nil
}

func (p plan) objects() []broker.Object {
	var out []broker.Object
	if p.verify != "" {
		out = append(out, broker.Object{Kind: "stream", Name: p.verify, Role: p.verifyRole()})
	}
	for _, s := range p.streams {
		out = append(out, s.object())
	}
	for _, c := range p.consumers {
		out = append(out, c.object())
	}
	for _, h := range p.holds {
		out = append(out, p.holdObject(h, topology.RoleHold))
	}
	return out
}

// verifyRole is the role of somebody else's stream: it is the main queue of an external topology, and no queue of one
// that has a stream of its own.
func (p plan) verifyRole() topology.Role {
	if p.topology.External {
		return topology.RoleMain
	}
	return ""
}

func (s stream) object() broker.Object {
	return broker.Object{Kind: "stream", Name: s.name, Role: s.role, Properties: s.create(true)}
}

func (c consumer) object() broker.Object {
	props := c.fixed()
	delete(props, "deliver_subject")
	for k, v := range c.mutable() {
		props[k] = v
	}
	return broker.Object{Kind: "consumer", Name: c.stream + " > " + c.name, Properties: props}
}

func (p plan) holdObject(h hold, role topology.Role) broker.Object {
	return broker.Object{Kind: "subject", Name: h.name, Role: role, Properties: map[string]any{
		"subject": holdFilter(h.name), "stream": physical(p.topology, p.topology.Queue),
	}}
}

// parking is the consumer of parked messages.
func (p plan) parking() (settings, error) {
	filters := make([]string, len(p.holds))
	for i, h := range p.holds {
		filters[i] = parked(h.name) + "*"
	}
	return settings(nil).with(map[string]any{
		"durable_name": parkedConsumer, "name": parkedConsumer, "deliver_policy": "all", "replay_policy": "instant",
		"ack_policy": "explicit", "ack_wait": int64(p.options.ackWait), "max_deliver": -1, "max_ack_pending": -1,
		"filter_subjects": filters,
	})
}
