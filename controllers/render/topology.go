package render

import (
	"encoding/json"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// BrokerKey is the Broker that a Topology refers to; the namespace defaults to the Topology's own.
func BrokerKey(t *v1alpha1.Topology) types.NamespacedName {
	ns := t.Spec.BrokerRef.Namespace
	if ns == "" {
		ns = t.Namespace
	}
	return types.NamespacedName{Namespace: ns, Name: t.Spec.BrokerRef.Name}
}

// QueueName is the name of a Topology's main queue: the one in its spec, else metadata.name, and outside the
// Broker's namespace "{namespace}.{name}".
func QueueName(t *v1alpha1.Topology) string {
	switch {
	case t.Spec.Queue != "":
		return t.Spec.Queue
	case BrokerKey(t).Namespace == t.Namespace:
		return t.Name
	default:
		return t.Namespace + "." + t.Name
	}
}

// TopologySpec is the part of a Topology that every broker understands.
func TopologySpec(t *v1alpha1.Topology) topology.Spec {
	s := topology.Spec{Queue: QueueName(t), External: t.Spec.External}
	if t.Spec.Source != nil {
		s.Source = t.Spec.Source.Name
	}
	for _, h := range t.Spec.HoldQueues {
		s.Holds = append(s.Holds, h.Delay.Duration)
	}
	if d := t.Spec.DeadLetter; d != nil {
		s.DeadLetter, s.DeadLetterQueue = true, d.Queue
	}
	if q := t.Spec.Sequenced; q != nil {
		s.Sequenced = &topology.SequencedSpec{
			OnFailure: topology.OnFailure(q.OnFailure), OnDefer: topology.OnDefer(q.OnDefer), Shards: int(q.Shards), Key: q.Key,
			MaxPendingPerKey: int(q.MaxPendingPerKey), AllowMessageLoss: q.AllowMessageLoss,
		}
	}
	return s
}

// Declaration is what a driver of that kind takes for a Topology, without the retired queues, which only its status
// knows (see RetiredQueues). The error joins *topology.FieldError: the person who wrote the Topology must act.
func Declaration(t *v1alpha1.Topology, kind topology.Kind) (broker.Declaration, error) {
	topo, err := topology.Derive(TopologySpec(t))
	if err != nil {
		return broker.Declaration{}, err
	}
	options, err := topologyOptions(t, kind)
	if err != nil {
		return broker.Declaration{}, err
	}
	return broker.Declaration{Topology: topo, Options: options}, nil
}

// topologyOptions is the section of the spec that is named like the broker's kind, as JSON. A section of another
// kind is an error: it would be ignored silently.
func topologyOptions(t *v1alpha1.Topology, kind topology.Kind) (json.RawMessage, error) {
	type section struct {
		kind  topology.Kind
		set   bool
		value any
	}
	var out json.RawMessage
	for _, s := range []section{
		{topology.RabbitMQ, t.Spec.RabbitMQ != nil, t.Spec.RabbitMQ},
		{topology.Kafka, t.Spec.Kafka != nil, t.Spec.Kafka},
		{topology.NATS, t.Spec.NATS != nil, t.Spec.NATS},
	} {
		switch {
		case !s.set:
		case s.kind != kind:
			return nil, &topology.FieldError{Field: string(s.kind), Problem: fmt.Sprintf("the Broker is of kind %s: remove this section", kind)}
		default:
			b, err := json.Marshal(s.value)
			if err != nil {
				return nil, fmt.Errorf("encode spec.%s: %w", s.kind, err)
			}
			out = b
		}
	}
	return out, nil
}

// RetiredQueues are the hold queues of the status that left the spec.
func RetiredQueues(t *v1alpha1.Topology) []topology.Queue {
	var out []topology.Queue
	for _, q := range t.Status.Queues {
		if q.Role != v1alpha1.QueueRoleRetired {
			continue
		}
		var delay time.Duration
		if q.Delay != nil {
			delay = q.Delay.Duration
		}
		out = append(out, topology.Queue{Name: q.Name, Role: topology.RoleRetired, Delay: delay})
	}
	return out
}
