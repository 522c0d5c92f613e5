package runtime

import (
	"context"
	"errors"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/runtime/metrics"
)

// hold lists an unsettled task, so that its lease is renewed.
func (s *session) hold(t *task) {
	if _, ok := s.sub.(broker.Extender); !ok {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.link(t)
}

func (s *session) link(t *task) {
	t.listed, t.next = true, s.held
	if s.held != nil {
		s.held.prev = t
	}
	s.held = t
}

// swapHeld lists the task that takes the place of one with the same delivery.
func (s *session) swapHeld(t *task) {
	if _, ok := s.sub.(broker.Extender); !ok {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for old := s.held; old != nil; old = old.next {
		if old.d == t.d {
			s.unlink(old)
			break
		}
	}
	s.link(t)
}

func (s *session) unhold(t *task) {
	if !t.listed {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unlink(t)
}

func (s *session) unlink(t *task) {
	if !t.listed {
		return
	}
	if t.prev != nil {
		t.prev.next = t.next
	} else {
		s.held = t.next
	}
	if t.next != nil {
		t.next.prev = t.prev
	}
	t.prev, t.next, t.listed = nil, nil, false
}

// renew keeps the leases of everything unsettled, three times per lease (H11).
func (s *session) renew(ext broker.Extender) {
	tick := time.NewTicker(s.lease / 3)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-s.ended:
			return
		}
		s.mu.Lock()
		var ds []*broker.Delivery
		for t := s.held; t != nil; t = t.next {
			ds = append(ds, t.d)
		}
		s.mu.Unlock()
		if len(ds) == 0 {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), s.lease/3)
		if err := ext.Extend(ctx, ds, s.lease); err != nil && !errors.Is(err, broker.ErrLost) {
			s.c.rt.metrics.BackendError(s.c.settings.Load().broker.Kind, metrics.Consume)
			s.c.log.Warn("could not renew the leases of unsettled messages; they may be redelivered", "messages", len(ds), "error", err)
		}
		cancel()
	}
}
