package runtime

import (
	"time"

	"github.com/shove-dev/shove/broker"
)

// revoked says whether a delivery is being taken away while its subscription goes on: its partition moves to another
// consumer.
func (t *task) revoked() bool {
	r, ok := t.d.Native.(broker.Revocable)
	return ok && r.Revoked()
}

// giveBackRevoked gives back what no handler has begun of the deliveries that are taken away. What runs may finish.
func (s *session) giveBackRevoked() {
	tasks := s.c.queue.remove(func(t *task) bool { return t.s == s && t.revoked() })
	s.mu.Lock()
	var waiting []*task
	for t, timer := range s.waiting {
		if t.revoked() {
			timer.Stop()
			delete(s.waiting, t)
			waiting = append(waiting, t)
		}
	}
	s.mu.Unlock()
	for _, t := range append(tasks, waiting...) {
		s.release(t) // those behind it in its lane follow when it is settled
	}
}

// leaveLaneLost ends the turn of a task that is lost. Those behind it in its lane are lost, too, where its subscription
// goes on: they are given back. Else they wait for the end of the session.
func (s *session) leaveLaneLost(t *task) {
	if t.lane == nil || !t.revoked() {
		return
	}
	next := s.lanes.leave(t)
	switch {
	case next == nil:
	case next.revoked() || s.stopping.Load():
		s.release(next)
	case !s.refused(next, s.c.settings.Load(), time.Now()):
		s.c.queue.push(next)
	}
}
