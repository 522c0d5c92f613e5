package memory

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// topologyOptions is the driver's section of a Topology's spec.
type topologyOptions struct {
	// MaxLength bounds the messages of the main queue, delivered ones included; a further one is refused. Zero: no
	// bound. It is fixed when the queue is made.
	MaxLength int `json:"maxLength"`
}

// part is one queue that a declaration leads to.
type part struct {
	name    string
	foreign bool // somebody else's: it has to exist, whatever it is like
	props   properties
}

// parts lists the queues of a declaration, targets before hold queues. An ordered topology is one queue here: the
// order is kept by the queue and the consumer's key lanes, and a failed message waits in its place.
func parts(d broker.Declaration) ([]part, error) {
	t := d.Topology
	var opts topologyOptions
	if len(d.Options) > 0 {
		if err := json.Unmarshal(d.Options, &opts); err != nil {
			return nil, &topology.FieldError{Field: "memory", Problem: err.Error()}
		}
	}
	if opts.MaxLength < 0 {
		return nil, &topology.FieldError{Field: "memory.maxLength", Problem: fmt.Sprintf("%d: use 0 (no bound) or more", opts.MaxLength)}
	}
	if t.Source != t.Queue && !t.External {
		return nil, fmt.Errorf("source %q: reading another queue than one's own needs a log: %w", t.Source, broker.ErrUnsupported)
	}
	var ps []part
	if t.DeadLetter != "" {
		ps = append(ps, part{name: t.DeadLetter, props: properties{role: topology.RoleDeadLetter}})
	}
	if t.External {
		return append(ps, part{name: t.Source, foreign: true, props: properties{role: topology.RoleMain}}), nil
	}
	ps = append(ps, part{name: t.Queue, props: properties{role: topology.RoleMain, sequenced: t.Sequenced != nil, maxLength: opts.MaxLength}})
	if t.Sequenced == nil {
		for _, h := range t.Holds {
			ps = append(ps, part{name: h.Queue, props: properties{role: topology.RoleHold, delay: h.Delay, target: t.Queue}})
		}
	}
	return ps, nil
}

func (p part) object() broker.Object {
	o := broker.Object{Kind: "queue", Name: p.name, Role: p.props.role, Properties: map[string]any{}}
	if p.foreign {
		return o
	}
	if p.props.role == topology.RoleHold {
		o.Properties["delay"], o.Properties["target"] = p.props.delay.String(), p.props.target
	}
	if p.props.sequenced {
		o.Properties["sequenced"] = true
	}
	if p.props.maxLength > 0 {
		o.Properties["maxLength"] = p.props.maxLength
	}
	return o
}

// Objects lists the queues of a declaration (broker.Driver).
func Objects(d broker.Declaration) ([]broker.Object, error) {
	ps, err := parts(d)
	if err != nil {
		return nil, err
	}
	objects := make([]broker.Object, len(ps))
	for i, p := range ps {
		objects[i] = p.object()
	}
	return objects, nil
}

func (s *Server) capabilities(json.RawMessage) broker.Capabilities {
	return broker.Capabilities{
		HeldInBroker:       true,
		CountsDeliveries:   true,
		CrashLimitDefault:  true,
		BrokerTimestamp:    true,
		Sequenced:          true,
		GivesBackUncounted: true,
		MaxHeaderBytes:     s.opts.MaxHeaderBytes,
		HoldLateness:       holdLateness,
	}
}

// holdLateness is what a timer of a busy process stays within.
const holdLateness = 50 * time.Millisecond
