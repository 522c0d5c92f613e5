package rabbitmq

import (
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// Arguments of queues (https://www.rabbitmq.com/docs/queues#optional-arguments).
const (
	argType       = "x-queue-type"
	argTTL        = "x-message-ttl"
	argExchange   = "x-dead-letter-exchange"
	argRoutingKey = "x-dead-letter-routing-key"
	argStrategy   = "x-dead-letter-strategy"
	argOverflow   = "x-overflow"
	argLimit      = "x-delivery-limit"

	atLeastOnce   = "at-least-once"
	rejectPublish = "reject-publish"
)

// deliveryLimit is "no limit" in a form that every version understands: -1 drops at the first return on 3.10, and
// without an argument 4.0 drops at the 21st. A positive limit also makes 3.10 put returned messages at the head. What
// bounds a message that kills its consumers is the consumer's crash limit (C10), not this.
const deliveryLimit int64 = 1_000_000_000

// queue is a queue as it is to be declared.
type queue struct {
	name string
	role topology.Role
	args amqp.Table
}

// plan is what a declaration leads to.
type plan struct {
	// verify is an external queue, which must exist; empty: none.
	verify   string
	queues   []queue // in the order to declare them in: the targets of hold queues before the hold queues
	main     string
	bindings []binding // of main
	unbind   []binding // of main
	options  options
}

func newPlan(d broker.Declaration) (plan, error) {
	o, err := parseOptions(d.Options)
	if err != nil {
		return plan{}, fmt.Errorf("%w: %w", err, broker.ErrUnsupported)
	}
	t := d.Topology
	switch {
	case t.Sequenced != nil:
		return plan{}, fmt.Errorf("sequenced topologies on RabbitMQ: %w yet", broker.ErrUnsupported)
	case t.Source != t.Queue:
		return plan{}, &topology.FieldError{Field: "source", Problem: fmt.Sprintf("%q: RabbitMQ has no topics to read from; give the topology its own queue and list the exchange in rabbitmq.bindings", t.Source)}
	case t.External && len(o.Bindings) > 0:
		return plan{}, &topology.FieldError{Field: "rabbitmq.bindings", Problem: "an external topology is never written to: bind its queue where it is declared"}
	}
	p := plan{main: physical(t, t.Queue), bindings: o.Bindings, unbind: o.RetiredBindings, options: o}
	if t.External {
		p.verify = p.main
	}
	for _, q := range t.Queues() {
		if t.External && q.Role != topology.RoleDeadLetter {
			continue
		}
		p.queues = append(p.queues, queue{name: physical(t, q.Name), role: q.Role, args: arguments(t, q, o)})
	}
	return p, nil
}

func physical(t topology.Topology, name string) string { return t.Physical(topology.RabbitMQ, name) }

// arguments are a queue's arguments. Integers are int64, which every version accepts and reads back as equal.
func arguments(t topology.Topology, q topology.Queue, o options) amqp.Table {
	switch q.Role {
	case topology.RoleHold:
		// All of them together: without reject-publish the broker falls back to at-most-once with no more than a
		// line in its log, and loses messages whose target is missing.
		return amqp.Table{
			argType:       quorumQueue,
			argTTL:        q.Delay.Milliseconds(),
			argExchange:   "",
			argRoutingKey: physical(t, t.Queue),
			argStrategy:   atLeastOnce,
			argOverflow:   rejectPublish,
		}
	case topology.RoleDeadLetter:
		return amqp.Table{argType: quorumQueue, argLimit: deliveryLimit}
	default:
		args := amqp.Table{argType: o.QueueType}
		if o.QueueType == quorumQueue {
			args[argLimit] = deliveryLimit
		}
		if t.DeadLetter != "" {
			// The net for what the broker itself drops, such as messages that expire by a policy.
			args[argExchange] = ""
			args[argRoutingKey] = physical(t, t.DeadLetter)
			if o.QueueType == quorumQueue { // a classic queue refuses a strategy
				args[argStrategy] = atLeastOnce
				args[argOverflow] = rejectPublish
			}
		}
		return args
	}
}

// objects lists what a declaration leads to, in the order of declaring.
func objects(d broker.Declaration) ([]broker.Object, error) {
	p, err := newPlan(d)
	if err != nil {
		return nil, err
	}
	var out []broker.Object
	if p.verify != "" {
		out = append(out, broker.Object{Kind: "queue", Name: p.verify, Role: topology.RoleMain})
	}
	for _, q := range p.queues {
		out = append(out, q.object())
	}
	for _, b := range p.bindings {
		out = append(out, b.object(p.main))
	}
	return out, nil
}

func (q queue) object() broker.Object {
	props := map[string]any{"durable": true}
	for k, v := range q.args {
		props[k] = v
	}
	return broker.Object{Kind: "queue", Name: q.name, Role: q.role, Properties: props}
}

func (b binding) object(queue string) broker.Object {
	return broker.Object{Kind: "binding", Name: b.name(queue), Properties: map[string]any{
		"source": b.Exchange, "destination": queue, "routing_key": b.RoutingKey,
	}}
}

func (b binding) name(queue string) string {
	return fmt.Sprintf("%s -> %s (%s)", b.Exchange, queue, b.RoutingKey)
}
