package memory

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
)

// delivery is one handing out of a message. Its fields below Delivery are guarded by the server's mutex.
type delivery struct {
	broker.Delivery
	entry uint64
	death *header.Death

	sub        *subscription
	msg        *stored // nil once settled or lost
	settling   bool    // its copy is stored and waits for the confirm
	expires    time.Time
	prev, next *delivery
}

func (d *delivery) DeliveryID() string {
	return strconv.FormatUint(d.entry, 10) + "-" + strconv.FormatUint(uint64(d.DeliveryCount), 10)
}

// MessageID is the entry, which a redelivery keeps and a copy does not.
func (d *delivery) MessageID() string {
	server := d.sub.client.server
	if server.opts.Anonymous {
		return ""
	}
	return server.opts.ID + "/" + strconv.FormatUint(d.entry, 10)
}

func (d *delivery) Death() header.Death {
	if d.death == nil {
		return header.Death{}
	}
	return *d.death
}

// subscription is guarded by the server's mutex, except for what newSubscription sets.
type subscription struct {
	client *client
	server *Server
	queue  *queue
	cfg    broker.Subscribe
	wake   chan struct{}

	waiting   bool // Receive waits on wake
	err       error
	stopped   bool
	ended     bool
	first     *delivery // unsettled, oldest first
	last      *delivery
	unsettled int
	timer     *time.Timer
	armed     bool
}

func newSubscription(c *client, q *queue, cfg broker.Subscribe) *subscription {
	cfg.Prefetch = max(cfg.Prefetch, 1)
	return &subscription{client: c, server: c.server, queue: q, cfg: cfg, wake: make(chan struct{}, 1)}
}

// Receive takes from the queue when asked, so that no message waits in a consumer that does not ask for it.
func (s *subscription) Receive(ctx context.Context) ([]*broker.Delivery, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		s.server.mu.Lock()
		if s.err != nil {
			defer s.server.mu.Unlock()
			return nil, s.err
		}
		if ds := s.take(); len(ds) > 0 {
			s.reached(StepReceived)
			s.server.mu.Unlock()
			return ds, nil
		}
		s.waiting = true
		s.server.mu.Unlock()
		select {
		case <-s.wake:
		case <-ctx.Done():
		}
	}
}

// take delivers what is there.
func (s *subscription) take() []*broker.Delivery {
	q := s.queue
	n := min(q.ready(), s.cfg.Prefetch-s.unsettled)
	if n <= 0 || s.server.down {
		return nil
	}
	if q.props.sequenced {
		if q.active != nil && q.active != s {
			return nil
		}
		q.active = s
	}
	slab := make([]delivery, n)
	ds := make([]*broker.Delivery, n)
	var expires time.Time
	if s.cfg.Lease > 0 {
		expires = time.Now().Add(s.cfg.Lease)
		s.armLease(s.cfg.Lease)
	}
	for i := range slab {
		d, m := &slab[i], q.pop()
		m.deliveries++
		d.Delivery = broker.Delivery{
			Body: m.body, Headers: m.headers, ContentType: m.contentType, Key: m.key,
			Redelivered: m.returned, DeliveryCount: m.deliveries, Crashes: m.crashes,
			Partition: -1, Offset: -1, Timestamp: m.at, Native: d,
		}
		d.entry, d.death, d.sub, d.msg, d.expires = m.entry, m.death, s, m, expires
		s.link(d)
		ds[i] = &d.Delivery
	}
	return ds
}

func (s *subscription) link(d *delivery) {
	d.prev = s.last
	if s.last == nil {
		s.first = d
	} else {
		s.last.next = d
	}
	s.last = d
	s.unsettled++
	s.queue.unsettled++
}

// unlink takes a delivery out of the unsettled ones and returns its message.
func (s *subscription) unlink(d *delivery) *stored {
	if d.prev == nil {
		s.first = d.next
	} else {
		d.prev.next = d.next
	}
	if d.next == nil {
		s.last = d.prev
	} else {
		d.next.prev = d.prev
	}
	m := d.msg
	d.msg, d.prev, d.next, d.settling = nil, nil, nil, false
	s.unsettled--
	s.queue.unsettled--
	return m
}

