package nats

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/shove-dev/shove/broker"
)

// maxTick bounds how late the watchdog may be.
const maxTick = 5 * time.Second

// keep renews the server's patience with what is unsettled, buffered deliveries included (nats.go#1929), watches that
// the consumers are still there, and measures the time now and then.
func (s *subscription) keep() {
	tick := time.NewTicker(min(s.ackWait/6, maxTick))
	defer tick.Stop()
	measured := time.Now()
	busy := make(chan struct{}, 1) // one request at a time, never in the way of renewing
	apart := func(f func()) {
		select {
		case busy <- struct{}{}:
			s.wg.Go(func() { f(); <-busy })
		default:
		}
	}
	for {
		select {
		case <-s.conn.done:
			s.lose(fmt.Errorf("%w: connection lost", broker.ErrLost))
			return
		case <-s.ended:
			return
		case <-tick.C:
		}
		now := time.Now()
		s.renew(now)
		for _, p := range s.pullers {
			if p.silent(now) {
				apart(func() { s.look(p) })
			}
		}
		if now.Sub(measured) > measureEvery {
			measured = now
			apart(s.remeasure)
		}
		s.topUp()
	}
}

// renew tells the server that deliveries are still at work, unless their lease is over: those it redelivers.
func (s *subscription) renew(now time.Time) {
	var due []string
	freed := false
	s.mu.Lock()
	for e := s.list.head; e != nil; {
		next := e.next
		age := now.Sub(e.renewed)
		switch leased := e.until.IsZero() || now.Before(e.until); {
		case leased && age >= s.ackWait/3 && age < s.ackWait:
			due = append(due, e.msg.Reply)
			e.renewed = now
		case age >= s.ackWait && e.state == unsettled:
			// The server may have redelivered it: it is no longer ours.
			s.forget(e)
			freed = true
		}
		e = next
	}
	if freed {
		s.dropForgotten()
	}
	s.mu.Unlock()
	for _, reply := range due {
		_ = s.conn.Publish(reply, progress)
	}
}

// dropForgotten takes deliveries that are no longer ours out of the buffer. The mutex is held.
func (s *subscription) dropForgotten() {
	kept := s.buffer[:0]
	for _, d := range s.buffer {
		if entryOf(d).state != settled {
			kept = append(kept, d)
		}
	}
	clear(s.buffer[len(kept):])
	s.buffer = kept
}

// look finds out why nothing is heard of a puller's requests.
func (s *subscription) look(p *puller) {
	ctx, cancel := context.WithTimeout(context.Background(), apiTimeout)
	defer cancel()
	err := p.check(ctx)
	switch {
	case err == nil:
		s.topUp()
	case errors.Is(err, broker.ErrLost):
		s.lose(err)
	default:
		s.logger.Warn("nothing is heard of a NATS consumer", "stream", p.stream, "consumer", p.consumer, "error", err)
	}
}

func (s *subscription) remeasure() {
	ctx, cancel := context.WithTimeout(context.Background(), apiTimeout)
	defer cancel()
	if _, err := s.measure(ctx); err != nil {
		s.logger.Warn("could not measure the difference to the clock of the NATS server", "queue", s.queue, "error", err)
	}
}
