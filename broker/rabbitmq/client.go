package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"sync"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
)

// client consumes over one connection and publishes over another: a server that is out of memory or disk stops
// reading from a connection that publishes, and acknowledgements must not wait behind that. Either is made when it is
// first needed.
type client struct {
	dialer  *dialer
	consume *link
	publish *link

	mu     sync.Mutex
	open   map[child]struct{} // subscriptions and publishers
	closed bool
}

// child is a subscription or a publisher.
type child interface {
	// abandon ends it without a word to the server: its connection is about to be closed.
	abandon()
}

var _ broker.Client = (*client)(nil)

func openClient(cfg broker.Config) (*client, error) {
	d, err := newDialer(cfg)
	if err != nil {
		return nil, err
	}
	return &client{dialer: d, consume: newLink(d, "consume"), publish: newLink(d, "publish"), open: map[child]struct{}{}}, nil
}

// Subscribe starts consuming on a channel of its own.
func (c *client) Subscribe(ctx context.Context, in broker.Subscribe) (broker.Subscription, error) {
	queue, err := source(in)
	if err != nil {
		return nil, err
	}
	if err := c.usable(); err != nil {
		return nil, err
	}
	s, err := c.subscribe(ctx, queue, in)
	if err != nil {
		return nil, fmt.Errorf("consume from queue %q: %w", queue, mapError(err))
	}
	if err := c.add(s); err != nil {
		_ = s.Close(ctx)
		return nil, err
	}
	return s, nil
}

// source is the queue that a subscription reads.
func source(in broker.Subscribe) (string, error) {
	if _, err := newPlan(in.Declaration); err != nil {
		return "", err
	}
	t := in.Topology
	if in.Role == broker.ReadDeadLetter {
		if t.DeadLetter == "" {
			return "", fmt.Errorf("read the dead letters of %q: it has no dead-letter queue: %w", t.Queue, broker.ErrUnsupported)
		}
		return physical(t, t.DeadLetter), nil
	}
	return physical(t, t.Queue), nil
}

func (c *client) subscribe(ctx context.Context, queue string, in broker.Subscribe) (*subscription, error) {
	conn, ch, err := c.consume.channel(ctx)
	if err != nil {
		return nil, err
	}
	s := newSubscription(c, conn, ch, queue, in)
	err = do(ctx, func() error {
		// Per consumer, and there is one consumer on the channel.
		return ch.Qos(s.prefetch, 0, false)
	})
	if err == nil {
		s.deliveries, err = await(ctx, func() (<-chan amqp.Delivery, error) {
			return ch.Consume(queue, s.tag, false, false, false, false, nil)
		}, nil)
	}
	if err != nil {
		go func() { _ = ch.Close() }() // also takes back a consumer that starts after ctx is over
		return nil, err
	}
	go s.pump()
	return s, nil
}

// Publisher opens the publishing side of a topology's main queue. It connects when it first publishes.
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
		return fmt.Errorf("rabbitmq client: %w", broker.ErrClosed)
	}
	return nil
}

func (c *client) add(x child) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fmt.Errorf("rabbitmq client: %w", broker.ErrClosed)
	}
	c.open[x] = struct{}{}
	return nil
}

func (c *client) remove(x child) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.open, x)
}

// Close ends every subscription and publisher by closing the connections. The server takes back what is unsettled.
func (c *client) Close(ctx context.Context) error {
	c.mu.Lock()
	c.closed = true
	children := c.open
	c.open = map[child]struct{}{}
	c.mu.Unlock()
	for x := range children {
		x.abandon()
	}
	return errors.Join(c.publish.close(ctx), c.consume.close(ctx))
}
