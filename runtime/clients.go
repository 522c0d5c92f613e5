package runtime

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/runtime/config"
)

// sharedClient is the connection to a broker, shared by everything that uses it. One that a reload replaced is closed
// when its last user is done.
type sharedClient struct {
	broker.Client
	entry    config.Broker
	users    int
	replaced bool
}

// closeClientTimeout bounds closing a connection.
const closeClientTimeout = 10 * time.Second

// client returns the connection to a broker; release says that the caller is done with it.
func (r *Runtime) client(ctx context.Context, b config.Broker) (c broker.Client, release func(), err error) {
	r.clientsMu.Lock()
	defer r.clientsMu.Unlock()
	if r.closed {
		return nil, nil, fmt.Errorf("the runtime ended: %w", broker.ErrClosed)
	}
	shared := r.clients[b.Name]
	if shared == nil || !shared.entry.SameConnection(b) {
		driver, ok := r.drivers[b.Kind]
		if !ok {
			return nil, nil, fmt.Errorf("no driver for %s: %w: add runtime.Drivers(%s.Driver)", b.Kind, broker.ErrUnsupported, b.Kind)
		}
		cfg, err := r.connection(b)
		if err != nil {
			return nil, nil, err
		}
		opened, err := driver.OpenClient(ctx, cfg)
		if err != nil {
			return nil, nil, err
		}
		if shared != nil {
			shared.replaced = true
			if shared.users == 0 {
				r.closeReplaced(shared)
			}
		}
		shared = &sharedClient{Client: opened, entry: b}
		r.clients[b.Name] = shared
	}
	shared.users++
	return shared.Client, func() { r.releaseClient(shared) }, nil
}

func (r *Runtime) releaseClient(c *sharedClient) {
	r.clientsMu.Lock()
	defer r.clientsMu.Unlock()
	c.users--
	if c.replaced && c.users == 0 {
		r.closeReplaced(c)
	}
}

func (r *Runtime) closeReplaced(c *sharedClient) {
	r.spawn(nil, func() {
		ctx, cancel := context.WithTimeout(context.Background(), closeClientTimeout)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			r.log.Warn("could not close a replaced connection", "broker", c.entry.Name, "error", err)
		}
	})
}

// closeClients ends every connection.
func (r *Runtime) closeClients() error {
	r.clientsMu.Lock()
	defer r.clientsMu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), closeClientTimeout)
	defer cancel()
	var errs []error
	for name, c := range r.clients {
		if err := c.Close(ctx); err != nil {
			errs = append(errs, fmt.Errorf("close the connection to %q: %w", name, err))
		}
	}
	clear(r.clients)
	r.closed = true
	return errors.Join(errs...)
}
