package kafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/shove-dev/shove/broker"
)

const (
	// closeTimeout bounds the goodbye to a server that does not answer.
	closeTimeout = 5 * time.Second
	// revokeTimeout is how long a partition that moves to another consumer waits for what runs here. The group waits
	// with it, so it is well below the rebalance timeout.
	revokeTimeout = 10 * time.Second
)

// subscription is one member of a consumer group: one run of consuming. Partitions come and go while it lasts. It is
// over when the group threw it out, or when a topic is gone.
type subscription struct {
	client      *client
	plan        plan
	role        broker.Role
	group, main string
	prefetch    int
	concurrency int
	logger      *slog.Logger

	member  *kgo.Client // reads the main topic, and is assigned the hold topics, too
	holder  *kgo.Client // reads the hold topics; nil where there are none
	mains   pump
	holds   pump
	topics  watch
	commits committer

	mu       sync.Mutex
	parts    map[topicPartition]*partition
	ready    []*partition // of the main topic
	held     []*partition // of hold topics
	turn     int          // where in ready the next delivery begins
	backlog  int          // records of the main topic that were fetched, not delivered, and may be
	out      int          // delivered and not settled
	copying  int          // of those, settled by a copy that is not confirmed
	repeats  int          // handed back, to be delivered again
	slab     []entry
	stopping bool
	closed   bool
	lost     error
	memberID string
	onRevoke func()

	arrived chan struct{} // there is something to deliver
	settled chan struct{} // something was settled
	stopped chan struct{} // closed by Stop and Close
	ended   chan struct{} // closed when the subscription is over
	down    chan struct{} // closed when the clients of the library are closed

	endOne, downOne sync.Once
	wg              sync.WaitGroup
}

type topicPartition struct {
	topic string
	id    int32
}

var (
	_ broker.Subscription = (*subscription)(nil)
	_ broker.Revoker      = (*subscription)(nil)
)

func newSubscription(c *client, p plan, in broker.Subscribe) *subscription {
	s := &subscription{
		client: c, plan: p, role: in.Role, group: p.group, main: p.source, prefetch: max(in.Prefetch, 1), concurrency: max(in.Concurrency, 1),
		logger: cmp.Or(in.Logger, c.dialer.logger), parts: map[topicPartition]*partition{},
		arrived: make(chan struct{}, 1), settled: make(chan struct{}, 1), stopped: make(chan struct{}), ended: make(chan struct{}), down: make(chan struct{}),
	}
	if in.Role == broker.ReadDeadLetter {
		s.group, s.main, s.plan.holds = p.deadGroup, p.dead, nil
	}
	s.mains.demand, s.holds.demand = make(chan struct{}, 1), make(chan struct{}, 1)
	s.commits.init(s)
	return s
}

// start checks that the topics exist, and joins the group.
func (s *subscription) start(ctx context.Context) error {
	member, err := s.client.dialer.open("consume", s.memberOptions()...)
	if err != nil {
		return err
	}
	s.member = member
	if err := s.topics.begin(ctx, s); err != nil {
		return err
	}
	if len(s.plan.holds) > 0 {
		if s.holder, err = s.client.dialer.open("hold", holderOptions()...); err != nil {
			return err
		}
		var names []string
		for _, h := range s.plan.holds {
			names = append(names, h.name)
		}
		s.member.PauseFetchTopics(names...) // the holder reads them
		s.wg.Go(func() { s.holds.run(s, s.holder, -1, s.wantsHeld, s.takeHeld) })
	}
	s.member.AddConsumeTopics(s.topics.present()...)
	s.wg.Go(func() { s.mains.run(s, s.member, max(s.prefetch, minPoll), s.wantsMain, s.takeMain) })
	s.wg.Go(s.commits.run)
	s.wg.Go(s.topics.run)
	return nil
}

