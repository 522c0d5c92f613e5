package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"sync"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
)

// admin declares and observes over one AMQP connection and, where the endpoint names it, the management API.
type admin struct {
	dialer     *dialer
	link       *link
	management *management // nil: none

	mu   sync.Mutex
	idle []*amqp.Channel
}

var _ broker.Admin = (*admin)(nil)

// maxIdleChannels is how many channels are kept for the next calls.
const maxIdleChannels = 8

func openAdmin(ctx context.Context, cfg broker.Config) (*admin, error) {
	d, err := newDialer(cfg)
	if err != nil {
		return nil, err
	}
	a := &admin{dialer: d, link: newLink(d, "admin"), management: newManagement(d)}
	if _, err := a.link.get(ctx); err != nil {
		return nil, err
	}
	return a, nil
}

// Server identifies the cluster by its name, which every connection learns without the management API, and the vhost.
// Give clusters different names where their nodes have equal ones.
func (a *admin) Server(ctx context.Context) (broker.Server, error) {
	c, err := a.link.get(ctx)
	if err != nil {
		return broker.Server{}, err
	}
	cluster, _ := c.Properties["cluster_name"].(string)
	if cluster == "" {
		cluster = a.dialer.endpoint.address()
	}
	text, _ := c.Properties["version"].(string)
	out := broker.Server{ID: cluster + "/" + url.PathEscape(a.dialer.endpoint.vhost), Version: text}
	if !c.version.atLeast(3, 10) {
		out.Warnings = append(out.Warnings, fmt.Sprintf("RabbitMQ %s: held messages may be lost, because quorum queues move expired messages at least once only from 3.10 on: upgrade the server", text))
	}
	if a.management != nil {
		out.DetailsErr = a.management.check(ctx)
	}
	if a.management != nil && out.DetailsErr == nil && !c.version.atLeast(4, 0) {
		off, err := a.management.flagOff(ctx, "stream_queue")
		switch {
		case errors.Is(err, broker.ErrUnauthorized): // the API shows flags to administrators only
			out.Warnings = append(out.Warnings, "whether the feature flag stream_queue is on is shown to administrators only, and held messages whose target is missing are lost without it: "+
				"look once with rabbitmqctl list_feature_flags, or give this user the tag administrator")
		case err != nil:
			out.Warnings = append(out.Warnings, "the feature flag stream_queue could not be read: "+err.Error())
		case off:
			out.Warnings = append(out.Warnings, "the feature flag stream_queue is off: held messages whose target is missing are lost; run rabbitmqctl enable_feature_flag stream_queue")
		}
	}
	return out, nil
}

// acquire lends a channel. A failed call closes its channel, so that each caller has one of its own.
func (a *admin) acquire(ctx context.Context) (*amqp.Channel, error) {
	a.mu.Lock()
	for len(a.idle) > 0 {
		ch := a.idle[len(a.idle)-1]
		a.idle = a.idle[:len(a.idle)-1]
		if !ch.IsClosed() {
			a.mu.Unlock()
			return ch, nil
		}
	}
	a.mu.Unlock()
	_, ch, err := a.link.channel(ctx)
	return ch, err
}

func (a *admin) release(ch *amqp.Channel) {
	if ch.IsClosed() {
		return
	}
	a.mu.Lock()
	keep := len(a.idle) < maxIdleChannels
	if keep {
		a.idle = append(a.idle, ch)
	}
	a.mu.Unlock()
	if !keep {
		_ = ch.Close()
	}
}

// call runs one request on a channel. One that is not answered before ctx is over gives up its channel.
func (a *admin) call(ctx context.Context, f func(*amqp.Channel) error) error {
	ch, err := a.acquire(ctx)
	if err != nil {
		return err
	}
	err = do(ctx, func() error { return f(ch) })
	if interrupted(err) {
		go func() { _ = ch.Close() }()
		return fmt.Errorf("no answer from RabbitMQ: %w: %w", broker.ErrUnavailable, err)
	}
	a.release(ch)
	return mapError(err)
}

// Declare creates what is missing, the targets of hold queues first.
func (a *admin) Declare(ctx context.Context, d broker.Declaration) error {
	p, err := newPlan(d)
	if err != nil {
		return err
	}
	if p.verify != "" {
		if _, err := a.inspect(ctx, p.verify); err != nil {
			if errors.Is(err, broker.ErrNotFound) {
				return fmt.Errorf("external queue %q: %w: declare it where it belongs, or remove external: true", p.verify, err)
			}
			return fmt.Errorf("external queue %q: %w", p.verify, err)
		}
	}
	for _, q := range p.queues {
		if err := a.declare(ctx, q); err != nil {
			return fmt.Errorf("declare queue %q: %w", q.name, err)
		}
	}
	for _, b := range p.bindings {
		err := a.call(ctx, func(ch *amqp.Channel) error { return ch.QueueBind(p.main, b.RoutingKey, b.Exchange, false, nil) })
		switch {
		case errors.Is(err, broker.ErrNotFound):
			return fmt.Errorf("bind queue %q to exchange %q: %w: create the exchange, or correct rabbitmq.bindings", p.main, b.Exchange, err)
		case err != nil:
			return fmt.Errorf("bind queue %q to exchange %q: %w", p.main, b.Exchange, err)
		}
	}
	for _, b := range p.unbind {
		err := a.call(ctx, func(ch *amqp.Channel) error { return ch.QueueUnbind(p.main, b.RoutingKey, b.Exchange, nil) })
		if err != nil && !errors.Is(err, broker.ErrNotFound) {
			return fmt.Errorf("unbind queue %q from exchange %q: %w", p.main, b.Exchange, err)
		}
	}
	return nil
}

