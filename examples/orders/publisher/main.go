// The publisher of the orders example: a shop's front end that sends orders at a steady rate until it is stopped.
// RATE is how many a second; default 20.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/shove-dev/shove/broker/kafka"
	"github.com/shove-dev/shove/broker/nats"
	"github.com/shove-dev/shove/broker/rabbitmq"
	"github.com/shove-dev/shove/broker/redis"
	"github.com/shove-dev/shove/examples/orders/order"
	"github.com/shove-dev/shove/runtime"
)

func main() { os.Exit(start()) }

func start() int {
	log := slog.New(slog.NewTextHandler(os.Stdout, nil))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	err := run(ctx, log)
	if err != nil {
		log.Error("ended", "error", err)
	}
	return runtime.ExitCode(err)
}

func run(ctx context.Context, log *slog.Logger) error {
	rate, err := rateFrom(os.Getenv("RATE"))
	if err != nil {
		return err
	}
	r, err := runtime.New(runtime.Drivers(rabbitmq.Driver, nats.Driver, redis.Driver, kafka.Driver), runtime.Logger(log))
	if err != nil {
		return err
	}
	orders, err := runtime.NewPublisher[order.Order](r, order.Topology, runtime.PublisherConfig{Type: "shop.order"})
	if err != nil {
		return err
	}
	published := make(chan struct{})
	go func() {
		defer close(published)
		publish(ctx, log, orders, rate)
	}()
	err = r.Run(ctx) // serves metrics and follows the configuration; there is nothing to consume
	<-published
	return err
}

func rateFrom(text string) (int, error) {
	if text == "" {
		return 20, nil
	}
	rate, err := strconv.Atoi(text)
	if err != nil || rate < 1 || rate > 10_000 {
		return 0, fmt.Errorf("RATE: %q: use 1 to 10000 orders a second", text)
	}
	return rate, nil
}

// publish sends orders until the context ends. An order whose fate is unknown is sent again with its id, so that a
// consumer can tell that it is the same.
func publish(ctx context.Context, log *slog.Logger, orders *runtime.Publisher[order.Order], rate int) {
	tick := time.NewTicker(time.Second / time.Duration(rate))
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		o := order.Make(n, time.Now())
		for {
			// The order's own id makes it the same message every time, whatever became of the last attempt.
			err := orders.Publish(ctx, o, runtime.WithMessageID(o.ID), runtime.WithKey(o.Customer))
			if err == nil {
				break
			}
			log.Warn("order is not confirmed; trying again", "order", o.ID, "error", err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Second):
			}
		}
	}
}
