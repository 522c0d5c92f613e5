package memory

import (
	"context"
	"fmt"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// client stands for one process that is connected to the server.
type client struct {
	server *Server
	name   string

	// Guarded by server.mu.
	subs   map[*subscription]struct{}
	closed bool
	killed bool
	gone   chan struct{} // closed when the present connection is cut; made when somebody waits for it
}

// usable says why nothing can be started on the client. The server's mutex is held.
func (c *client) usable() error {
	switch {
	case c.killed:
		return fmt.Errorf("in-memory client %q was killed: %w", c.name, broker.ErrUnavailable)
	case c.closed:
		return fmt.Errorf("in-memory client %q: %w", c.name, broker.ErrClosed)
	}
	return c.server.errDown()
}

func (c *client) Subscribe(ctx context.Context, cfg broker.Subscribe) (broker.Subscription, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	name, err := readName(cfg.Topology, cfg.Role)
	if err != nil {
		return nil, err
	}
	c.server.mu.Lock()
	defer c.server.mu.Unlock()
	if err := c.usable(); err != nil {
		return nil, err
	}
	q := c.server.queues[name]
	if q == nil {
		return nil, fmt.Errorf("subscribe to queue %q: %w", name, broker.ErrNotFound)
	}
	s := newSubscription(c, q, cfg)
	c.subs[s] = struct{}{}
	q.subs = append(q.subs, s)
	return s, nil
}

// readName is the queue that a subscription reads.
func readName(t topology.Topology, role broker.Role) (string, error) {
	if role == broker.ReadMain {
		return t.Source, nil
	}
	if t.DeadLetter == "" {
		return "", fmt.Errorf("topology %q has no dead-letter queue to read: %w", t.Queue, broker.ErrUnsupported)
	}
	return t.DeadLetter, nil
}

func (c *client) Close(context.Context) error {
	c.server.mu.Lock()
	defer c.server.mu.Unlock()
	if c.closed || c.killed {
		return nil
	}
	c.closed = true
	for s := range c.subs {
		s.end(broker.ErrClosed, uncounted)
	}
	c.disconnect()
	delete(c.server.clients, c)
	return nil
}

// cut ends the present connection as a network failure would: everything unsettled comes back, counted.
func (c *client) cut() {
	for s := range c.subs {
		s.end(broker.ErrLost, counted)
	}
	c.disconnect()
}

// disconnect wakes who waits for a confirm on the present connection.
func (c *client) disconnect() {
	if c.gone != nil {
		close(c.gone)
		c.gone = nil
	}
}

// connection is closed when the present connection ends.
func (c *client) connection() <-chan struct{} {
	if c.gone == nil {
		c.gone = make(chan struct{})
	}
	return c.gone
}
