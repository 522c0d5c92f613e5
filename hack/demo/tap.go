package main

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/hack/demo/ledger"
)

// traceExchange is where RabbitMQ's firehose publishes a copy of every message that is published in a virtual host or
// delivered to a consumer, with its properties and headers. See https://www.rabbitmq.com/docs/firehose.
const traceExchange = "amq.rabbitmq.trace"

// tap listens to the firehose. What it reports was seen by the broker.
type tap struct {
	conn *amqp.Connection
	done chan struct{}

	mu      sync.Mutex
	books   *ledger.Ledger
	waiting []ledger.Event // until there are books
}

// openTap binds a queue of its own to the firehose. Events wait until book says where they go.
func openTap(url string) (*tap, error) {
	conn, err := amqp.Dial(url)
	if err != nil {
		return nil, fmt.Errorf("connect the tap: %w", err)
	}
	deliveries, err := subscribe(conn)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open the tap: %w", err), conn.Close())
	}
	t := &tap{conn: conn, done: make(chan struct{})}
	go func() {
		defer close(t.done)
		for d := range deliveries {
			for _, e := range events(d) {
				t.record(e)
			}
		}
	}()
	return t, nil
}

func (t *tap) record(e ledger.Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.books == nil {
		t.waiting = append(t.waiting, e)
		return
	}
	t.books.Record(e)
}

// book has all events so far and from now on recorded, in their order.
func (t *tap) book(l *ledger.Ledger) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, e := range t.waiting {
		l.Record(e)
	}
	t.books, t.waiting = l, nil
}

func subscribe(conn *amqp.Connection) (<-chan amqp.Delivery, error) {
	ch, err := conn.Channel()
	if err != nil {
		return nil, err
	}
	q, err := ch.QueueDeclare("", false, true, true, false, nil)
	if err != nil {
		return nil, err
	}
	for _, key := range []string{"publish.#", "deliver.#"} {
		if err := ch.QueueBind(q.Name, key, traceExchange, false, nil); err != nil {
			return nil, err
		}
	}
	return ch.Consume(q.Name, "", true, true, false, false, nil)
}

func (t *tap) close() error {
	err := t.conn.Close()
	<-t.done
	return err
}

// events reads one message of the firehose: a publish names every queue that it was routed to.
func events(d amqp.Delivery) []ledger.Event {
	properties, _ := d.Headers["properties"].(amqp.Table)
	base := ledger.Event{}
	base.MessageID, _ = properties["message_id"].(string)
	if h, ok := properties["headers"].(amqp.Table); ok {
		base.Headers = header.Map(h)
	}
	if queue, ok := strings.CutPrefix(d.RoutingKey, "deliver."); ok {
		base.Queue = queue
		redelivered, _ := header.Int(d.Headers["redelivered"])
		base.Redelivered = redelivered != 0
		return []ledger.Event{base}
	}
	base.Published = true
	routed, _ := d.Headers["routed_queues"].([]any)
	var out []ledger.Event
	for _, q := range routed {
		e := base
		e.Queue, _ = q.(string)
		out = append(out, e)
	}
	return out
}
