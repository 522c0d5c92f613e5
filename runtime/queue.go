package runtime

import "sync"

// taskQueue hands tasks from the receiver to the workers. A batch goes in under one lock, which costs a tenth of a
// channel hop per message.
type taskQueue struct {
	mu     sync.Mutex
	wake   sync.Cond
	tasks  []*task
	head   int
	idle   int // workers that wait
	closed bool
}

func newTaskQueue() *taskQueue {
	q := &taskQueue{}
	q.wake.L = &q.mu
	return q
}

func (q *taskQueue) push(ts ...*task) {
	if len(ts) == 0 {
		return
	}
	q.mu.Lock()
	if q.head > 0 && q.head == len(q.tasks) {
		q.tasks, q.head = q.tasks[:0], 0
	}
	q.tasks = append(q.tasks, ts...)
	for range min(len(ts), q.idle) {
		q.wake.Signal()
	}
	q.mu.Unlock()
}

// pop blocks until there is a task; nil means that the worker should end, because the queue is closed or surplus
// says so.
func (q *taskQueue) pop(surplus func() bool) *task {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		switch {
		case q.closed || surplus():
			return nil
		case q.head < len(q.tasks):
			t := q.tasks[q.head]
			q.tasks[q.head] = nil
			q.head++
			return t
		}
		q.idle++
		q.wake.Wait()
		q.idle--
	}
}

// remove takes out the tasks that match.
func (q *taskQueue) remove(match func(*task) bool) (removed []*task) {
	q.mu.Lock()
	defer q.mu.Unlock()
	kept := make([]*task, 0, len(q.tasks)-q.head)
	for _, t := range q.tasks[q.head:] {
		if match(t) {
			removed = append(removed, t)
		} else {
			kept = append(kept, t)
		}
	}
	q.tasks, q.head = kept, 0
	return removed
}

// nudge wakes every waiting worker, to look at surplus again.
func (q *taskQueue) nudge() {
	q.mu.Lock()
	q.wake.Broadcast()
	q.mu.Unlock()
}

func (q *taskQueue) close() {
	q.mu.Lock()
	q.closed = true
	q.wake.Broadcast()
	q.mu.Unlock()
}

// reopen lets workers take tasks again after close, for a consumer that begins anew. A worker whose handler outlived
// the close goes on as one of its workers.
func (q *taskQueue) reopen() {
	q.mu.Lock()
	q.closed = false
	q.mu.Unlock()
}
