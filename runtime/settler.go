package runtime

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/runtime/metrics"
	"github.com/shove-dev/shove/settle"
)

const (
	// copiers is how many batches of copies are on their way at once. Each waits for its confirms; several keep the
	// broker busy meanwhile.
	copiers = 4
	// settleTimeout bounds one call of Settle.
	settleTimeout = 30 * time.Second
	// copyAttempts is how often a copy is tried here before the message goes back to the broker for another
	// consumer to try (A10).
	copyAttempts = 5
	copyBackoff  = 200 * time.Millisecond
	maxBackoff   = 10 * time.Second
)

// settler collects tasks that are decided. One goroutine settles what needs no copy, some settle copies; each takes
// whatever has come together since its last call, so that batches grow with the load and an idle consumer adds no
// latency.
type settler struct {
	mu     sync.Mutex
	plain  []*task
	copies []*task
	closed bool

	wakePlain  chan struct{}
	wakeCopies chan struct{}
}

func (q *settler) init() {
	q.wakePlain = make(chan struct{}, 1)
	q.wakeCopies = make(chan struct{}, 1)
}

func (q *settler) take(list *[]*task, buf []*task) []*task {
	q.mu.Lock()
	taken := *list
	*list = buf[:0]
	q.mu.Unlock()
	return taken
}

// rest closes the settler and returns what it did not settle.
func (q *settler) rest() []*task {
	q.mu.Lock()
	defer q.mu.Unlock()
	all := append(q.plain, q.copies...)
	q.plain, q.copies, q.closed = nil, nil, true
	return all
}

// settle queues a decided task.
func (s *session) settle(t *task) {
	q := &s.settler
	list, wake := &q.plain, q.wakePlain
	if t.action.Kind.Copies() {
		list, wake = &q.copies, q.wakeCopies
	}
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		s.drop(t)
		return
	}
	*list = append(*list, t)
	first := len(*list) == 1
	q.mu.Unlock()
	if first {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
}

func (s *session) settleLoop() { s.settleFrom(&s.settler.plain, s.settler.wakePlain) }

func (s *session) copyLoop() { s.settleFrom(&s.settler.copies, s.settler.wakeCopies) }

func (s *session) settleFrom(list *[]*task, wake <-chan struct{}) {
	var buf []*task
	var batch []broker.Settlement
	for {
		select {
		case <-wake:
		case <-s.ended:
			return
		}
		runtime.Gosched() // let workers that are about to finish add to this batch
		for {
			tasks := s.settler.take(list, buf)
			if len(tasks) == 0 {
				buf = tasks
				break
			}
			batch = s.settleBatch(tasks, batch[:0])
			clear(tasks)
			buf = tasks
		}
	}
}

// settleBatch settles tasks in one call and deals with each that was not settled.
func (s *session) settleBatch(tasks []*task, batch []broker.Settlement) []broker.Settlement {
	now := time.Now()
	for _, t := range tasks {
		batch = append(batch, t.settlement(now))
	}
	ctx, cancel := context.WithTimeout(context.Background(), settleTimeout)
	err := s.sub.Settle(ctx, batch)
	cancel()
	var failed []broker.SettleItem
	if err != nil {
		if e, ok := errors.AsType[*broker.SettleError](err); ok {
			failed = e.Items
		} else { // not even tried: all of them
			for i := range tasks {
				failed = append(failed, broker.SettleItem{Index: i, Err: err})
			}
		}
	}
	slices.SortFunc(failed, func(a, b broker.SettleItem) int { return a.Index - b.Index })
	next := 0
	for i, t := range tasks {
		if next < len(failed) && failed[next].Index == i {
			s.unsettled(t, failed[next].Err)
			next++
			continue
		}
		s.settled(t)
	}
	clear(batch)
	return batch
}

// settled is the end of a task.
func (s *session) settled(t *task) {
	switch t.action.Kind {
	case settle.DeadLetter, settle.Drop:
		s.c.died(t)
		if t.action.FailKey && t.lane != nil {
			s.c.failKey(t.d.Key)
		}
	}
	s.leaveLane(t)
	s.drop(t)
}

// unsettled deals with a task that the backend could not settle.
func (s *session) unsettled(t *task, err error) {
	switch {
	case errors.Is(err, broker.ErrLost), errors.Is(err, broker.ErrClosed):
		s.c.log.Debug("settled too late: the broker redelivers it", "message", t)
		s.leaveLaneLost(t)
		s.drop(t)
		return
	case errors.Is(err, broker.ErrTooLarge) && t.reduce():
		s.c.log.Warn("a copy's headers do not fit the broker's frame; made smaller", "message", t, "error", err)
		s.settle(t)
		return
	}
	t.failures++
	s.c.rt.metrics.BackendError(s.c.settings.Load().broker.Kind, metrics.Ack)
	s.c.log.Error("could not settle a message; it comes back with its counts unchanged", "message", t, "action", t.action.Kind, "attempt", t.failures, "error", err)
	delay := min(copyBackoff<<min(t.failures-1, 10), maxBackoff)
	switch {
	case !t.action.Kind.Copies():
		// The message is still ours: acknowledge it again rather than handle it again.
		s.after(delay, t, func() { s.settle(t) })
	case t.failures < copyAttempts || t.lane != nil: // requeueing would lose a lane its order
		s.after(delay, t, func() { s.resume(t.again(t.facts.Retries, t.facts.Defers, t.facts.NotBefore, t.facts.History)) })
	default:
		t.action = settle.Action{Kind: settle.Requeue, Retries: t.facts.Retries, Defers: t.facts.Defers}
		s.after(delay, t, func() { s.settle(t) })
	}
}
