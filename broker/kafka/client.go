package kafka

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/shove-dev/shove/broker"
)

// client consumes through a client of the library for each subscription, because that is one member of one group, and
// publishes through one that all subscriptions and publishers share. Each is made when it is first needed.
type client struct {
	dialer *dialer
	clock  clock
	turns  turns

	mu       sync.Mutex
	producer *kgo.Client
	open     map[child]struct{} // subscriptions and publishers
	seen     map[place]int64    // the end of what was delivered, of subscriptions that are over
	closed   bool
}

// child is a subscription or a publisher.
type child interface {
	Close(ctx context.Context) error
}

// place is a partition as a group reads it.
type place struct {
	group, topic string
	partition    int32
}

var _ broker.Client = (*client)(nil)

func openClient(cfg broker.Config, m mode) (*client, error) {
	d, err := newDialer(cfg, m)
	if err != nil {
		return nil, err
	}
	c := &client{dialer: d, open: map[child]struct{}{}, seen: map[place]int64{}}
	c.turns.next.Store(rand.Uint32()) // short-lived publishers do not all begin at the first partition
	return c, nil
}

// Subscribe joins the group of the topology. It returns before a partition is assigned.
func (c *client) Subscribe(ctx context.Context, in broker.Subscribe) (broker.Subscription, error) {
	p, err := newPlan(in.Declaration)
	if err != nil {
		return nil, err
	}
	if in.Role == broker.ReadDeadLetter && p.dead == "" {
		return nil, fmt.Errorf("read the dead letters of %q: it has no dead-letter queue: %w", p.topology.Queue, broker.ErrUnsupported)
	}
	if err := c.usable(); err != nil {
		return nil, err
	}
	s := newSubscription(c, p, in)
	if err := s.start(ctx); err != nil {
		s.abandon()
		return nil, fmt.Errorf("consume from topic %q: %w", s.main, mapError(err))
	}
	if err := c.add(s); err != nil {
		_ = s.Close(ctx)
		return nil, err
	}
	if f := c.dialer.mode.opened; f != nil {
		f(s)
	}
	return s, nil
}

// Publisher opens the publishing side of a topology's main topic. It connects when it first publishes.
func (c *client) Publisher(_ context.Context, d broker.Declaration) (broker.Publisher, error) {
	p, err := newPlan(d)
	if err != nil {
		return nil, err
	}
	pub := newPublisher(c, p)
	if err := c.add(pub); err != nil {
		return nil, err
	}
	return pub, nil
}

// producing is the client that publishes.
func (c *client) producing() (*kgo.Client, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errClientClosed
	}
	if c.producer == nil {
		p, err := c.dialer.open("publish", producerOptions()...)
		if err != nil {
			return nil, err
		}
		c.producer = p
	}
	return c.producer, nil
}

var errClientClosed = fmt.Errorf("kafka client: %w", broker.ErrClosed)

func (c *client) usable() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errClientClosed
	}
	return nil
}

func (c *client) add(x child) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errClientClosed
	}
	c.open[x] = struct{}{}
	return nil
}

func (c *client) remove(x child) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.open, x)
}

// noteSeen remembers what a subscription delivered, for the case that it could not commit it.
func (c *client) noteSeen(at place, end int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seen[at] = max(c.seen[at], end)
}

func (c *client) seenOf(at place) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seen[at]
}

// Close ends every subscription and publisher. What is unsettled comes back to the group's other members.
func (c *client) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*closeTimeout)
	defer cancel()
	c.mu.Lock()
	c.closed = true
	children, producer := c.open, c.producer
	c.open, c.producer = map[child]struct{}{}, nil
	c.mu.Unlock()
	var wg sync.WaitGroup
	errs := make([]error, len(children))
	i := 0
	for x := range children {
		at := &errs[i]
		wg.Go(func() { *at = x.Close(ctx) })
		i++
	}
	wg.Wait()
	if producer != nil {
		producer.Close()
	}
	return errors.Join(errs...)
}