// declare declares one queue. One that exists with equal arguments is adopted.
func (a *admin) declare(ctx context.Context, q queue) error {
	err := a.declareArgs(ctx, q.name, q.args)
	var c *broker.ConflictError
	if q.args[argType] == classicQueue && errors.As(err, &c) && c.Diff.Property == argType && c.Diff.Have == "none" {
		// Before 4.0 a classic queue that was declared without a type differs from one with it in name only.
		args := make(amqp.Table, len(q.args))
		for k, v := range q.args {
			if k != argType {
				args[k] = v
			}
		}
		err = a.declareArgs(ctx, q.name, args)
	}
	return err
}

func (a *admin) declareArgs(ctx context.Context, name string, args amqp.Table) error {
	return a.call(ctx, func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclare(name, true, false, false, false, args)
		return err
	})
}

// inspect asks for a queue that may not exist (ErrNotFound).
func (a *admin) inspect(ctx context.Context, name string) (amqp.Queue, error) {
	var q amqp.Queue
	err := a.call(ctx, func(ch *amqp.Channel) error {
		got, err := ch.QueueDeclarePassive(name, true, false, false, false, nil)
		if err == nil {
			q = got
		}
		return err
	})
	if err != nil {
		return amqp.Queue{}, err
	}
	return q, nil
}

// Depths counts messages. The management API knows those in flight and those that are stuck, and is up to 7 s late;
// its numbers are not mixed with the live ones of AMQP, lest a message that moved between the two is counted nowhere.
func (a *admin) Depths(ctx context.Context, names []string) ([]broker.Depth, error) {
	if a.management != nil {
		listed, err := a.management.queues(ctx, names)
		if err == nil {
			out := make([]broker.Depth, len(names))
			for i, name := range names {
				out[i] = listed[name].depth(name)
			}
			return out, nil
		}
		a.dialer.logger.Warn("counting messages without the management API", "error", err)
	}
	out := make([]broker.Depth, len(names))
	for i, name := range names {
		q, err := a.inspect(ctx, name)
		switch {
		case errors.Is(err, broker.ErrNotFound):
			out[i] = broker.Depth{Queue: name, Missing: true}
		case errors.Is(err, broker.ErrUnavailable), errors.Is(err, broker.ErrClosed):
			return nil, fmt.Errorf("count messages of queue %q: %w", name, err)
		case err != nil: // unknown, and the others are not
			a.dialer.logger.Warn("counting messages of one queue", "queue", name, "error", err)
			out[i] = broker.Depth{Queue: name}
		default:
			out[i] = broker.Depth{Queue: name, Ready: broker.Known(int64(q.Messages)), Consumers: broker.Known(int64(q.Consumers))}
		}
	}
	return out, nil
}

// depth of a nil queue is that of a missing one.
func (q *listedQueue) depth(name string) broker.Depth {
	if q == nil {
		return broker.Depth{Queue: name, Missing: true}
	}
	d := broker.Depth{Queue: name}
	if q.unreachable() {
		return d
	}
	d.Ready, d.InFlight, d.Stuck, d.Consumers = counted(q.Ready), counted(q.Unacked), counted(q.DLX), counted(q.Consumers)
	if q.Type == classicQueue && q.Ready != nil {
		d.Stuck = broker.Known(0) // classic queues do not move messages at least once
	}
	return d
}

// unreachable says that the queue has no leader, so that its numbers are the last ones known.
func (q *listedQueue) unreachable() bool {
	return slices.Contains([]string{"down", "crashed", "stopped", "minority"}, q.State)
}

func counted(n *int64) broker.Count {
	if n == nil {
		return broker.Count{}
	}
	return broker.Known(*n)
}

// Delete deletes queues, whatever is in them. RabbitMQ tells how many ready messages went; those in flight and those
// that are stuck are not in the number. It is never asked to delete only if empty or unused: on a quorum queue that
// closes the whole connection.
func (a *admin) Delete(ctx context.Context, names []string) ([]broker.Deleted, error) {
	out := make([]broker.Deleted, 0, len(names))
	for _, name := range names {
		var n int
		err := a.call(ctx, func(ch *amqp.Channel) error {
			got, err := ch.QueueDelete(name, false, false, false)
			if err == nil {
				n = got
			}
			return err
		})
		switch {
		case errors.Is(err, broker.ErrNotFound):
			n = 0
		case err != nil:
			return out, fmt.Errorf("delete queue %q: %w", name, err)
		}
		out = append(out, broker.Deleted{Queue: name, Messages: broker.Known(int64(n))})
	}
	return out, nil
}

func (a *admin) Close(ctx context.Context) error {
	if a.management != nil {
		a.management.close()
	}
	return a.link.close(ctx)
}
