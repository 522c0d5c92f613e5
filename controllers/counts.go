package controllers

import (
	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// counts are the sums of a Topology's messages.
type counts struct {
	ready, inFlight, held, dead broker.Count
	// stuck says that expired messages cannot leave a hold queue.
	stuck bool
}

// countsOf sums what was counted. A sum with an unknown part is unknown.
func countsOf(queues []trackedQueue, depths map[string]broker.Depth) counts {
	c := counts{ready: broker.Known(0), inFlight: broker.Known(0), held: broker.Known(0), dead: broker.Known(0)}
	for _, q := range queues {
		d := depths[q.name]
		c.stuck = c.stuck || d.Stuck.Known && d.Stuck.N > 0
		switch q.role {
		case topology.RoleMain, topology.RoleShard:
			c.ready = plus(c.ready, d.Ready)
			c.inFlight = plus(c.inFlight, d.InFlight)
		case topology.RoleHold, topology.RoleRetired:
			c.held = plus(c.held, d.Ready)
		case topology.RoleDeadLetter:
			c.dead = plus(c.dead, d.Ready)
		}
	}
	return c
}

func plus(a, b broker.Count) broker.Count {
	if !a.Known || !b.Known {
		return broker.Count{}
	}
	return broker.Known(a.N + b.N)
}

// movedTo says whether the difference is worth a write: a number became known or unknown, crossed zero, or moved by
// more than a tenth; or messages got stuck, or free.
func (c counts) movedTo(n counts) bool {
	return c.stuck != n.stuck || moved(c.ready, n.ready) || moved(c.inFlight, n.inFlight) || moved(c.held, n.held) || moved(c.dead, n.dead)
}

func moved(from, to broker.Count) bool {
	switch {
	case from.Known != to.Known:
		return true
	case !from.Known || from.N == to.N:
		return false
	case from.N == 0 || to.N == 0:
		return true
	}
	diff := to.N - from.N
	return max(diff, -diff)*10 > from.N
}

func (c counts) status() *v1alpha1.MessageCounts {
	return &v1alpha1.MessageCounts{Ready: pointer(c.ready), InFlight: pointer(c.inFlight), Held: pointer(c.held), Dead: pointer(c.dead)}
}

func pointer(c broker.Count) *int64 {
	if !c.Known {
		return nil
	}
	return &c.N
}

func fromStatus(c *v1alpha1.MessageCounts) counts {
	if c == nil {
		return counts{}
	}
	known := func(p *int64) broker.Count {
		if p == nil {
			return broker.Count{}
		}
		return broker.Known(*p)
	}
	return counts{ready: known(c.Ready), inFlight: known(c.InFlight), held: known(c.Held), dead: known(c.Dead)}
}
