package rabbitmq

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/topology"
)

// maxPrefetch is the largest that basic.qos can say; 0 would be no bound at all.
const maxPrefetch = 1<<16 - 1

// slabSize is how many entries are allocated at once. Larger slabs keep more settled messages in memory for the sake
// of one slow one.
const slabSize = 32

// subscription is one consumer on one channel: one generation of delivery tags. When the channel is gone it is over,
// and nothing of it is ever settled through another channel (M3).
type subscription struct {
	client   *client
	conn     *conn
	ch       *amqp.Channel
	queue    string
	tag      string
	topology topology.Topology
	role     broker.Role
	prefetch int
	counts   counting
	logger   *slog.Logger

	deliveries <-chan amqp.Delivery
	closes     chan *amqp.Error
	cancels    chan string

	mu       sync.Mutex
	buffer   []*broker.Delivery // delivered by the server, not yet returned by Receive
	hint     int                // the length of the last batch
	slab     []entry
	list     list // unsettled deliveries, those in buffer included
	stopping bool
	closed   bool
	lost     error // why the channel is gone

	arrived chan struct{} // buffer went from empty to not empty
	stopped chan struct{} // closed by Stop and Close
	ended   chan struct{} // closed when the server sends no more deliveries
	handed  chan struct{} // closed when, after ended, what was not received is handed back

	ackMu  sync.Mutex  // orders acknowledgements on the wire
	copies *confirmers // where copies are published
}

var consumers atomic.Uint64

func newSubscription(c *client, cn *conn, ch *amqp.Channel, queue string, in broker.Subscribe) *subscription {
	prefetch := min(max(in.Prefetch, 1), maxPrefetch)
	o, _ := parseOptions(in.Options) // checked by source
	name := in.Consumer
	if name == "" {
		name = "shove"
	}
	return &subscription{
		client:   c,
		conn:     cn,
		ch:       ch,
		queue:    queue,
		tag:      header.Clip(name, 200) + "-" + strconv.FormatUint(consumers.Add(1), 10),
		topology: in.Topology,
		role:     in.Role,
		prefetch: prefetch,
		counts: counting{
			quorum:     in.Role == broker.ReadDeadLetter || o.QueueType == quorumQueue,
			deadLetter: in.Role == broker.ReadDeadLetter,
		},
		logger:  cmp.Or(in.Logger, c.dialer.logger),
		closes:  ch.NotifyClose(make(chan *amqp.Error, 1)),
		cancels: ch.NotifyCancel(make(chan string, 1)), // at most one comes: there is one consumer
		copies:  newConfirmers(c.publish),
		arrived: make(chan struct{}, 1),
		stopped: make(chan struct{}),
		ended:   make(chan struct{}),
		handed:  make(chan struct{}),
	}
}

// pump takes deliveries from the library until there are no more, so that what is there can be received at once, and
// so that the connection never waits for a slow caller. What it buffers is bounded by the prefetch.
func (s *subscription) pump() {
	defer close(s.handed)
	for d := range s.deliveries {
		s.mu.Lock()
		e := s.entry()
		e.raw, e.sub = d, s
		e.fill(s.counts)
		s.list.push(e)
		if s.buffer == nil {
			s.buffer = make([]*broker.Delivery, 0, max(4, s.hint))
		}
		s.buffer = append(s.buffer, &e.Delivery)
		wake := len(s.buffer) == 1
		s.mu.Unlock()
		if wake {
			select {
			case s.arrived <- struct{}{}:
			default:
			}
		}
	}
	s.finish()
}

func (s *subscription) entry() *entry {
	if len(s.slab) == 0 {
		s.slab = make([]entry, min(slabSize, s.prefetch))
	}
	e := &s.slab[0]
	s.slab = s.slab[1:]
	return e
}

// finish runs when the library sends no more deliveries: the consumer was cancelled by Stop, cancelled by the server,
// or its channel is gone.
func (s *subscription) finish() {
	s.mu.Lock()
	unreceived := s.buffer
	s.buffer = nil
	if s.stopping && !s.ch.IsClosed() {
		s.mu.Unlock()
		close(s.ended)
		s.handBack(unreceived)
		return
	}
	if s.lost == nil {
		s.lost = s.reason()
	}
	mine := s.stopping || s.closed
	s.mu.Unlock()
	close(s.ended)
	if !mine {
		s.logger.Warn("RabbitMQ subscription lost", "queue", s.queue, "consumer", s.tag, "error", s.lost)
	}
	if !s.ch.IsClosed() {
		// Cancelled by the server: because the queue was deleted, or, on 4.3, because of the consumer timeout. The
		// latter takes away only what is overdue, and acknowledging that is silently ignored: give up the channel,
		// so that all of it comes back and no acknowledgement is trusted wrongly.
		_ = s.ch.Close()
	}
}

