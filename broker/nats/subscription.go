package nats

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	natsgo "github.com/nats-io/nats.go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// Acknowledgements (https://docs.nats.io/reference/reference-protocols/nats_api_reference).
var (
	ack      = []byte("+ACK")
	nak      = []byte("-NAK")
	progress = []byte("+WPI")
)

// subscription is a run of consuming on one connection. When the connection is lost it is over, although JetStream
// itself would take later acknowledgements: a delivery that may have been redelivered is not settled (M3).
type subscription struct {
	client      *client
	conn        *conn
	plan        plan
	role        broker.Role
	queue       string // what is read, for people
	prefetch    int
	concurrency int
	lease       time.Duration
	inPlace     bool
	logger      *slog.Logger

	pullers    []*puller
	mover      *mover // nil: the server moves held messages
	ackWait    time.Duration
	scheduling bool
	clock      clock

	mu       sync.Mutex
	buffer   []*broker.Delivery // came, and Receive did not return it yet
	hint     int                // the length of the last batch
	slab     []entry
	list     list // unsettled deliveries, those in buffer included
	out      int  // of them those that Receive returned
	stopping bool
	closed   bool
	lost     error

	arrived chan struct{} // buffer went from empty to not empty
	stopped chan struct{} // closed by Stop and Close
	ended   chan struct{} // closed when lost or closed
	stopOne sync.Once
	endOne  sync.Once
	stopErr error
	wg      sync.WaitGroup
}

func newSubscription(c *client, cn *conn, p plan, in broker.Subscribe) *subscription {
	s := &subscription{
		client: c, conn: cn, plan: p, role: in.Role, queue: p.topology.Queue, prefetch: max(in.Prefetch, 1), concurrency: max(in.Concurrency, 1),
		lease: in.Lease, inPlace: in.InPlace || p.topology.External, logger: cmp.Or(in.Logger, c.dialer.logger),
		arrived: make(chan struct{}, 1), stopped: make(chan struct{}), ended: make(chan struct{}),
	}
	if in.Role == broker.ReadDeadLetter {
		s.queue, s.inPlace = p.topology.DeadLetter, false
	}
	return s
}

// start finds the consumers, making those anew that are ours and missing, and begins to pull.
func (s *subscription) start(ctx context.Context) error {
	s.ackWait = maxAckWait
	info, err := s.measure(ctx)
	if err != nil {
		return err
	}
	if info != nil {
		s.scheduling = info.Config.flag("allow_msg_schedules") && !s.client.dialer.mode.park
	}
	for _, k := range s.plan.consumers {
		if (k.role == topology.RoleDeadLetter) != (s.role == broker.ReadDeadLetter) {
			continue
		}
		info, err := ensureConsumer(ctx, s.conn, k)
		if err != nil {
			return fmt.Errorf("consumer %q of stream %q: %w", k.name, k.stream, err)
		}
		if wait := time.Duration(info.Config.number("ack_wait")); wait > 0 {
			s.ackWait = min(s.ackWait, wait)
		}
		p := &puller{stream: k.stream, consumer: k.name}
		p.take = func(m *natsgo.Msg) { s.take(p, m) }
		p.moved, p.broke = s.topUp, s.lose
		if err := p.open(s.conn, info); err != nil {
			return err
		}
		s.pullers = append(s.pullers, p)
	}
	if s.role == broker.ReadMain && len(s.plan.holds) > 0 {
		m, err := openMover(ctx, s)
		if err != nil {
			return err
		}
		s.mover = m
	}
	s.wg.Go(s.keep)
	s.topUp()
	return nil
}

// measure reads the time from the main queue's stream, where there is one.
func (s *subscription) measure(ctx context.Context) (*streamInfo, error) {
	if s.role != broker.ReadMain || s.plan.topology.External {
		return nil, nil
	}
	name := physical(s.plan.topology, s.plan.topology.Queue)
	info, err := s.clock.measure(ctx, s.conn, name, 2)
	if err != nil {
		return nil, fmt.Errorf("stream %q: %w", name, err)
	}
	return info, nil
}

