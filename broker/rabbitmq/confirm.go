package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
)

// confirmTimeout bounds the wait for a confirm, whatever the caller's context says. A queue that lost its leader, or
// one that a crash of the server left damaged, never confirms.
const confirmTimeout = 30 * time.Second

// returnBuffer is how many returned messages may wait for the goroutine that takes them.
const returnBuffer = 64

func newID() string {
	id, err := uuid.NewV7()
	if err != nil {
		return uuid.NewString()
	}
	return id.String()
}

// outgoing is one message to publish.
type outgoing struct {
	exchange, key string
	msg           amqp.Publishing
	id            string // what a return of it is recognised by
	confirm       *amqp.DeferredConfirmation
	err           error // of sending
}

// returnKey is what a basic.return has in common with its publish: it carries no number. Messages with equal keys
// are copies of one message on their way to one place; when one is returned, all in flight are taken for returned.
type returnKey struct{ id, exchange, key string }

func (m *outgoing) returnKey() returnKey { return returnKey{m.id, m.exchange, m.key} }

// confirmers keeps a channel in confirm mode, made when it is needed and made anew when it was lost.
type confirmers struct {
	link   *link
	turn   chan struct{} // one opens, the others wait
	mu     sync.Mutex
	cur    *confirmer
	closed bool
}

func newConfirmers(l *link) *confirmers {
	return &confirmers{link: l, turn: make(chan struct{}, 1)}
}

func (c *confirmers) current() (*confirmer, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, broker.ErrClosed
	}
	if c.cur != nil && !c.cur.ch.IsClosed() && !c.cur.conn.IsClosed() {
		return c.cur, nil
	}
	return nil, nil
}

func (c *confirmers) get(ctx context.Context) (*confirmer, error) {
	if cur, err := c.current(); cur != nil || err != nil {
		return cur, err
	}
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return nil, fmt.Errorf("%w: %w", broker.ErrUnavailable, ctx.Err())
	}
	if cur, err := c.current(); cur != nil || err != nil {
		return cur, err
	}
	cur, err := newConfirmer(ctx, c.link)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		go func() { _ = cur.ch.Close() }()
		return nil, broker.ErrClosed
	}
	c.cur = cur
	return cur, nil
}

