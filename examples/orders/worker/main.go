// The worker of the orders example: it handles orders and drains their dead letters. Everything that can be
// configured comes from the operator through the file that SHOVE_CONFIG names; bound here is only which code handles
// which Topology.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/shove-dev/shove/broker/kafka"
	"github.com/shove-dev/shove/broker/nats"
	"github.com/shove-dev/shove/broker/rabbitmq"
	"github.com/shove-dev/shove/broker/redis"
	"github.com/shove-dev/shove/examples/orders/order"
	"github.com/shove-dev/shove/runtime"
)

func main() {
	log := slog.New(slog.NewTextHandler(os.Stdout, nil))
	os.Exit(runtime.Main(
		runtime.Drivers(rabbitmq.Driver, nats.Driver, redis.Driver, kafka.Driver),
		runtime.Logger(log),
		runtime.Handle[order.Order](order.Topology, &shop{log: log, stock: &stock{}}),
	))
}

// shop handles orders. What it needs are its fields: there is one shop, and its methods run concurrently.
type shop struct {
	log   *slog.Logger
	stock *stock
}

// Handle is called for every order. Its context ends at the handler's deadline.
func (s *shop) Handle(ctx context.Context, o order.Order, m *runtime.Metadata) runtime.Outcome {
	if o.Kind == order.Declined {
		return runtime.Reject.Because("the card was declined")
	}
	if wait := time.Until(o.NotBefore); wait > 0 {
		return runtime.Defer.Until(o.NotBefore).Because("not on sale yet")
	}
	if err := s.stock.reserve(ctx, o, m.RetryCount); err != nil {
		return runtime.FromError(err) // any error is a retry
	}
	s.log.Debug("order shipped", "order", o.ID, "retries", m.RetryCount, "deferred", m.DeferCount)
	return runtime.Ack
}

// HandleDead is called for every dead letter, because it is there; the message is gone when it returns.
func (s *shop) HandleDead(_ context.Context, o order.Order, m *runtime.DeadMetadata) {
	s.log.Warn("order given up", "order", o.ID, "reason", m.Death.Reason, "detail", m.Death.Detail, "attempts", len(m.History()))
}

// stock stands for a service that the handler calls, with every fault that such a service has.
type stock struct{}

var errStockDown = errors.New("the stock service is down")

func (s *stock) reserve(ctx context.Context, o order.Order, retries uint32) error {
	switch {
	case o.Kind == order.Flaky && retries < o.Failures:
		return fmt.Errorf("reserve order %q: %w", o.ID, errStockDown)
	case o.Kind == order.Hopeless:
		return fmt.Errorf("reserve order %q: %w", o.ID, errStockDown)
	case o.Kind == order.Slow && retries == 0:
		<-ctx.Done() // hangs until the deadline
		return ctx.Err()
	case o.Kind == order.Broken && retries == 0:
		var shelf map[string]int
		shelf[o.ID]++ // a bug: the map was never made
	}
	return nil
}
