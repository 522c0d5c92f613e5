package runtime

import (
	"cmp"
	"context"
	"errors"
	"hash/fnv"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/settle"
)

// session is one subscription's run: from Subscribe to its loss, a reload that needs another one, or the drain.
// Handlers belong to the consumer and outlive it; their outcomes then go nowhere (M3).
type session struct {
	c     *consumer
	sub   broker.Subscription
	lease time.Duration
	queue string
	// releaseClient tells that this session is done with its connection.
	releaseClient func()

	// over: the deliveries are lost or handed back; nothing is settled any more.
	over atomic.Bool
	// stopping: what no handler has begun is given back.
	stopping atomic.Bool
	// pending counts received deliveries that are not settled; idle is poked when it reaches zero.
	pending atomic.Int64
	idle    chan struct{}
	ended   chan struct{} // closed with over
	stopped chan struct{} // closed with stopping

	settler settler
	lanes   lanes

	mu      sync.Mutex
	waiting map[*task]*time.Timer // waiting in place, or before a delayed copy
	held    *task                 // list of unsettled tasks, where leases are renewed

	once sync.Once
	wg   sync.WaitGroup
}

func newSession(c *consumer, sub broker.Subscription, set *settings, release func()) *session {
	s := &session{c: c, sub: sub, releaseClient: release, lease: set.lease, queue: set.decl.Topology.Source, idle: make(chan struct{}, 1), ended: make(chan struct{}),
		stopped: make(chan struct{}), waiting: map[*task]*time.Timer{}}
	if c.role == broker.ReadDeadLetter {
		s.queue = set.decl.Topology.DeadLetter
	}
	if c.role == broker.ReadMain && set.decl.Topology.Sequenced != nil {
		s.lanes.open()
	}
	s.settler.init()
	return s
}

// start runs the session's goroutines. The receiver's end is sent on the channel, once.
func (s *session) start(ctx context.Context) <-chan error {
	received := make(chan error, 1)
	if r, ok := s.sub.(broker.Revoker); ok {
		r.NotifyRevoke(s.giveBackRevoked)
	}
	s.c.rt.spawn(&s.wg, func() { received <- s.receive(ctx) })
	s.c.rt.spawn(&s.wg, s.settleLoop)
	for range copiers {
		s.c.rt.spawn(&s.wg, s.copyLoop)
	}
	if ext, ok := s.sub.(broker.Extender); ok && s.lease > 0 {
		s.c.rt.spawn(&s.wg, func() { s.renew(ext) })
	}
	return received
}

func (s *session) receive(ctx context.Context) error {
	for {
		ds, err := s.sub.Receive(ctx)
		if err != nil {
			return err
		}
		suspects := s.admit(ds)
		if len(suspects) > 0 {
			suspects = s.gather(ctx, suspects)
		}
		if err := s.runAlone(ctx, suspects); err != nil {
			return err
		}
	}
}

// gatherTime is how long receiving goes on when there is a suspect, before one of them runs.
const gatherTime = 200 * time.Millisecond

// gather receives what comes with a suspect. A broker that sends the first message ahead of the rest of the prefetch
// would otherwise put the guilty one, which is at the head of the queue, first every time, whatever the order here.
func (s *session) gather(ctx context.Context, suspects []*task) []*task {
	ctx, cancel := context.WithTimeout(ctx, gatherTime)
	defer cancel()
	for {
		ds, err := s.sub.Receive(ctx)
		if err != nil { // a lost subscription says so again
			return suspects
		}
		suspects = append(suspects, s.admit(ds)...)
	}
}