func (s *subscription) reached(at step) {
	if f := s.client.dialer.mode.reached; f != nil {
		f(s, at)
	}
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// NotifyRevoke sets what is called when a partition starts to move to another consumer (broker.Revoker).
func (s *subscription) NotifyRevoke(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onRevoke = f
}

// Receive returns what is there, waiting for the first.
func (s *subscription) Receive(ctx context.Context) ([]*broker.Delivery, error) {
	var timer *time.Timer
	for {
		batch, wait, err := s.next()
		if len(batch) > 0 {
			s.reached(stepReceived)
			return batch, nil
		}
		if err != nil {
			return nil, err
		}
		var due <-chan time.Time
		if wait > 0 {
			if timer == nil {
				timer = time.NewTimer(wait)
				defer timer.Stop()
			} else {
				timer.Reset(wait)
			}
			due = timer.C
		}
		select {
		case <-due:
		case <-s.arrived:
		case <-s.ended:
		case <-s.stopped:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// next takes what can be delivered now, and says how long it is until a held message is due (zero: none is held).
func (s *subscription) next() ([]*broker.Delivery, time.Duration, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.stopping || s.closed:
		return nil, 0, broker.ErrClosed
	case s.lost != nil:
		return nil, 0, s.lost
	}
	room := s.prefetch - s.out
	if !s.worth() {
		return nil, 0, nil
	}
	batch := make([]*broker.Delivery, 0, min(room, s.backlog+8))
	if s.repeats > 0 {
		for _, p := range s.parts {
			batch = s.repeat(p, batch, room)
		}
	}
	var until time.Duration
	if len(s.held) > 0 {
		now := s.client.clock.now(time.Now())
		share := room
		if s.backlog > 0 { // neither keeps the other from being read
			share = max(1, room/2)
		}
		batch, _ = s.due(batch, min(room, len(batch)+share), now)
		batch = s.fresh(batch, room)
		batch, until = s.due(batch, room, now)
	} else {
		batch = s.fresh(batch, room)
	}
	s.out += len(batch)
	if len(batch) > 0 {
		s.commits.dirty()
	}
	if s.wantsMainLocked() {
		poke(s.mains.demand)
	}
	return batch, until, nil
}

// worth says whether there is room for as much as is worth waking anyone up for, or too little at work to wait for that.
func (s *subscription) worth() bool {
	room := s.prefetch - s.out
	return room > 0 && (room >= s.prefetch/4 || s.out-s.copying <= 2*s.concurrency)
}

// repeat delivers again what was handed back.
func (s *subscription) repeat(p *partition, batch []*broker.Delivery, room int) []*broker.Delivery {
	if len(p.again) == 0 || p.revoking.Load() {
		return batch
	}
	n := 0
	defer func() { s.repeats -= n }()
	for _, e := range p.again {
		if len(batch) == room {
			break
		}
		p.track.again()
		p.dirty = true
		batch = append(batch, &e.Delivery)
		n++
	}
	p.again = append(p.again[:0:0], p.again[n:]...)
	return batch
}

// fresh delivers records of the main topic, in turns.
func (s *subscription) fresh(batch []*broker.Delivery, room int) []*broker.Delivery {
	for range s.ready {
		if len(batch) >= room || s.backlog == 0 {
			break
		}
		p := s.ready[s.turn%len(s.ready)]
		s.turn++
		if p.revoking.Load() || p.paused {
			continue
		}
		for len(batch) < room && p.queue.len() > 0 {
			r := p.queue.peek()
			v := p.track.admit(r.Offset, r.Attrs.IsControl())
			if v == wait {
				s.blocked(p)
				break
			}
			p.queue.pop()
			s.backlog--
			p.dirty = true
			if v == deliver {
				batch = append(batch, s.deliver(p, r))
			}
		}
	}
	return batch
}

// blocked stops fetching from a partition of which one record has been handled for so long that too much is done
// beyond it.
func (s *subscription) blocked(p *partition) {
	p.paused = true
	s.backlog -= p.queue.len()
	s.member.PauseFetchPartitions(map[string][]int32{p.topic: {p.id}})
	s.logger.Warn("reading from a partition waits for one of its messages, which has been handled for long", "partition", p.String(), "offset", p.track.base)
}

// unblocked goes on with it.
func (s *subscription) unblocked(p *partition) {
	p.paused = false
	s.backlog += p.queue.len()
	s.member.ResumeFetchPartitions(map[string][]int32{p.topic: {p.id}})
	poke(s.arrived)
}

// due delivers held records whose time has come, and says how long it is until the next one's.
func (s *subscription) due(batch []*broker.Delivery, room int, now time.Time) ([]*broker.Delivery, time.Duration) {
	var until time.Duration
	for _, p := range s.held {
		if p.revoking.Load() {
			continue
		}
		for len(batch) < room && p.queue.len() > 0 {
			r := p.queue.peek()
			if left := dueAt(r, p.delay).Sub(now); left > 0 && !r.Attrs.IsControl() {
				if until == 0 || left < until {
					until = left
				}
				break
			}
			v := p.track.admit(r.Offset, r.Attrs.IsControl())
			if v == wait {
				break
			}
			p.queue.pop()
			p.dirty = true
			if v == deliver {
				batch = append(batch, s.deliver(p, r))
			}
		}
		if p.paused && p.queue.len() <= holdLow {
			p.paused = false
			s.holder.ResumeFetchPartitions(map[string][]int32{p.topic: {p.id}})
		}
	}
	if s.wantsHeldLocked() {
		poke(s.holds.demand)
	}
	return batch, until
}

func (s *subscription) deliver(p *partition, r *kgo.Record) *broker.Delivery {
	if len(s.slab) == 0 {
		s.slab = make([]entry, min(slabSize, s.prefetch))
	}
	e := &s.slab[0]
	s.slab = s.slab[1:]
	e.fill(r, p)
	return &e.Delivery
}

// lose ends the subscription. It is called from the library's callbacks, too, so it waits for nothing.
func (s *subscription) lose(cause error) {
	s.mu.Lock()
	if s.lost != nil || s.closed {
		s.mu.Unlock()
		return
	}
	s.lost = fmt.Errorf("%w: %w", broker.ErrLost, cause)
	for _, p := range s.parts {
		s.drop(p, s.lost)
	}
	mine := s.stopping
	s.mu.Unlock()
	s.finish()
	if !mine {
		s.logger.Warn("Kafka subscription lost", "topic", s.main, "group", s.group, "error", cause)
	}
}

// finish ends the goroutines and closes the clients of the library in the background.
func (s *subscription) finish() {
	s.endOne.Do(func() { close(s.ended) })
	s.commits.cancel()
	go s.shutDown()
}

// abandon is finish for a subscription that never began.
func (s *subscription) abandon() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.finish()
	<-s.down
}

// shutDown closes the clients of the library, leaving the group where it can be told.
func (s *subscription) shutDown() {
	s.downOne.Do(func() {
		defer close(s.down)
		s.mains.stop()
		s.holds.stop()
		if s.holder != nil {
			s.holder.Close()
		}
		if s.member != nil {
			ctx, cancel := context.WithTimeout(context.Background(), leaveTimeout)
			_ = s.member.LeaveGroupContext(ctx) // else the group notices after the session timeout
			cancel()
			s.member.Close()
		}
		s.wg.Wait()
	})
}

// leaveTimeout bounds telling the group that a member leaves.
const leaveTimeout = 2 * time.Second

// Stop ends fetching. The partitions stay assigned until Close, so that what was received can still be settled.
func (s *subscription) Stop(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.stopping {
		s.stopping = true
		close(s.stopped)
	}
	for _, p := range s.parts {
		p.queue.clear()
		p.again = nil
	}
	s.backlog, s.repeats = 0, 0
	return nil
}

// Close commits what is done and leaves the group; its other members get what is unsettled.
func (s *subscription) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	_ = s.Stop(ctx)
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		<-s.down
		return nil
	}
	s.closed = true
	gone := s.lost != nil
	var last []*partition
	if !gone {
		s.lost = fmt.Errorf("%w: subscription closed", broker.ErrLost)
		for _, p := range s.parts {
			last = append(last, p)
			s.drop(p, s.lost)
		}
	}
	s.mu.Unlock()
	s.client.remove(s)
	var err error
	if !gone {
		if err = s.commits.last(ctx, last); err != nil {
			err = fmt.Errorf("commit what is done of topic %q: %w", s.main, mapError(err))
		}
	}
	s.finish()
	select {
	case <-s.down:
	case <-ctx.Done():
		err = errors.Join(err, fmt.Errorf("leave the group %q: %w: %w", s.group, broker.ErrUnavailable, ctx.Err()))
	}
	return err
}