func ensureConsumer(ctx context.Context, c *conn, k consumer) (*consumerInfo, error) {
	info, err := c.consumer(ctx, k.stream, k.name)
	if err == nil || k.foreign || !hasCode(err, codeConsumerNotFound) {
		return info, err
	}
	cfg, err := k.create()
	if err != nil {
		return nil, err
	}
	if err := c.setConsumer(ctx, k.stream, cfg); err != nil {
		return nil, err
	}
	return c.consumer(ctx, k.stream, k.name)
}

// take takes one message. Several pullers share the subscription, each with a goroutine of its own.
func (s *subscription) take(p *puller, m *natsgo.Msg) {
	o, prefix, ok := parseReply(m.Reply, p.prefix)
	p.prefix = prefix
	if !ok {
		p.less(1)
		s.logger.Error("a message whose reply subject is not one of JetStream is left alone", "stream", p.stream, "reply", m.Reply)
		return
	}
	now := time.Now()
	var w waiter
	known := false
	if s.inPlace && o.delivered > 1 {
		k := waitKey{p.stream, p.consumer, o.seq}
		if w, known = s.client.waiting.take(k); known {
			if left := w.early(o, now); left > 0 {
				w.delivered = o.delivered
				s.client.waiting.put(k, w)
				_ = s.conn.Publish(m.Reply, nakAfter(left))
				p.less(1)
				s.topUp()
				return
			}
		}
	}
	s.mu.Lock()
	p.less(1)
	if s.lost != nil {
		s.mu.Unlock()
		s.client.owe([]owed{{reply: m.Reply, until: now.Add(s.ackWait)}})
		return
	}
	e := s.entry()
	e.msg, e.sub, e.from, e.origin, e.renewed = m, s, p, o, now
	e.fill()
	switch {
	case !s.inPlace:
		e.Crashes = e.DeliveryCount - 1
	case o.delivered > 1:
		e.resume(w, known)
	}
	s.list.push(e)
	if s.buffer == nil {
		s.buffer = make([]*broker.Delivery, 0, max(4, s.hint))
	}
	s.buffer = append(s.buffer, &e.Delivery)
	wake := len(s.buffer) == 1
	s.mu.Unlock()
	if wake {
		s.wake()
	}
}

func (s *subscription) wake() {
	select {
	case s.arrived <- struct{}{}:
	default:
	}
}

func (s *subscription) entry() *entry {
	if len(s.slab) == 0 {
		s.slab = make([]entry, min(slabSize, s.prefetch))
	}
	e := &s.slab[0]
	s.slab = s.slab[1:]
	return e
}

// topUp requests what there is room for, in requests that are large enough to be worth one and never so late that a
// handler has to wait for it.
func (s *subscription) topUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping || s.closed || s.lost != nil {
		return
	}
	if len(s.buffer) > 0 && s.out < s.prefetch { // what there was no room for before
		s.wake()
	}
	share := max(1, s.prefetch/len(s.pullers))
	worth := max(1, min(share/4, share-2*s.concurrency))
	for _, p := range s.pullers {
		asked := int(p.requested.Load())
		others := s.list.n
		if len(s.pullers) > 1 {
			others = min(others, share-1) // one queue must not keep the other from being read
		}
		if room := share - others - asked; room >= worth || room > 0 && asked == 0 && s.list.n <= s.concurrency {
			p.request(room)
		}
	}
}

