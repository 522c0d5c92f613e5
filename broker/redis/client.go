package redis

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/broker"
)

// client consumes and publishes over a pool of connections. Each subscription has one of its own beside it, on which
// it waits for messages.
type client struct {
	nodes  *nodes
	logger *slog.Logger

	mu     sync.Mutex
	open   map[*subscription]struct{}
	known  map[string]bool // streams that were there: one that is gone was destroyed, and is made anew
	closed bool
	// ended is closed by Close; leaving are subscriptions whose messages are being handed back.
	ended    chan struct{}
	finished bool // nothing is added to leaving any more
	leaving  sync.WaitGroup
}

var _ broker.Client = (*client)(nil)

func openClient(cfg broker.Config) (*client, error) {
	d, err := newDialer(cfg)
	if err != nil {
		return nil, err
	}
	return &client{nodes: newNodes(d), logger: d.logger, open: map[*subscription]struct{}{}, known: map[string]bool{}, ended: make(chan struct{})}, nil
}

// Subscribe starts consuming as a consumer of the group, under a name of its own.
func (c *client) Subscribe(ctx context.Context, in broker.Subscribe) (broker.Subscription, error) {
	if err := c.usable(); err != nil {
		return nil, err
	}
	s, err := c.newSubscription(ctx, in)
	if err != nil {
		return nil, err
	}
	if err := s.begin(ctx); err != nil {
		s.abort()
		return nil, fmt.Errorf("consume from stream %q: %w", s.streams[0], mapError(err))
	}
	c.mu.Lock()
	closed := c.closed
	if !closed {
		c.open[s] = struct{}{}
		for _, stream := range s.streams {
			c.known[stream] = true
		}
	}
	c.mu.Unlock()
	if closed {
		_ = s.Close(ctx)
		return nil, errClientClosed
	}
	return s, nil
}

var errClientClosed = fmt.Errorf("redis client: %w", broker.ErrClosed)

func (c *client) usable() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errClientClosed
	}
	return nil
}

// wasThere says whether a stream of ours existed when this client last looked.
func (c *client) wasThere(stream string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.known[stream]
}

func (c *client) remove(s *subscription) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.open, s)
}

// whileLeaving runs f in a goroutine that Close waits for.
func (c *client) whileLeaving(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.finished {
		c.leaving.Go(f)
	}
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
	return &publisher{client: c, key: physical(p.topology, p.topology.Queue), external: p.topology.External}, nil
}

// Close ends every subscription, handing back what is unsettled, and the connections.
func (c *client) Close(ctx context.Context) error {
	c.mu.Lock()
	first := !c.closed
	c.closed = true
	open := c.open
	c.open = map[*subscription]struct{}{}
	c.mu.Unlock()
	if !first {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	var errs []error
	var wg sync.WaitGroup
	var mu sync.Mutex
	for s := range open {
		wg.Go(func() {
			if err := s.Close(ctx); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
		})
	}
	wg.Wait()
	close(c.ended)
	c.mu.Lock()
	c.finished = true
	c.mu.Unlock()
	c.leaving.Wait() // bounded: it gives up soon after ended is closed
	return errors.Join(append(errs, c.nodes.close())...)
}

// resolve finds the key of a stream that somebody else owns. It is called as our names are, in braces, where another
// topology declared it, and has its plain name where a foreign program made it; both have one slot.
func (n *nodes) resolve(ctx context.Context, key string) (string, error) {
	tagged, plain := goredis.NewCmd(ctx, "TYPE", key), (*goredis.Cmd)(nil)
	cmds := []goredis.Cmder{tagged}
	if u := untagged(key); u != "" {
		plain = goredis.NewCmd(ctx, "TYPE", u)
		cmds = append(cmds, plain)
	}
	if err := n.exec(ctx, key, cmds...); err != nil {
		if plain == nil || !begins(plain.Err(), "NOPERM") || tagged.Err() != nil {
			return "", err
		}
	}
	switch kind, _ := tagged.Text(); kind {
	case "stream":
		return key, nil
	case "none":
	default:
		return "", conflict(key, "stream", kind)
	}
	if plain != nil {
		if kind, _ := plain.Text(); kind == "stream" {
			return untagged(key), nil
		}
	}
	return "", fmt.Errorf("stream %q: %w", key, broker.ErrNotFound)
}

// createGroup makes sure that a group exists. It begins at an entry's id, "0" for the first there is: what was published
// before the group was made must be seen.
func (n *nodes) createGroup(ctx context.Context, stream, group, from string, makeStream bool) error {
	args := []any{"XGROUP", "CREATE", stream, group, from}
	if makeStream {
		args = append(args, "MKSTREAM")
	}
	err := n.exec(ctx, stream, goredis.NewCmd(ctx, args...))
	switch {
	case begins(err, "BUSYGROUP"):
		return nil
	case begins(err, "WRONGTYPE"):
		kind := goredis.NewCmd(ctx, "TYPE", stream)
		_ = n.exec(ctx, stream, kind)
		have, _ := kind.Text()
		return conflict(stream, "stream", have)
	}
	return err
}

// pause waits, or returns false when one of the channels is closed first.
func pause(d time.Duration, ends ...<-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	var a, b <-chan struct{}
	if len(ends) > 0 {
		a = ends[0]
	}
	if len(ends) > 1 {
		b = ends[1]
	}
	select {
	case <-t.C:
		return true
	case <-a:
	case <-b:
	}
	return false
}
