package nats

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/shove-dev/shove/broker"
)

// client consumes and publishes over one connection, which is made when it is first needed.
type client struct {
	dialer  *dialer
	link    *link
	waiting waiting

	mu     sync.Mutex
	open   map[child]struct{} // subscriptions and publishers
	owed   []owed
	closed bool
}

// child is a subscription or a publisher.
type child interface {
	Close(ctx context.Context) error
}

// owed is a delivery whose connection was lost before it was settled. The server would redeliver it when the ack wait
// is over; the next connection tells it to do so at once.
type owed struct {
	reply string
	until time.Time // then the server redelivers it by itself
}

var _ broker.Client = (*client)(nil)

func openClient(cfg broker.Config, m mode) (*client, error) {
	d, err := newDialer(cfg, m)
	if err != nil {
		return nil, err
	}
	c := &client{dialer: d, link: newLink(d, "client"), open: map[child]struct{}{}}
	c.link.made = c.handBackOwed
	return c, nil
}

// Subscribe starts a subscription. A consumer that is missing although its stream exists is made anew.
func (c *client) Subscribe(ctx context.Context, in broker.Subscribe) (broker.Subscription, error) {
	p, err := newPlan(in.Declaration)
	if err != nil {
		return nil, err
	}
	if in.Role == broker.ReadDeadLetter && p.topology.DeadLetter == "" {
		return nil, fmt.Errorf("read the dead letters of %q: it has no dead-letter queue: %w", p.topology.Queue, broker.ErrUnsupported)
	}
	if err := c.usable(); err != nil {
		return nil, err
	}
	cn, err := c.link.get(ctx)
	if err != nil {
		return nil, err
	}
	s := newSubscription(c, cn, p, in)
	if err := s.start(ctx); err != nil {
		s.abandon()
		return nil, fmt.Errorf("consume from %q: %w", s.queue, mapError(err))
	}
	if err := c.add(s); err != nil {
		_ = s.Close(ctx)
		return nil, err
	}
	return s, nil
}

// Publisher opens the publishing side of a topology's main queue.
func (c *client) Publisher(_ context.Context, d broker.Declaration) (broker.Publisher, error) {
	p, err := newPlan(d)
	if err != nil {
		return nil, err
	}
	if err := c.usable(); err != nil {
		return nil, err
	}
	pub := newPublisher(c, p)
	if err := c.add(pub); err != nil {
		return nil, err
	}
	return pub, nil
}

func (c *client) usable() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fmt.Errorf("nats client: %w", broker.ErrClosed)
	}
	return nil
}

func (c *client) add(x child) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fmt.Errorf("nats client: %w", broker.ErrClosed)
	}
	c.open[x] = struct{}{}
	return nil
}

func (c *client) remove(x child) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.open, x)
}

// owe notes deliveries that a lost connection left unsettled.
func (c *client) owe(list []owed) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.owed = append(c.owed, list...)
}

// handBackOwed is called with every new connection.
func (c *client) handBackOwed(cn *conn) {
	c.mu.Lock()
	list := c.owed
	c.owed = nil
	c.mu.Unlock()
	now := time.Now()
	for _, o := range list {
		if now.Before(o.until) { // else another consumer may be at it already
			_ = cn.Publish(o.reply, nak) // it comes back by itself later
		}
	}
}

// Close ends every subscription and publisher and the connection. The server has everything unsettled back.
func (c *client) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*closeTimeout)
	defer cancel()
	c.mu.Lock()
	c.closed = true
	children := c.open
	c.open = map[child]struct{}{}
	c.mu.Unlock()
	var wg sync.WaitGroup
	errs := make(chan error, len(children)+1)
	for x := range children {
		wg.Go(func() { errs <- x.Close(ctx) })
	}
	wg.Wait()
	c.mu.Lock()
	left := len(c.owed)
	c.mu.Unlock()
	if left > 0 { // one attempt; without it they come back when their ack wait is over
		if _, err := c.link.get(ctx); err != nil {
			c.dialer.logger.Info("deliveries of a lost connection come back when their ack wait is over", "messages", left, "error", err)
		}
	}
	errs <- c.link.close(ctx)
	close(errs)
	var all []error
	for err := range errs {
		all = append(all, err)
	}
	return errors.Join(all...)
}
