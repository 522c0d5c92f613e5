package memory

import (
	"context"
	"fmt"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
)

type publisher struct {
	client *client
	queue  string
	closed bool // guarded by the server's mutex
}

func (c *client) Publisher(ctx context.Context, d broker.Declaration) (broker.Publisher, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	c.server.mu.Lock()
	defer c.server.mu.Unlock()
	if err := c.usable(); err != nil {
		return nil, err
	}
	return &publisher{client: c, queue: d.Topology.Queue}, nil
}

func (p *publisher) Close(context.Context) error {
	p.client.server.mu.Lock()
	defer p.client.server.mu.Unlock()
	p.closed = true
	return nil
}

func (p *publisher) Publish(ctx context.Context, msgs []broker.Message) error {
	s := p.client.server
	s.mu.Lock()
	defer s.mu.Unlock()
	err := ctx.Err()
	if p.closed {
		err = fmt.Errorf("publisher of queue %q: %w", p.queue, broker.ErrClosed)
	} else if err == nil {
		err = p.client.usable()
	}
	if err != nil {
		return allFailed(len(msgs), err)
	}

	now := time.Now()
	slab := make([]stored, len(msgs))
	var items []broker.PublishItem
	for i := range msgs {
		if err := p.store(&slab[i], &msgs[i], now); err != nil {
			items = append(items, broker.PublishItem{Index: i, Err: err})
		}
	}
	if err := p.client.awaitConfirm(ctx); err != nil {
		items = withUnknown(len(msgs), items, err)
	}
	if len(items) > 0 {
		return &broker.PublishError{Items: items}
	}
	return nil
}

func (p *publisher) store(m *stored, msg *broker.Message, now time.Time) error {
	s := p.client.server
	if err := s.faults.publishes.next(); err != nil {
		return fmt.Errorf("publish to queue %q: %w", p.queue, err)
	}
	m.body = append([]byte(nil), msg.Body...)
	m.contentType, m.key = msg.ContentType, msg.Key
	m.headers = cloneHeaders(msg.Headers, 1)
	if msg.ID != "" {
		m.headers[header.MessageID] = msg.ID
	}
	q, err := s.admit(p.queue, m)
	if err != nil {
		return err
	}
	s.add(q, m, now)
	if err := s.faults.publishConfirms.next(); err != nil {
		return fmt.Errorf("confirm of a message in queue %q: %w", p.queue, err)
	}
	return nil
}

// cloneHeaders copies headers as a wire would: nothing that the publisher keeps is shared.
func cloneHeaders(h header.Map, extra int) header.Map {
	out := make(header.Map, len(h)+extra)
	for name, v := range h {
		if b, ok := v.([]byte); ok {
			v = append([]byte(nil), b...)
		}
		out[name] = v
	}
	return out
}

func allFailed(n int, err error) error {
	items := make([]broker.PublishItem, n)
	for i := range items {
		items[i] = broker.PublishItem{Index: i, Err: err}
	}
	return &broker.PublishError{Items: items}
}

// withUnknown adds an unknown outcome for every message that has none yet.
func withUnknown(n int, items []broker.PublishItem, err error) []broker.PublishItem {
	known := map[int]error{}
	for _, item := range items {
		known[item.Index] = item.Err
	}
	all := make([]broker.PublishItem, n)
	for i := range all {
		if all[i] = (broker.PublishItem{Index: i, Err: err}); known[i] != nil {
			all[i].Err = known[i]
		}
	}
	return all
}
