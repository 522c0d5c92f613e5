package runtime

import (
	"sync"
	"time"
)

// lanes keep the messages of one key in order: the next one is not begun before the one ahead of it is settled, also
// while that one waits in place (K1). Different keys run concurrently.
type lanes struct {
	on    bool
	mu    sync.Mutex
	byKey map[string]*lane
}

type lane struct {
	key    string
	parked []*task
}

func (l *lanes) open() {
	l.on, l.byKey = true, map[string]*lane{}
}

// enter puts a task into its key's lane. It reports whether the task is at the head and may go on.
func (l *lanes) enter(t *task) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	ln := l.byKey[t.d.Key]
	if ln == nil {
		ln = &lane{key: t.d.Key}
		l.byKey[t.d.Key] = ln
		t.lane = ln
		return true
	}
	t.lane = ln
	ln.parked = append(ln.parked, t)
	return false
}

// leave ends the head's turn and returns the next task of the lane, if any.
func (l *lanes) leave(t *task) *task {
	l.mu.Lock()
	defer l.mu.Unlock()
	ln := t.lane
	if len(ln.parked) == 0 {
		delete(l.byKey, ln.key)
		return nil
	}
	next := ln.parked[0]
	ln.parked[0] = nil
	ln.parked = ln.parked[1:]
	return next
}

// takeParked removes every task that waits behind another one.
func (l *lanes) takeParked() (tasks []*task) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, ln := range l.byKey {
		for _, t := range ln.parked {
			t.lane = nil
			tasks = append(tasks, t)
		}
		ln.parked = nil
	}
	return tasks
}

// leaveLane ends a settled task's turn and starts the next one of its key.
func (s *session) leaveLane(t *task) {
	if t.lane == nil {
		return
	}
	next := s.lanes.leave(t)
	switch {
	case next == nil:
	case s.stopping.Load() || next.revoked():
		s.release(next)
	case !s.refused(next, s.c.settings.Load(), time.Now()):
		s.c.queue.push(next)
	}
}

// failedKey says whether an earlier message of a key failed on a FailAll topology (K4).
func (c *consumer) failedKey(key string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, failed := c.failedKeys[key]
	return failed
}

func (c *consumer) failKey(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failedKeys == nil {
		c.failedKeys = map[string]struct{}{}
	}
	c.failedKeys[key] = struct{}{}
}
