package runtime

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/runtime/metrics"
	"github.com/shove-dev/shove/settle"
)

// consumer runs the handlers of one topology, or the dead handler of its dead-letter queue. Its workers outlive its
// sessions, so that Concurrency holds across a reconnect.
type consumer struct {
	rt       *Runtime
	topology string
	group    string
	role     broker.Role
	call     call
	code     config.Options // options given in code
	caps     broker.Capabilities
	values   context.Context // what a handler's context carries

	settings atomic.Pointer[settings]
	changed  chan struct{} // poked when settings were swapped

	log    *slog.Logger
	meter  *metrics.Consumer
	limits [settle.OutcomeUnset + 1]limiter
	queue  *taskQueue

	mu         sync.Mutex
	workers    []*worker
	target     atomic.Int32 // how many workers there should be
	running    atomic.Int32 // how many there are, replaced ones not counted
	overdue    []overdueCall
	inFlight   atomic.Int64 // received and not settled
	failedKeys map[string]struct{}

	state consumerState
	wg    sync.WaitGroup // the deadline watcher; handlers are not waited for beyond the drain
	// retired are sessions that drain in the background after a reload.
	retired sync.WaitGroup
}

// settings are a consumer's resolved configuration; a reload swaps them whole.
type settings struct {
	options config.Effective
	policy  settle.Policy
	decl    broker.Declaration
	broker  config.Broker
	paused  bool
	// prefetch and lease are what Subscribe gets (H11).
	prefetch int
	lease    time.Duration
}

// needsSession says whether going from one setting to the other takes another subscription.
func (s *settings) needsSession(n *settings) bool {
	return s.prefetch != n.prefetch || s.options.Concurrency != n.options.Concurrency || s.lease != n.lease || s.paused != n.paused || !s.broker.SameConnection(n.broker) ||
		s.decl.Topology.Queue != n.decl.Topology.Queue || s.decl.Topology.Source != n.decl.Topology.Source ||
		s.decl.Topology.DeadLetter != n.decl.Topology.DeadLetter || !equalHolds(s.decl, n.decl)
}

func equalHolds(a, b broker.Declaration) bool {
	return slices.Equal(a.Topology.Holds, b.Topology.Holds) && slices.Equal(a.Retired, b.Retired)
}

// apply takes new settings into use.
func (c *consumer) apply(n *settings) {
	c.settings.Store(n)
	c.resize(n.options.Concurrency)
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

// resize starts workers, or lets surplus ones end after their current task.
func (c *consumer) resize(n int) {
	c.target.Store(int32(n))
	for c.running.Load() < int32(n) {
		c.startWorker()
	}
	c.queue.nudge()
}

func (c *consumer) surplus() bool { return c.running.Load() > c.target.Load() }

func (c *consumer) startWorker() {
	w := &worker{}
	c.mu.Lock()
	c.workers = append(c.workers, w)
	c.mu.Unlock()
	c.running.Add(1)
	c.rt.spawn(nil, func() { c.work(w) })
}

// workerGone forgets a worker. One that was replaced was already taken out of the count.
func (c *consumer) workerGone(w *worker) {
	if !w.replaced.Load() {
		c.running.Add(-1)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, x := range c.workers {
		if x == w {
			c.workers = append(c.workers[:i], c.workers[i+1:]...)
			return
		}
	}
}

// malformed reports headers that were taken for their fallback (C5).
func (c *consumer) malformed(t *task) {
	c.meter.Malformed(t.facts.Malformed)
	if c.limits[settle.NoWarning].allow() {
		c.log.Warn("a message has malformed headers; counts that cannot be read are taken for zero", "message", t, "headers", t.facts.Malformed)
	}
}

// limiter lets a warning through at most every ten seconds.
type limiter struct{ next atomic.Int64 }

func (l *limiter) allow() bool {
	const every = 10 * time.Second
	now := time.Now().UnixNano()
	next := l.next.Load()
	return now >= next && l.next.CompareAndSwap(next, now+int64(every))
}
