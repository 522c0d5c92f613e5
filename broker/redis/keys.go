package redis

import (
	"fmt"
	"strings"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// Keys beside those that topology.Physical names. They share the topology's hash tag, and hold a '#', which no logical
// name has:
//
//	{orders}#queues              hash: which hold queues are declared, and which topologies read another one's stream
//	{orders}#consumers:orders    hash: who reads a stream in a group, with its deadline and when it was last seen
const (
	queuesSuffix    = "#queues"
	consumersSuffix = "#consumers:"
)

// returned is the name of a group's consumer whose pending entries nobody works on: those that were given back, and
// those whose owner is gone. Any consumer takes them before it reads on, because a pending entry is never read again
// by XREADGROUP >.
const returned = "shove:returned"

// Values in the registry of declared queues.
const (
	isHold   = "hold"
	isReader = "reader"
)

// plan is what a declaration leads to.
type plan struct {
	topology topology.Topology
	// verify is a stream that somebody else owns and that must exist; empty: none.
	verify   string
	streams  []stream // that are ours: to be created, with their group
	holds    []hold
	registry string
}

// stream is a stream and the group that reads it.
type stream struct {
	key   string
	role  topology.Role
	group string
}

type hold struct {
	key   string
	delay string // as the registry says it
	queue topology.Queue
}

func physical(t topology.Topology, name string) string { return t.Physical(topology.Redis, name) }

func newPlan(d broker.Declaration) (plan, error) {
	if err := checkOptions(d.Options); err != nil {
		return plan{}, fmt.Errorf("%w: %w", err, broker.ErrUnsupported)
	}
	t := d.Topology
	if t.Sequenced != nil {
		return plan{}, fmt.Errorf("sequenced topologies on Redis: %w yet", broker.ErrUnsupported)
	}
	main := physical(t, t.Queue)
	p := plan{topology: t, registry: tagOf(main) + queuesSuffix}
	switch {
	case t.Source != t.Queue:
		p.verify = physical(t, t.Source)
	case t.External:
		p.verify = main
	}
	for _, q := range t.Queues() {
		key := physical(t, q.Name)
		switch {
		case q.Role == topology.RoleDeadLetter, q.Role == topology.RoleMain && !t.External:
			p.streams = append(p.streams, stream{key: key, role: q.Role, group: q.Name})
		case q.Role == topology.RoleHold && !t.External:
			p.holds = append(p.holds, hold{key: key, delay: fmt.Sprintf("%s %d", isHold, q.Delay.Milliseconds()), queue: q})
		}
	}
	return p, nil
}

// fanOut says whether the topology reads a stream that another topology owns. Its own stream then takes what comes
// back from its hold queues, so that no other reader of the source sees a retry.
func (p *plan) fanOut() bool { return p.topology.Source != p.topology.Queue }

// objects lists what a declaration leads to, in the order of declaring.
func objects(d broker.Declaration) ([]broker.Object, error) {
	p, err := newPlan(d)
	if err != nil {
		return nil, err
	}
	var out []broker.Object
	if p.verify != "" {
		out = append(out, p.verifyObject())
	}
	for _, s := range p.streams {
		out = append(out, s.object())
	}
	for _, h := range p.holds {
		out = append(out, h.object())
	}
	return out, nil
}

func (p *plan) verifyObject() broker.Object {
	return broker.Object{Kind: "stream", Name: p.verify, Role: topology.RoleMain, Properties: map[string]any{"group": p.topology.Queue}}
}

func (s stream) object() broker.Object {
	return broker.Object{Kind: "stream", Name: s.key, Role: s.role, Properties: map[string]any{"group": s.group}}
}

func (h hold) object() broker.Object {
	return broker.Object{Kind: "sorted set", Name: h.key, Role: topology.RoleHold, Properties: map[string]any{"delay": h.queue.Delay.String()}}
}

// tagOf is a key's hash tag, braces included; of a key without one the key in braces, which has the same slot.
func tagOf(key string) string {
	if strings.HasPrefix(key, "{") {
		if i := strings.IndexByte(key, '}'); i > 1 {
			return key[:i+1]
		}
	}
	return "{" + key + "}"
}

// queueOf is the logical name of a physical one, which is also the name of the group that reads a stream.
func queueOf(key string) string {
	tag := tagOf(key)
	rest, ok := strings.CutPrefix(key, tag)
	if !ok { // a key without a tag
		return key
	}
	if name, ok := strings.CutPrefix(rest, ":"); ok {
		return name
	}
	return tag[1:len(tag)-1] + rest
}

// untagged is the key that somebody else's stream has, whose name is in braces for us. It has the same slot. Empty:
// the key is not only a tag.
func untagged(key string) string {
	if tag := tagOf(key); tag == key {
		return key[1 : len(key)-1]
	}
	return ""
}

func consumersKey(stream, group string) string { return tagOf(stream) + consumersSuffix + group }
