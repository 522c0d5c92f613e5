package rabbitmq

import (
	"context"
	"fmt"
	"slices"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
)

// publisher publishes to a topology's main queue through a channel of its own, so that a refused publish closes
// nobody else's.
type publisher struct {
	client     *client
	queue      string
	exchange   string // of the first binding; empty: none
	confirmers *confirmers
}

var _ broker.Publisher = (*publisher)(nil)

func newPublisher(c *client, p plan) *publisher {
	pub := &publisher{client: c, queue: p.main, confirmers: newConfirmers(c.publish)}
	if len(p.bindings) > 0 {
		pub.exchange = p.bindings[0].Exchange
	}
	return pub
}

// Publish returns after every message is confirmed and routed. A message with a routing key goes to the exchange of
// the topology's first binding, and reaches every queue bound there; any other goes straight to the queue.
func (p *publisher) Publish(ctx context.Context, messages []broker.Message) error {
	if len(messages) == 0 {
		return nil
	}
	c, err := p.confirmers.get(ctx)
	if err != nil {
		items := make([]broker.PublishItem, len(messages))
		err = fmt.Errorf("publish to queue %q: %w", p.queue, mapError(err))
		for i := range items {
			items[i] = broker.PublishItem{Index: i, Err: err}
		}
		return &broker.PublishError{Items: items}
	}
	var items []broker.PublishItem
	out := make([]outgoing, 0, len(messages))
	index := make([]int, 0, len(messages))
	for i := range messages {
		m, err := p.outgoing(&messages[i])
		if err == nil {
			err = fits(&m.msg, c.conn.frameMax)
		}
		if err != nil {
			items = append(items, broker.PublishItem{Index: i, Err: err})
			continue
		}
		out = append(out, m)
		index = append(index, i)
	}
	if len(out) > 0 {
		f := c.send(ctx, out)
		for j, err := range f.wait() {
			if err != nil {
				items = append(items, broker.PublishItem{Index: index[j], Err: fmt.Errorf("publish to %s: %w", p.where(&out[j]), err)})
			}
		}
	}
	if len(items) == 0 {
		return nil
	}
	slices.SortFunc(items, func(a, b broker.PublishItem) int { return a.Index - b.Index })
	return &broker.PublishError{Items: items}
}

func (p *publisher) where(m *outgoing) string {
	if m.exchange == "" {
		return fmt.Sprintf("queue %q", m.key)
	}
	return fmt.Sprintf("exchange %q with routing key %q", m.exchange, m.key)
}

func (p *publisher) outgoing(in *broker.Message) (outgoing, error) {
	m := outgoing{key: p.queue}
	if in.RoutingKey != "" && p.exchange != "" {
		if len(in.RoutingKey) > maxShortString {
			return m, fmt.Errorf("routing key of %d bytes: AMQP allows %d: %w", len(in.RoutingKey), maxShortString, broker.ErrTooLarge)
		}
		m.exchange, m.key = p.exchange, in.RoutingKey
	}
	h := make(amqp.Table, len(in.Headers)+2)
	for k, v := range in.Headers {
		h[k] = toField(v)
	}
	if in.ID != "" {
		h[header.MessageID] = in.ID
	}
	if in.Key != "" {
		h[header.Key] = in.Key
	}
	m.msg = amqp.Publishing{
		Headers:      h,
		ContentType:  in.ContentType,
		DeliveryMode: amqp.Persistent,
		MessageId:    in.ID,
		Timestamp:    in.Timestamp,
		Body:         in.Body,
	}
	m.identify()
	return m, nil
}

// Close ends the channel. A Publish that is under way reports what is unconfirmed as unknown.
func (p *publisher) Close(ctx context.Context) error {
	p.client.remove(p)
	return p.confirmers.close(ctx)
}

func (p *publisher) abandon() { p.confirmers.abandon() }