// reason tells why deliveries ended, from the notifications that the library sends before it ends them.
func (s *subscription) reason() error {
	select {
	case err := <-s.closes:
		if err != nil {
			return fmt.Errorf("%w: %w", broker.ErrLost, scrubbed(err))
		}
	default:
	}
	select {
	case _, ok := <-s.cancels:
		if ok {
			return fmt.Errorf("%w: cancelled by the server: the queue was deleted, or a delivery was held for longer than the consumer timeout", broker.ErrLost)
		}
	default:
	}
	return fmt.Errorf("%w: channel closed", broker.ErrLost)
}

// handBack returns what was delivered and not received. A queue with a delivery limit puts it at the head. Only from
// 4.3 on it is not counted.
func (s *subscription) handBack(unreceived []*broker.Delivery) {
	if len(unreceived) == 0 {
		return
	}
	s.ackMu.Lock()
	defer s.ackMu.Unlock()
	for _, d := range unreceived {
		e := d.Native.(*entry)
		s.mu.Lock()
		s.list.remove(e)
		e.state = settled
		s.mu.Unlock()
		if s.ch.Nack(e.raw.DeliveryTag, false, true) != nil {
			return // the channel is gone, and the broker has them back
		}
	}
}

// Receive returns what is there, waiting for the first.
func (s *subscription) Receive(ctx context.Context) ([]*broker.Delivery, error) {
	for {
		batch, err := s.take()
		if len(batch) > 0 || err != nil {
			return batch, err
		}
		select {
		case <-s.arrived:
		case <-s.ended:
		case <-s.stopped:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (s *subscription) take() ([]*broker.Delivery, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.stopping || s.closed:
		return nil, broker.ErrClosed
	case s.lost != nil:
		return nil, s.lost
	}
	batch := s.buffer
	s.buffer = nil
	if len(batch) > 0 {
		s.hint = len(batch)
	}
	return batch, nil
}

// Stop cancels the consumer and hands back what was not received. Deliveries that were received stay ours: on a
// channel without a consumer they can be settled as before.
func (s *subscription) Stop(ctx context.Context) error {
	s.mu.Lock()
	first := !s.stopping && !s.closed
	if first {
		s.stopping = true
		close(s.stopped)
	}
	gone := s.lost != nil || s.closed
	s.mu.Unlock()
	if gone {
		return nil
	}
	if first {
		err := do(ctx, func() error { return s.ch.Cancel(s.tag, false) })
		if interrupted(err) {
			return fmt.Errorf("stop consuming from queue %q: %w: %w", s.queue, broker.ErrUnavailable, err)
		}
		// Any other error means that the channel is gone, and with it the consumer.
	}
	select {
	case <-s.handed:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stop consuming from queue %q: %w: %w", s.queue, broker.ErrUnavailable, ctx.Err())
	}
}

// Close closes the channel; the broker then has everything unsettled back, at the head of the queue.
func (s *subscription) Close(ctx context.Context) error {
	if !s.end() {
		return nil
	}
	s.client.remove(s)
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	_ = s.copies.close(ctx)
	if err := do(ctx, s.ch.Close); err != nil && !s.ch.IsClosed() {
		return fmt.Errorf("close the subscription to queue %q: %w", s.queue, mapError(err))
	}
	select {
	case <-s.handed:
	case <-ctx.Done():
	}
	return nil
}

// end marks the subscription as closed and reports whether it was not.
func (s *subscription) end() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	if !s.stopping {
		close(s.stopped)
	}
	s.stopping, s.closed = true, true
	if s.lost == nil {
		s.lost = fmt.Errorf("%w: subscription closed", broker.ErrLost)
	}
	return true
}

func (s *subscription) abandon() {
	s.end()
	s.copies.abandon()
}

// list is the unsettled deliveries in the order of their tags.
type list struct{ head, tail *entry }

func (l *list) push(e *entry) {
	e.prev, e.next = l.tail, nil
	if l.tail != nil {
		l.tail.next = e
	} else {
		l.head = e
	}
	l.tail = e
}

func (l *list) remove(e *entry) {
	switch {
	case e.prev != nil:
		e.prev.next = e.next
	case l.head == e:
		l.head = e.next
	default:
		return // not in the list
	}
	if e.next != nil {
		e.next.prev = e.prev
	} else {
		l.tail = e.prev
	}
	e.prev, e.next = nil, nil
}
