package rabbitmq

import (
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// target is the queue that a copy goes to, by way of the default exchange.
func target(t *topology.Topology, a settle.Action) string {
	switch a.Kind {
	case settle.Hold:
		return physical(*t, t.Holds[a.Tier].Queue)
	case settle.DeadLetter:
		return physical(*t, t.DeadLetter)
	default:
		return physical(*t, t.Queue)
	}
}

// copyOf is the copy that an action asks for: the original with all of its properties, without the headers that would
// harm it, and with those that are written anew (C9). An expiration would return it too early; a foreign user-id
// would close the channel, and moves to a header.
func copyOf(e *entry, in *broker.Settlement, queue string) outgoing {
	d := &e.raw
	m := outgoing{key: queue, msg: amqp.Publishing{
		Headers:         copyHeaders(d, in),
		ContentType:     d.ContentType,
		ContentEncoding: d.ContentEncoding,
		DeliveryMode:    amqp.Persistent,
		Priority:        d.Priority,
		CorrelationId:   d.CorrelationId,
		ReplyTo:         d.ReplyTo,
		MessageId:       d.MessageId,
		Timestamp:       d.Timestamp,
		Type:            d.Type,
		AppId:           d.AppId,
		Body:            d.Body,
	}}
	if in.Envelope != nil {
		m.msg.Body = in.Envelope
		m.msg.ContentType, m.msg.ContentEncoding = amqp.MimeApplicationJSON, ""
	}
	m.identify()
	return m
}

func copyHeaders(d *amqp.Delivery, in *broker.Settlement) amqp.Table {
	h := make(amqp.Table, len(d.Headers)+len(in.Stamp)+1)
	if in.Envelope == nil {
		for k, v := range d.Headers {
			if header.Keep(k) {
				h[k] = v
			}
		}
		if d.UserId != "" { // checked by the server when it was published, so it wins over a header of the same name
			h[header.UserID] = d.UserId
		}
	}
	for _, f := range in.Stamp {
		h[f.Name] = toField(f.Value)
	}
	return h
}

// identify finds what tells a returned message from others in flight. A message without any identity gets one.
func (m *outgoing) identify() {
	if id, ok := m.msg.Headers[header.MessageID].(string); ok && id != "" {
		m.id = id
		return
	}
	if m.msg.MessageId == "" {
		m.msg.MessageId = newID()
	}
	m.id = m.msg.MessageId
}