// close ends the channel. What is in flight on it resolves as unknown.
func (c *confirmers) close(ctx context.Context) error {
	cur := c.abandon()
	if cur == nil || cur.ch.IsClosed() {
		return nil
	}
	if cur.conn.blocked.Load() != nil { // the server reads nothing from this connection
		go func() { _ = cur.ch.Close() }()
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	err := do(ctx, cur.ch.Close)
	if err != nil && !cur.ch.IsClosed() {
		return mapError(err)
	}
	return nil
}

func (c *confirmers) abandon() *confirmer {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	return c.cur
}

// confirmer is one channel in confirm mode.
type confirmer struct {
	conn    *conn
	ch      *amqp.Channel
	closes  chan *amqp.Error
	returns chan amqp.Return
	caught  chan chan struct{} // asks for everything returned so far to be recorded
	done    chan struct{}      // closed when the channel is gone and its returns are recorded

	mu       sync.Mutex
	inflight map[returnKey]inflight
	reason   error // why the channel is gone
}

type inflight struct {
	refs     int
	returned string // the server's reason; empty: not returned
}

func newConfirmer(ctx context.Context, l *link) (*confirmer, error) {
	cn, ch, err := l.channel(ctx)
	if err != nil {
		return nil, err
	}
	c := &confirmer{
		conn:     cn,
		ch:       ch,
		closes:   ch.NotifyClose(make(chan *amqp.Error, 1)),
		returns:  ch.NotifyReturn(make(chan amqp.Return, returnBuffer)),
		caught:   make(chan chan struct{}),
		done:     make(chan struct{}),
		inflight: map[returnKey]inflight{},
	}
	go c.watch()
	if err := do(ctx, func() error { return ch.Confirm(false) }); err != nil {
		go func() { _ = ch.Close() }()
		return nil, fmt.Errorf("publisher confirms: %w", mapError(err))
	}
	return c, nil
}

// watch takes returned messages, so that the connection's reader never waits and none is dropped, which the library
// does after 5 s. The bodies are let go at once.
func (c *confirmer) watch() {
	defer close(c.done)
	for {
		select {
		case r, ok := <-c.returns:
			if !ok {
				return
			}
			c.record(&r)
		case recorded := <-c.caught:
			c.drain()
			close(recorded)
		}
	}
}

func (c *confirmer) drain() {
	for {
		select {
		case r, ok := <-c.returns:
			if !ok {
				return
			}
			c.record(&r)
		default:
			return
		}
	}
}

func (c *confirmer) record(r *amqp.Return) {
	id, ok := r.Headers[header.MessageID].(string)
	if !ok || id == "" {
		id = r.MessageId
	}
	key := returnKey{id, r.Exchange, r.RoutingKey}
	c.mu.Lock()
	defer c.mu.Unlock()
	if f, ok := c.inflight[key]; ok {
		f.returned = r.ReplyText
		c.inflight[key] = f
	}
}

// catchUp returns when every message is recorded that the server returned before the last confirm that was seen: the
// server sends a return before its confirm, and one goroutine reads both.
func (c *confirmer) catchUp() {
	recorded := make(chan struct{})
	select {
	case c.caught <- recorded:
		<-recorded
	case <-c.done:
	}
}

// flight is a batch of messages on their way.
type flight struct {
	c         *confirmer
	messages  []outgoing
	begun     atomic.Bool  // the server takes messages, so that the first may be on its way
	sent      atomic.Int64 // how many of messages are written, from the first on
	cancelled atomic.Bool
	written   chan struct{} // closed when nothing more is written
	ctx       context.Context
	cancel    context.CancelFunc
}

// send starts publishing. The messages belong to the flight until wait returned, and beyond where it gave up.
func (c *confirmer) send(ctx context.Context, messages []outgoing) *flight {
	f := &flight{c: c, messages: messages, written: make(chan struct{})}
	f.ctx, f.cancel = context.WithTimeout(ctx, confirmTimeout)
	c.mu.Lock()
	for i := range messages {
		k := messages[i].returnKey()
		in := c.inflight[k]
		in.refs++
		c.inflight[k] = in
	}
	c.mu.Unlock()
	// A write blocks as long as the server does not read, and knows no context.
	go f.write()
	return f
}

func (f *flight) write() {
	defer close(f.written)
	if err := f.c.conn.writable(f.ctx); err != nil {
		for i := range f.messages {
			f.messages[i].err = err
		}
		f.sent.Store(int64(len(f.messages)))
		return
	}
	f.begun.Store(true)
	for i := range f.messages {
		if f.cancelled.Load() {
			return
		}
		m := &f.messages[i]
		m.confirm, m.err = f.c.ch.PublishWithDeferredConfirm(m.exchange, m.key, true, false, m.msg)
		f.sent.Store(int64(i + 1))
	}
}

// wait returns one error for each message: nil for one that is confirmed and routed. It is called once.
func (f *flight) wait() []error {
	defer f.cancel()
	errs := make([]error, len(f.messages))
	select {
	case <-f.written:
	case <-f.ctx.Done():
		f.cancelled.Store(true)
	}
	// What was not begun when cancelled was set is not sent: the writer looks before each message.
	begun, sent := f.begun.Load(), int(f.sent.Load())
	confirmed := false
	for i := range f.messages {
		m := &f.messages[i]
		switch {
		case i > sent, i == sent && !begun:
			errs[i] = f.c.unsent(f.ctx.Err())
		case i == sent:
			errs[i] = f.c.unknown("in the middle of sending it", f.ctx.Err())
		case m.err != nil:
			errs[i] = f.c.sendError(m.err)
		default:
			errs[i] = f.confirm(m)
			confirmed = confirmed || errs[i] == nil
		}
	}
	if confirmed {
		f.c.catchUp()
	}
	f.land(errs)
	return errs
}

// confirm waits for one message's confirm.
func (f *flight) confirm(m *outgoing) error {
	select {
	case <-m.confirm.Done():
	default:
		select {
		case <-m.confirm.Done():
		case <-f.ctx.Done():
			return f.c.unknown("sent, and no confirm came", f.ctx.Err())
		}
	}
	switch {
	case m.confirm.Acked():
		return nil
	case f.c.ch.IsClosed():
		return f.c.lost(len(m.msg.Body))
	default:
		return fmt.Errorf("%w: a negative confirm: a queue is full or not available", broker.ErrRejected)
	}
}

// land forgets the messages, and finds those that were returned.
func (f *flight) land(errs []error) {
	c := f.c
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range f.messages {
		k := f.messages[i].returnKey()
		in := c.inflight[k]
		if in.returned != "" && errs[i] == nil {
			errs[i] = fmt.Errorf("%w: %s", broker.ErrUnroutable, in.returned)
		}
		if in.refs--; in.refs > 0 {
			c.inflight[k] = in
		} else {
			delete(c.inflight, k)
		}
	}
}

// unknown says that a message may be stored.
func (c *confirmer) unknown(what string, cause error) error {
	return fmt.Errorf("%s%s: %w: %w", what, c.whileBlocked(), broker.ErrUnknown, cause)
}

// unsent says that a message is not stored.
func (c *confirmer) unsent(cause error) error {
	return fmt.Errorf("not sent%s: %w: %w", c.whileBlocked(), broker.ErrUnavailable, cause)
}

func (c *confirmer) whileBlocked() string {
	if b := c.conn.blocked.Load(); b != nil {
		return ", while the server blocks publishing (" + b.reason + ")"
	}
	return ""
}

// sendError is what a message is that could not be written.
func (c *confirmer) sendError(err error) error {
	switch {
	case errors.Is(err, broker.ErrUnavailable):
		return err
	case errors.Is(err, amqp.ErrClosed): // refused by the library before writing
		return c.unsent(c.closeReason())
	case errors.Is(err, amqp.ErrFieldType):
		return fmt.Errorf("%w: %w", broker.ErrUnsupported, err)
	default:
		return fmt.Errorf("in the middle of sending it: %w: %w", broker.ErrUnknown, err)
	}
}

// tooLarge matches the reply to a message above the server's max_message_size.
var tooLarge = regexp.MustCompile(`message size \d+ is larger than configured max size (\d+)`)

// lost is what an unconfirmed message is after its channel was closed: unknown, except one that is the reason for it.
func (c *confirmer) lost(size int) error {
	reason := c.closeReason()
	if m := tooLarge.FindStringSubmatch(reason.Error()); m != nil {
		if limit, err := strconv.Atoi(m[1]); err == nil && size > limit {
			return fmt.Errorf("%w: a body of %d bytes: the server takes %d", broker.ErrTooLarge, size, limit)
		}
	}
	return fmt.Errorf("%w: no confirm before the channel closed: %w", broker.ErrUnknown, reason)
}

// closeReason says why the channel is gone, under the seam's error where a person must act.
func (c *confirmer) closeReason() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reason == nil {
		select {
		case err := <-c.closes:
			if err != nil {
				c.reason = scrubbed(err)
				switch err.Code {
				case amqp.AccessRefused, amqp.NotFound:
					c.reason = mapError(err)
				}
			}
		default:
		}
	}
	if c.reason == nil {
		return amqp.ErrClosed
	}
	return c.reason
}
