package nats

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	natsgo "github.com/nats-io/nats.go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
)

// publisher publishes to a topology's main subject.
type publisher struct {
	client *client
	plan   plan

	mu      sync.Mutex
	target  target
	closed  bool
	pending sync.WaitGroup
}

// target is where messages go.
type target struct{ subject, stream string }

// reserve is what a message leaves free of the server's max_payload, so that its copies fit with their headers.
const reserve = 4 << 10

var _ broker.Publisher = (*publisher)(nil)

func newPublisher(c *client, p plan) *publisher {
	pub := &publisher{client: c, plan: p}
	if !p.topology.External {
		main := physical(p.topology, p.topology.Queue)
		pub.target = target{main, main}
	}
	return pub
}

// Publish returns after the stream stored every message.
func (p *publisher) Publish(ctx context.Context, messages []broker.Message) error {
	if len(messages) == 0 {
		return nil
	}
	queue := p.plan.topology.Queue
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return allFailed(len(messages), fmt.Errorf("publisher of %q: %w", queue, broker.ErrClosed))
	}
	p.pending.Add(1)
	p.mu.Unlock()
	defer p.pending.Done()
	c, err := p.client.link.get(ctx)
	if err != nil {
		return allFailed(len(messages), fmt.Errorf("publish to %q: %w", queue, mapError(err)))
	}
	to, err := p.where(ctx, c)
	if err != nil {
		return allFailed(len(messages), fmt.Errorf("publish to %q: %w", queue, mapError(err)))
	}
	var items []broker.PublishItem
	out := make([]outgoing, 0, len(messages))
	index := make([]int, 0, len(messages))
	for i := range messages {
		m, err := to.outgoing(&messages[i])
		if err == nil {
			err = fits(m.header, len(m.data), 0, max(c.MaxPayload()-reserve, 1))
		}
		if err != nil {
			items = append(items, broker.PublishItem{Index: i, Err: err})
			continue
		}
		out = append(out, m)
		index = append(index, i)
	}
	if len(out) > 0 {
		for j, err := range c.flights.send(out).wait(ctx) {
			if err != nil {
				items = append(items, broker.PublishItem{Index: index[j], Err: fmt.Errorf("publish to subject %q: %w", to.subject, err)})
			}
		}
	}
	if len(items) == 0 {
		return nil
	}
	slices.SortFunc(items, func(a, b broker.PublishItem) int { return a.Index - b.Index })
	return &broker.PublishError{Items: items}
}

func allFailed(n int, err error) error {
	items := make([]broker.PublishItem, n)
	for i := range items {
		items[i] = broker.PublishItem{Index: i, Err: err}
	}
	return &broker.PublishError{Items: items}
}

// where is the subject to publish to. The subjects of somebody else's stream are only known to the server.
func (p *publisher) where(ctx context.Context, c *conn) (target, error) {
	p.mu.Lock()
	to := p.target
	p.mu.Unlock()
	if to.subject != "" {
		return to, nil
	}
	info, err := c.stream(ctx, p.plan.verify)
	if err != nil {
		return target{}, fmt.Errorf("stream %q: %w", p.plan.verify, err)
	}
	var literal []string
	for _, s := range info.Config.list("subjects") {
		if s == p.plan.verify {
			literal = []string{s}
			break
		}
		if !strings.ContainsAny(s, "*>") {
			literal = append(literal, s)
		}
	}
	if len(literal) != 1 {
		return target{}, fmt.Errorf("stream %q takes no subject of that name and not exactly one without wildcards, so that it is not clear which to publish to: %w", p.plan.verify, broker.ErrUnsupported)
	}
	to = target{literal[0], p.plan.verify}
	p.mu.Lock()
	p.target = to
	p.mu.Unlock()
	return to, nil
}

func (to target) outgoing(in *broker.Message) (outgoing, error) {
	h := make(natsgo.Header, len(in.Headers)+4)
	for name, v := range in.Headers {
		value := text(v)
		if err := checkHeader(name, value); err != nil {
			return outgoing{}, err
		}
		h[name] = []string{value}
	}
	if in.ID != "" {
		id := []string{in.ID}
		h[header.MessageID], h[headerMsgID] = id, id
	}
	if in.Key != "" {
		h[header.Key] = []string{in.Key}
	}
	if in.ContentType != "" {
		h[contentType] = []string{in.ContentType}
	}
	for _, name := range [...]string{header.MessageID, header.Key, contentType} {
		if v := h[name]; len(v) > 0 {
			if err := checkHeader(name, v[0]); err != nil {
				return outgoing{}, err
			}
		}
	}
	return outgoing{subject: to.subject, stream: to.stream, header: h, data: in.Body}, nil
}

// checkHeader refuses what would come out as something else.
func checkHeader(name, value string) error {
	for i := range len(name) {
		if c := name[i]; c <= ' ' || c == ':' || c >= 0x7f {
			return fmt.Errorf("header name %q: NATS allows printable characters without space and colon: %w", name, broker.ErrUnsupported)
		}
	}
	switch {
	case name == "":
		return fmt.Errorf("a header without a name: %w", broker.ErrUnsupported)
	case strings.ContainsAny(value, "\r\n"):
		return fmt.Errorf("header %q has a line break in its value, which has no form in NATS: %w", name, broker.ErrUnsupported)
	case value != strings.TrimSpace(value):
		return fmt.Errorf("header %q has a space at an end of its value, which NATS does not keep: %w", name, broker.ErrUnsupported)
	}
	return nil
}

// Close waits for what is under way.
func (p *publisher) Close(ctx context.Context) error {
	p.client.remove(p)
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	done := make(chan struct{})
	go func() { p.pending.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("close the publisher of %q: %w: %w", p.plan.topology.Queue, broker.ErrUnavailable, ctx.Err())
	}
}
