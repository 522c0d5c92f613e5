package kafka

import (
	"context"
	"fmt"
	"sync"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
)

// publisher publishes to a topology's main topic.
type publisher struct {
	client *client
	topic  string

	mu     sync.Mutex
	closed bool
}

var _ broker.Publisher = (*publisher)(nil)

func newPublisher(c *client, p plan) *publisher { return &publisher{client: c, topic: p.main} }

// Publish returns after all in-sync replicas have every message. Messages with one key go to one partition.
func (p *publisher) Publish(ctx context.Context, messages []broker.Message) error {
	if len(messages) == 0 {
		return nil
	}
	c, err := p.producing()
	if err != nil {
		items := make([]broker.PublishItem, len(messages))
		err = fmt.Errorf("publish to topic %q: %w", p.topic, mapError(err))
		for i := range items {
			items[i] = broker.PublishItem{Index: i, Err: err}
		}
		return &broker.PublishError{Items: items}
	}
	f := newFlight(c, len(messages))
	var turn int32
	for i := range messages {
		if i%run(len(messages)) == 0 {
			turn = p.client.turns.take()
		}
		r := p.record(&messages[i])
		r.Partition = turn
		f.send(ctx, r)
	}
	var items []broker.PublishItem
	for i, err := range f.wait() {
		if err != nil {
			items = append(items, broker.PublishItem{Index: i, Err: fmt.Errorf("publish to topic %q: %w", p.topic, err)})
		}
	}
	if len(items) == 0 {
		return nil
	}
	return &broker.PublishError{Items: items}
}

func (p *publisher) producing() (*kgo.Client, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, fmt.Errorf("publisher: %w", broker.ErrClosed)
	}
	return p.client.producing()
}

func (p *publisher) record(in *broker.Message) *kgo.Record {
	r := &kgo.Record{Topic: p.topic, Value: in.Body, Timestamp: in.Timestamp, Headers: make([]kgo.RecordHeader, 0, len(in.Headers)+2)}
	if in.Key != "" {
		r.Key = []byte(in.Key)
	}
	if in.ID != "" {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: header.MessageID, Value: []byte(in.ID)})
	}
	if in.ContentType != "" {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: contentType, Value: []byte(in.ContentType)})
	}
	for name, v := range in.Headers {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: name, Value: text(v)})
	}
	return r
}

// Close ends the publisher. A Publish that is under way goes on.
func (p *publisher) Close(context.Context) error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.client.remove(p)
	return nil
}
