package nats

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	natsgo "github.com/nats-io/nats.go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
)

// mover moves held messages that the server does not move by itself: those that are parked because the server has no
// scheduled messages, or had none when they were held. A parked message that is not due yet goes back to the server
// with the rest of its delay, so that none is kept in memory. Every subscription of the queue has a mover, and they
// share the work.
type mover struct {
	sub    *subscription
	puller *puller

	mu  sync.Mutex
	due []*natsgo.Msg

	wake chan struct{}
	over chan struct{}
	once sync.Once
	done chan struct{}
}

// moveBatch is how many parked messages are asked for at once.
const moveBatch = 200

// openMover returns nil where there is no consumer of parked messages: then there are none.
func openMover(ctx context.Context, s *subscription) (*mover, error) {
	main := physical(s.plan.topology, s.plan.topology.Queue)
	info, err := s.conn.consumer(ctx, main, parkedConsumer)
	switch {
	case errors.Is(err, broker.ErrNotFound) && s.scheduling:
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("the consumer of parked messages: %w", err)
	}
	m := &mover{sub: s, wake: make(chan struct{}, 1), over: make(chan struct{}), done: make(chan struct{})}
	m.puller = &puller{stream: main, consumer: parkedConsumer, take: m.take, moved: m.topUp, broke: s.lose}
	if err := m.puller.open(s.conn, info); err != nil {
		return nil, err
	}
	go m.run()
	m.topUp()
	return m, nil
}

func (m *mover) topUp() {
	if asked := int(m.puller.requested.Load()); asked <= moveBatch/2 {
		m.puller.request(moveBatch - asked)
	}
}

// take sorts a parked message: back to the server, or to be moved.
func (m *mover) take(msg *natsgo.Msg) {
	defer m.topUp()
	m.puller.less(1)
	ms, err := strconv.ParseInt(msg.Header.Get(header.Due), 10, 64)
	if err == nil {
		if left := m.sub.clock.left(time.Now(), time.UnixMilli(ms)); left > 0 {
			_ = m.sub.conn.Publish(msg.Reply, nakAfter(left))
			return
		}
	}
	m.mu.Lock()
	m.due = append(m.due, msg)
	m.mu.Unlock()
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

func (m *mover) run() {
	defer close(m.done)
	for {
		select {
		case <-m.wake:
		case <-m.over:
			return
		case <-m.sub.conn.done:
			return
		}
		m.mu.Lock()
		batch := m.due
		m.due = nil
		m.mu.Unlock()
		if len(batch) > 0 {
			m.move(batch)
		}
	}
}

// move writes due messages to the main subject and acknowledges those that are stored. The others come again when
// their ack wait is over.
func (m *mover) move(batch []*natsgo.Msg) {
	main := m.puller.stream
	out := make([]outgoing, len(batch))
	for i, msg := range batch {
		h := plainHeaders(msg.Header)
		o, _, _ := parseReply(msg.Reply, "")
		h[headerMsgID] = []string{main + "." + strconv.FormatUint(o.seq, 36) + "." + strconv.FormatInt(o.stamp, 36)}
		out[i] = outgoing{subject: main, stream: main, header: h, data: msg.Data}
	}
	ctx, cancel := context.WithTimeout(context.Background(), apiTimeout)
	defer cancel()
	failed := 0
	for i, err := range m.sub.conn.flights.send(out).wait(ctx) {
		if err == nil {
			err = m.sub.conn.Publish(batch[i].Reply, ack)
		}
		if err != nil {
			if failed++; failed == 1 && !m.sub.conn.isDone() {
				m.sub.logger.Warn("could not move held messages that are due; they are tried again", "queue", m.sub.queue, "error", err)
			}
		}
	}
}

// stop ends moving. What is due and not moved goes back.
func (m *mover) stop(ctx context.Context) error {
	err := m.puller.stop(ctx)
	m.abandon()
	select {
	case <-m.done:
	case <-ctx.Done():
		return errors.Join(err, ctx.Err())
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, msg := range m.due {
		_ = m.sub.conn.Publish(msg.Reply, nak)
	}
	m.due = nil
	return err
}

func (m *mover) abandon() {
	m.once.Do(func() { close(m.over) })
	if m.puller.sub != nil {
		_ = m.puller.sub.Unsubscribe()
	}
}
