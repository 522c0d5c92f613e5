package memory

import (
	"container/heap"
	"time"

	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/topology"
)

// stored is a message in a queue, or delivered from it and not yet settled.
type stored struct {
	body        []byte
	headers     header.Map
	contentType string
	key         string
	death       *header.Death
	at          time.Time // when the broker took it
	due         time.Time // hold queues only
	entry       uint64    // identity within the server
	seq         uint64    // place in its queue
	deliveries  uint32
	crashes     uint32
	returned    bool // was delivered and came back
	next        *stored
}

// properties are what is fixed when a queue is declared.
type properties struct {
	role      topology.Role
	delay     time.Duration // hold queues: how long a message stays
	target    string        // hold queues: where it goes then
	sequenced bool          // one subscription at a time, so that nothing overtakes
	maxLength int           // zero: no bound
}

type queue struct {
	server *Server
	name   string
	props  properties

	fresh     fifo     // never delivered, in order of arrival
	back      returned // delivered and come back; all of them come before fresh
	seq       uint64
	unsettled int
	subs      []*subscription
	active    *subscription // sequenced queues only
	timer     *time.Timer   // hold queues only
}

// ready counts what could be delivered now, on a hold queue what waits.
func (q *queue) ready() int { return q.fresh.n + len(q.back) }

// push appends a message that is new in this queue. The server's mutex is held.
func (q *queue) push(m *stored, now time.Time) {
	q.seq++
	m.seq = q.seq
	if q.props.role == topology.RoleHold {
		m.due = now.Add(q.props.delay)
		q.fresh.push(m)
		if q.fresh.n == 1 {
			q.arm(q.props.delay)
		}
		return
	}
	q.fresh.push(m)
	q.wake()
}

// putBack returns a delivered message to its place.
func (q *queue) putBack(m *stored) {
	m.returned = true
	heap.Push(&q.back, m)
	q.wake()
}

// pop takes the next message, or nil.
func (q *queue) pop() *stored {
	if len(q.back) > 0 {
		return heap.Pop(&q.back).(*stored)
	}
	return q.fresh.pop()
}

func (q *queue) wake() {
	for _, s := range q.subs {
		s.signal()
	}
}

// arm sets the timer of a hold queue. Every message stays equally long, so that only the oldest one needs a timer.
func (q *queue) arm(d time.Duration) {
	if q.timer == nil {
		q.timer = time.AfterFunc(d, q.expire)
		return
	}
	q.timer.Reset(d)
}

// expire moves what is due to the target, and what has nowhere to go stays (it shows as stuck).
func (q *queue) expire() {
	q.server.mu.Lock()
	defer q.server.mu.Unlock()
	q.moveDue(time.Now())
}

func (q *queue) moveDue(now time.Time) {
	if q.props.role != topology.RoleHold || q.server.queues[q.name] != q || q.server.down {
		return
	}
	target := q.server.queues[q.props.target]
	for m := q.fresh.head; m != nil; m = q.fresh.head {
		if now.Before(m.due) {
			q.arm(m.due.Sub(now))
			return
		}
		if target == nil {
			return // declaring the target calls moveDue again
		}
		q.fresh.pop()
		target.push(m, now)
	}
}

// stuck counts messages that are due and could not be moved.
func (q *queue) stuck(now time.Time) int {
	n := 0
	if q.props.role == topology.RoleHold {
		for m := q.fresh.head; m != nil && m.due.Before(now); m = m.next {
			n++
		}
	}
	return n
}

// fifo is a linked list through stored.next.
type fifo struct {
	head, tail *stored
	n          int
}

func (f *fifo) push(m *stored) {
	m.next = nil
	if f.tail == nil {
		f.head = m
	} else {
		f.tail.next = m
	}
	f.tail = m
	f.n++
}

func (f *fifo) pop() *stored {
	m := f.head
	if m == nil {
		return nil
	}
	f.head = m.next
	if f.head == nil {
		f.tail = nil
	}
	m.next = nil
	f.n--
	return m
}

// returned is a heap by place in the queue.
type returned []*stored

func (r returned) Len() int           { return len(r) }
func (r returned) Less(i, j int) bool { return r[i].seq < r[j].seq }
func (r returned) Swap(i, j int)      { r[i], r[j] = r[j], r[i] }
func (r *returned) Push(x any)        { *r = append(*r, x.(*stored)) }
func (r *returned) Pop() any {
	old := *r
	n := len(old) - 1
	m := old[n]
	old[n] = nil
	*r = old[:n]
	return m
}

// headerBytes is about what headers take on a wire.
func headerBytes(h header.Map) int {
	n := 0
	for name, v := range h {
		n += len(name)
		if text, ok := header.Text(v); ok {
			n += len(text)
		} else {
			n += 8
		}
	}
	return n
}
