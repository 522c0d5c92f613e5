package main

import (
	"context"
	"fmt"

	"github.com/shove-dev/shove/hack/demo/ledger"
)

// backend is the broker of the demo, and how the demo looks into it. Everything that it reports was counted by the
// broker.
type backend interface {
	// title names it to people.
	title() string
	// overlay says what the example's manifests have to be changed by.
	overlay(*overlayData)
	// connect is called once the example is applied.
	connect(context.Context) error
	// book has everything that happens from now on recorded. Nothing is published before.
	book(context.Context, *ledger.Ledger) error
	// queues counts, by the queue's name.
	queues(context.Context, ledger.Queues) (map[string]queueState, error)
	close() error
}

// queueState is how a queue stands. Numbers that the server has not computed yet are absent.
type queueState struct {
	Name      string `json:"name"`
	Ready     *int   `json:"messages_ready"`
	Unacked   *int   `json:"messages_unacknowledged"`
	Consumers *int   `json:"consumers"`
	Stats     struct {
		Publish, Ack int
		Deliver      int `json:"deliver_get"`
		Redeliver    int
	} `json:"message_stats"`
	// Unseen counts messages that the server has stored and the books do not know, where the server tells.
	Unseen int `json:"-"`
}

type user struct{ Name, Password string }

// startBackend starts the broker that the variable BROKER names.
func (d *demo) startBackend(ctx context.Context) error {
	var b backend
	var err error
	switch d.broker {
	case "embedded":
		b, err = startEmbedded(ctx, d.cluster, d.dir)
	case "rabbitmq":
		var r *rabbit
		if r, err = startRabbit(ctx, d.cluster, d.dir); r != nil {
			b = r
		}
	default:
		return unknownBroker(d.broker)
	}
	if b != nil {
		d.backend = b
		d.closers = append(d.closers, b.close)
	}
	return err
}

func unknownBroker(name string) error {
	return fmt.Errorf("BROKER=%q: use embedded (the default) or rabbitmq", name)
}