// Receive returns what is there, waiting for the first.
func (s *subscription) Receive(ctx context.Context) ([]*broker.Delivery, error) {
	for {
		batch, err := s.next()
		if len(batch) > 0 || err != nil {
			s.reached(stepReceived)
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

func (s *subscription) next() ([]*broker.Delivery, error) {
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
	if most := s.prefetch - s.out; len(batch) > most { // several pullers together may have got more
		s.buffer = append(s.buffer, batch[max(most, 0):]...)
		batch = batch[:max(most, 0)]
	}
	if len(batch) == 0 {
		return nil, nil
	}
	s.hint = len(batch)
	s.out += len(batch)
	var until time.Time
	if s.lease > 0 {
		until = time.Now().Add(s.lease)
	}
	for _, d := range batch {
		e := entryOf(d)
		e.received, e.until = true, until
	}
	return batch, nil
}

// forget takes an entry out of the unsettled ones. The mutex is held.
func (s *subscription) forget(e *entry) {
	e.state = settled
	s.list.remove(e)
	if e.received {
		s.out--
		e.received = false
	}
}

// Extend renews leases (broker.Extender). What the server counts is renewed by keep.
func (s *subscription) Extend(_ context.Context, ds []*broker.Delivery, d time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lost != nil {
		return s.lost
	}
	until := time.Now().Add(d)
	for _, bd := range ds {
		if e := entryOf(bd); e != nil && e.sub == s && e.state != settled && e.until.Before(until) && !e.until.IsZero() {
			e.until = until
		}
	}
	return nil
}

// lose ends the subscription because its connection or its consumer is gone.
func (s *subscription) lose(err error) {
	s.mu.Lock()
	if s.lost != nil || s.closed {
		s.mu.Unlock()
		return
	}
	s.lost = err
	var left []owed
	if s.conn.isDone() { // else the consumer is gone, and with it what it delivered
		for e := s.list.head; e != nil; e = e.next {
			left = append(left, owed{reply: e.msg.Reply, until: e.renewed.Add(s.ackWait)})
		}
	}
	s.buffer = nil
	mine := s.stopping
	s.mu.Unlock()
	s.client.owe(left)
	s.endOne.Do(func() { close(s.ended) })
	s.abandon()
	if !mine {
		s.logger.Warn("NATS subscription lost", "queue", s.queue, "error", err)
	}
}

// abandon ends the pullers without a word.
func (s *subscription) abandon() {
	for _, p := range s.pullers {
		if p.sub != nil {
			_ = p.sub.Unsubscribe()
		}
	}
	if s.mover != nil {
		s.mover.abandon()
	}
}

// Stop ends fetching and hands back what was not received.
func (s *subscription) Stop(ctx context.Context) error {
	s.mu.Lock()
	if !s.stopping {
		s.stopping = true
		close(s.stopped)
	}
	gone := s.lost != nil || s.closed
	s.mu.Unlock()
	if gone {
		return nil
	}
	s.stopOne.Do(func() { s.stopErr = s.stopPulling(ctx) })
	return s.stopErr
}

func (s *subscription) stopPulling(ctx context.Context) error {
	var errs []error
	for _, p := range s.pullers {
		errs = append(errs, p.stop(ctx))
	}
	if s.mover != nil {
		errs = append(errs, s.mover.stop(ctx))
	}
	s.mu.Lock()
	unreceived := s.buffer
	s.buffer = nil
	for _, d := range unreceived {
		s.forget(entryOf(d))
	}
	s.mu.Unlock()
	if len(unreceived) > 0 || s.unsettled() > 0 {
		s.forgetRequests(ctx)
	}
	for _, d := range unreceived {
		_ = s.conn.Publish(entryOf(d).msg.Reply, nak) // an error means that the connection is gone
	}
	if len(unreceived) > 0 {
		errs = append(errs, ignoreClosed(s.conn.flush(ctx)))
	}
	return errors.Join(errs...)
}

// forgetRequests makes the server drop requests whose inbox is gone, which it does when it is asked about a consumer.
// Else it tries to serve them with what is handed back, and puts the first message behind the others.
func (s *subscription) forgetRequests(ctx context.Context) {
	for _, p := range s.pullers {
		if p.requested.Load() > 0 {
			_, _ = p.conn.consumer(ctx, p.stream, p.consumer) // it is about the order only
		}
	}
}

func (s *subscription) unsettled() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.list.n
}

func ignoreClosed(err error) error {
	if errors.Is(err, natsgo.ErrConnectionClosed) {
		return nil
	}
	return mapError(err)
}

// Close hands back everything unsettled, in the order in which it came.
func (s *subscription) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	err := s.Stop(ctx)
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		s.wg.Wait()
		return nil
	}
	s.closed = true
	var back []string
	for e := s.list.head; e != nil; {
		next := e.next
		if e.state == unsettled {
			back = append(back, e.msg.Reply)
			s.forget(e)
		}
		e = next
	}
	gone := s.lost != nil
	if !gone {
		s.lost = fmt.Errorf("%w: subscription closed", broker.ErrLost)
	}
	s.mu.Unlock()
	s.client.remove(s)
	s.endOne.Do(func() { close(s.ended) })
	s.abandon()
	s.wg.Wait()
	if gone {
		return nil
	}
	for _, reply := range back {
		_ = s.conn.Publish(reply, nak)
	}
	return errors.Join(err, ignoreClosed(s.conn.flush(ctx)))
}