// counting says how a message that comes back is counted.
type counting uint8

const (
	uncounted counting = iota // as if it had not been delivered
	delivered                 // the delivery counts
	counted                   // the delivery counts, and as one that ended without an outcome (C10)
)

func (s *subscription) giveBack(d *delivery, how counting) {
	m := s.unlink(d)
	switch how {
	case uncounted:
		m.deliveries--
	case counted:
		m.crashes++
	}
	s.queue.putBack(m)
}

// signal wakes Receive.
func (s *subscription) signal() {
	if s.waiting {
		s.waiting = false
		select {
		case s.wake <- struct{}{}:
		default:
		}
	}
}

func (s *subscription) Stop(context.Context) error {
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	s.stop(broker.ErrClosed)
	return nil
}

func (s *subscription) stop(err error) {
	if s.stopped {
		return
	}
	s.stopped, s.err = true, err
	for i, other := range s.queue.subs {
		if other == s {
			s.queue.subs = append(s.queue.subs[:i:i], s.queue.subs[i+1:]...)
			break
		}
	}
	s.signal()
	s.passOn()
}

// passOn lets the next subscription of a sequenced queue begin, once nothing that it could overtake is unsettled.
func (s *subscription) passOn() {
	if s.queue.active == s && s.stopped && s.unsettled == 0 {
		s.queue.active = nil
		s.queue.wake()
	}
}

func (s *subscription) Close(context.Context) error {
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	s.end(broker.ErrClosed, uncounted)
	return nil
}

// end is the end of the subscription; what is unsettled goes back.
func (s *subscription) end(err error, how counting) {
	if s.ended {
		return
	}
	s.ended = true
	s.stop(err)
	s.err = err
	for s.first != nil {
		s.giveBack(s.first, how)
	}
	if s.timer != nil {
		s.timer.Stop()
	}
	delete(s.client.subs, s)
	s.passOn()
}

// armLease sets the timer of the leases unless it runs: one timer serves all, and settling never touches it.
func (s *subscription) armLease(d time.Duration) {
	switch {
	case s.armed:
		return
	case s.timer == nil:
		s.timer = time.AfterFunc(d, s.expireLeases)
	default:
		s.timer.Reset(d)
	}
	s.armed = true
}

// expireLeases returns what was held longer than its lease to the queue.
func (s *subscription) expireLeases() {
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	s.armed = false
	if s.ended {
		return
	}
	now := time.Now()
	var soonest time.Time
	for d := s.first; d != nil; {
		next := d.next
		if !now.Before(d.expires) {
			s.giveBack(d, counted)
		} else if soonest.IsZero() || d.expires.Before(soonest) {
			soonest = d.expires
		}
		d = next
	}
	if !soonest.IsZero() {
		s.armLease(soonest.Sub(now))
	}
	s.passOn()
}

// Extend renews leases (broker.Extender). A delivery that is settled or lost is passed over.
func (s *subscription) Extend(_ context.Context, ds []*broker.Delivery, by time.Duration) error {
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	if s.ended {
		return s.err
	}
	if s.cfg.Lease <= 0 {
		return nil
	}
	until := time.Now().Add(by)
	for _, bd := range ds {
		if d, err := s.held(bd); err == nil && d.expires.Before(until) {
			d.expires = until
		}
	}
	return nil
}

var errNotHeld = fmt.Errorf("the delivery is settled already, or its lease ran out: %w", broker.ErrLost)

// held finds the delivery that is to be settled.
func (s *subscription) held(bd *broker.Delivery) (*delivery, error) {
	d, ok := bd.Native.(*delivery)
	switch {
	case !ok:
		return nil, errors.New("not a delivery of the in-memory broker")
	case d.sub != s:
		return nil, fmt.Errorf("a delivery of another subscription: %w", broker.ErrLost)
	case d.msg == nil || d.settling:
		return nil, errNotHeld
	}
	return d, nil
}
