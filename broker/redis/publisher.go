package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/broker"
)

const (
	// publishTimeout bounds a publish whose context has no deadline.
	publishTimeout = 30 * time.Second
	// One pipeline holds at most so many messages, and stops growing at so many bytes.
	pipelineMessages = 500
	pipelineBytes    = 4 << 20
)

// publisher appends to a topology's main stream.
type publisher struct {
	client   *client
	key      string
	external bool
	closed   atomic.Bool
}

var _ broker.Publisher = (*publisher)(nil)

// Publish returns after the server has stored every message, in memory and as far as its persistence goes.
func (p *publisher) Publish(ctx context.Context, messages []broker.Message) error {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	r := publishing{p: p, messages: messages}
	key, err := p.target(ctx)
	if err != nil {
		for i := range messages {
			r.fail(i, mapError(err))
		}
		return r.result()
	}
	for i := 0; i < len(messages); {
		i = r.send(ctx, key, i)
	}
	return r.result()
}

// target is the stream to append to.
func (p *publisher) target(ctx context.Context) (string, error) {
	switch {
	case p.closed.Load():
		return "", fmt.Errorf("publisher: %w", broker.ErrClosed)
	case p.client.usable() != nil:
		return "", errClientClosed
	case p.external:
		return p.client.nodes.resolve(ctx, p.key)
	}
	return p.key, nil
}

// publishing is one call of Publish.
type publishing struct {
	p        *publisher
	messages []broker.Message
	items    []broker.PublishItem
}

func (r *publishing) fail(i int, err error) {
	r.items = append(r.items, broker.PublishItem{Index: i, Err: fmt.Errorf("publish to stream %q: %w", r.p.key, err)})
}

func (r *publishing) result() error {
	if len(r.items) == 0 {
		return nil
	}
	slices.SortFunc(r.items, func(a, b broker.PublishItem) int { return a.Index - b.Index })
	return &broker.PublishError{Items: r.items}
}

// send sends some messages, from one on, and returns where to go on.
func (r *publishing) send(ctx context.Context, key string, from int) (next int) {
	var cmds []goredis.Cmder
	var index []int
	size := 0
	for next = from; next < len(r.messages) && len(cmds) < pipelineMessages && size < pipelineBytes; next++ {
		m := &r.messages[next]
		// A stream that does not exist has no group: nobody would see the message.
		args, err := messageFields([]any{"XADD", key, "NOMKSTREAM", "*"}, m)
		if err != nil {
			r.fail(next, err)
			continue
		}
		size += len(m.Body)
		cmds = append(cmds, goredis.NewCmd(ctx, args...))
		index = append(index, next)
	}
	if len(cmds) == 0 {
		return next
	}
	_ = r.p.client.nodes.exec(ctx, key, cmds...)
	for i, cmd := range cmds {
		if err := publishError(cmd.Err()); err != nil {
			r.fail(index[i], err)
		}
	}
	return next
}

// publishError is what one message's reply means.
func publishError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, goredis.Nil):
		return fmt.Errorf("it does not exist: %w", broker.ErrUnroutable)
	case unsure(err):
		return fmt.Errorf("sent, and no answer came: %w: %w", broker.ErrUnknown, err)
	}
	return mapError(err)
}

// Close ends the publisher. A Publish that is under way goes on.
func (p *publisher) Close(context.Context) error {
	p.closed.Store(true)
	return nil
}