// admit turns deliveries into tasks: those whose handler may run are queued, the others are decided at once, and
// suspects are returned (C10).
func (s *session) admit(ds []*broker.Delivery) (suspects []*task) {
	now := time.Now()
	set := s.c.settings.Load()
	tasks := make([]task, len(ds))
	ready := make([]*task, 0, len(ds))
	s.pending.Add(int64(len(ds)))
	s.c.inFlight.Add(int64(len(ds)))
	s.c.meter.InflightAdd(len(ds))
	parsed := factsOf(ds, now)
	for i, d := range ds {
		t := &tasks[i]
		facts := parsed(d)
		t.init(s, d, facts)
		s.hold(t)
		s.c.meter.Size(len(d.Body))
		if facts.Malformed > 0 {
			s.c.malformed(t)
		}
		switch {
		case s.lanes.on && d.Key != "" && !s.lanes.enter(t):
		case set.policy.Suspect(t.message(now, facts.NotBefore)) && s.c.role == broker.ReadMain:
			suspects = append(suspects, t)
		case s.refused(t, set, now):
		default:
			ready = append(ready, t)
		}
	}
	s.c.queue.push(ready...)
	return suspects
}

// factsOf returns a function that reads the headers of a batch's deliveries. Those without headers share one value, and
// the others are allocated together.
func factsOf(ds []*broker.Delivery, now time.Time) func(*broker.Delivery) *header.Facts {
	var plain *header.Facts
	var parsed []header.Facts
	return func(d *broker.Delivery) *header.Facts {
		if len(d.Headers) == 0 {
			if plain == nil {
				plain = &header.Facts{FirstSeen: now}
			}
			return plain
		}
		if parsed == nil {
			parsed = make([]header.Facts, 0, len(ds))
		}
		parsed = append(parsed, header.Parse(d.Headers))
		f := &parsed[len(parsed)-1]
		if f.FirstSeen.IsZero() {
			f.FirstSeen = now
		}
		return f
	}
}

// refused decides a task whose handler must not run: too large, early, looping, or of a failed key. It reports
// whether it did.
func (s *session) refused(t *task, set *settings, now time.Time) bool {
	if s.c.role == broker.ReadDeadLetter {
		return false
	}
	if t.lane != nil && s.c.failedKey(t.d.Key) {
		s.c.finish(t, settle.Poison(settle.SequenceFailed, "an earlier message of its key failed"), 0)
		return true
	}
	if int64(len(t.d.Body)) > set.options.MaxMessageSize {
		s.c.finish(t, settle.Poison(settle.Oversize, "the body has "+strconv.Itoa(len(t.d.Body))+" bytes"), 0)
		return true
	}
	o, ok := settle.Admit(t.message(now, t.facts.NotBefore), t.facts.NotBefore, set.policy)
	if ok {
		return false
	}
	s.c.finish(t, o, 0)
	return true
}

// runAlone runs messages that were in a process when it died, each alone, so that only the guilty one climbs to the
// crash limit (C10). Receiving waits meanwhile. Their order changes with every delivery: an innocent one that waits
// behind the guilty one this time comes before it next time.
func (s *session) runAlone(ctx context.Context, suspects []*task) error {
	if len(suspects) == 0 {
		return nil
	}
	order(suspects)
	for i, t := range suspects {
		if err := s.settledDownTo(ctx, int64(len(suspects)-i)); err != nil {
			for _, rest := range suspects[i:] {
				s.release(rest)
			}
			return err
		}
		s.c.log.Warn("running alone: the process ended before while this message was in it", "message", t, "crashes", t.d.Crashes)
		s.c.meter.Suspect()
		if !s.refused(t, s.c.settings.Load(), time.Now()) {
			s.c.queue.push(t)
		}
	}
	return s.settledDownTo(ctx, 0)
}

// order sorts suspects by their ids, and turns that round as their crashes mount: after 1, 2, 5, 6, 9 … it is one way,
// after 3, 4, 7, 8 … the other. So an innocent message that is behind the guilty one comes before it within two more
// crashes, also where a process's end is counted twice.
func order(suspects []*task) {
	var crashes uint32
	for _, t := range suspects {
		crashes = max(crashes, t.d.Crashes)
	}
	sign := 1
	if (crashes+1)>>1&1 == 0 {
		sign = -1
	}
	slices.SortFunc(suspects, func(a, b *task) int { return sign * cmp.Compare(idHash(a), idHash(b)) })
}

