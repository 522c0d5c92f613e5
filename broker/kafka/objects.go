package kafka

import (
	"fmt"
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
	// holds are the hold topics in the order of the tiers, retired ones at the end; none where nothing is held.
	holds []holdTopic
	tiers int // how many of holds are not retired
	dead  string
	// group reads source and holds, deadGroup the dead letters.
	group, deadGroup string
}

type holdTopic struct {
	name  string
	delay time.Duration
}

func newPlan(d broker.Declaration) (plan, error) {
	o, err := parseOptions(d.Options)
	if err != nil {
		return plan{}, fmt.Errorf("%w: %w", err, broker.ErrUnsupported)
	}
	t := d.Topology
	p := plan{topology: t, options: o, source: physical(t, t.Source), main: physical(t, t.Queue), group: o.GroupID}
	if p.group == "" {
		p.group = physical(t, t.Queue)
	}
	if t.DeadLetter != "" {
		p.dead = physical(t, t.DeadLetter)
		p.deadGroup = p.dead
	}
	if !t.External && t.Sequenced == nil {
		for _, h := range t.Holds {
			p.holds = append(p.holds, holdTopic{physical(t, h.Queue), h.Delay})
		}
		p.tiers = len(p.holds)
		for _, q := range d.Retired {
			p.holds = append(p.holds, holdTopic{physical(t, q.Name), q.Delay})
		}
	}
	return p, nil
}

func physical(t topology.Topology, name string) string { return t.Physical(topology.Kafka, name) }

func objects(d broker.Declaration) ([]broker.Object, error) {
	if _, err := newPlan(d); err != nil {
		return nil, err
	}
	return nil, nil
}