func idHash(t *task) uint64 {
	h := fnv.New64a()
	h.Write([]byte(t.meta.MessageID()))
	return h.Sum64()
}

// settledDownTo waits until at most n deliveries are unsettled, not counting those that wait for their time.
func (s *session) settledDownTo(ctx context.Context, n int64) error {
	for {
		s.mu.Lock()
		waiting := int64(len(s.waiting))
		s.mu.Unlock()
		if s.pending.Load()-waiting <= n {
			return nil
		}
		select {
		case <-s.idle:
		case <-s.ended:
			return broker.ErrLost
		case <-s.stopped:
			return broker.ErrClosed
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// after runs f when a delay is over, unless the session ends or stops first; then the task is given back.
func (s *session) after(delay time.Duration, t *task, f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting == nil || t.revoked() { // stopping or over, or it moves to another consumer
		go s.release(t)
		return
	}
	s.waiting[t] = time.AfterFunc(delay, func() {
		s.mu.Lock()
		_, mine := s.waiting[t]
		delete(s.waiting, t)
		s.mu.Unlock()
		if mine {
			f()
		}
	})
	s.poke()
}

// resume puts a task that waited in place back to work.
func (s *session) resume(t *task) {
	s.swapHeld(t)
	if !s.refused(t, s.c.settings.Load(), time.Now()) {
		s.c.queue.push(t)
	}
}

// release gives a task back to the broker without an outcome.
func (s *session) release(t *task) {
	if s.over.Load() {
		s.drop(t)
		return
	}
	t.action = settle.Decide(settle.Release, settle.Message{Retries: t.facts.Retries, Defers: t.facts.Defers}, settle.Policy{})
	s.settle(t)
}

// drop forgets a task whose delivery is lost.
func (s *session) drop(t *task) {
	s.unhold(t)
	s.c.inFlight.Add(-1)
	s.c.meter.InflightAdd(-1)
	s.pending.Add(-1)
	s.poke()
}

func (s *session) poke() {
	select {
	case s.idle <- struct{}{}:
	default:
	}
}

// stop ends fetching and gives back what no handler has begun. Running handlers go on.
func (s *session) stop(ctx context.Context) {
	if s.stopping.Swap(true) {
		return
	}
	close(s.stopped)
	if err := s.sub.Stop(ctx); err != nil && !errors.Is(err, broker.ErrLost) {
		s.c.log.Warn("could not stop fetching cleanly; the broker redelivers what is left", "error", err)
	}
	for _, t := range s.takeUnstarted() {
		s.release(t)
	}
}

// takeUnstarted removes what is queued, parked in a lane or waiting for its time.
func (s *session) takeUnstarted() []*task {
	tasks := s.c.queue.remove(func(t *task) bool { return t.s == s })
	s.mu.Lock()
	for t, timer := range s.waiting {
		timer.Stop()
		tasks = append(tasks, t)
	}
	s.waiting = nil
	s.mu.Unlock()
	return append(tasks, s.lanes.takeParked()...)
}

// drained waits until everything received is settled, or until ctx ends.
func (s *session) drained(ctx context.Context) error {
	for s.pending.Load() > 0 {
		select {
		case <-s.idle:
		case <-s.ended:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// close ends the session: the broker takes back what is unsettled. It waits for the session's own goroutines, not for
// handlers.
func (s *session) close() {
	s.once.Do(func() {
		s.over.Store(true)
		close(s.ended)
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		if err := s.sub.Close(ctx); err != nil && !errors.Is(err, broker.ErrLost) {
			s.c.log.Warn("could not close the subscription cleanly", "error", err)
		}
		for _, t := range s.takeUnstarted() {
			s.drop(t)
		}
		s.wg.Wait()
		for _, t := range s.settler.rest() {
			s.drop(t)
		}
		s.releaseClient()
	})
}

// closeTimeout bounds closing a subscription.
const closeTimeout = 10 * time.Second
