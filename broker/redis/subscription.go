package redis

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/topology"
)

// Modes of acknowledging, as scripts take them.
const (
	keepEntries   = "keep"   // somebody else's stream: its entries are left alone
	deleteEntries = "delete" // ours: an entry goes away, unless another group reads the stream too
	ackDel        = "ackdel" // the same in one command, on servers that have it (Redis 8.2)
)

// subscription is one consumer of a group, under a name of its own: nothing that it got is ever settled under another
// one (M3).
type subscription struct {
	client    *client
	nodes     *nodes
	logger    *slog.Logger
	onLost    func(n int)
	topology  topology.Topology
	role      broker.Role
	plan      plan
	streams   []string // read in this order; the last one takes what comes back from the hold queues
	modes     []string // of streams
	group     string
	name      string
	consumers string // the group's hash of consumers
	prefetch  int
	enough    int // free places for which a read is worth while
	lease     lease

	conn   *goredis.Conn // to wait for messages on
	connID int64

	mu        sync.Mutex
	buffer    []*broker.Delivery // fetched, not yet returned by Receive
	list      list               // unsettled deliveries, those in buffer included
	unsettled int
	wanted    bool // a Receive waits
	blocked   bool // a read waits at the server
	returns   bool // there may be returned entries
	orphans   map[int]bool
	ahead     time.Duration // how far the server's clock is before ours
	stopping  bool
	closed    bool
	lost      error // why it is over
	holds     []string
	dueAt     time.Time // when something that this consumer held is due

	arrived chan struct{} // something came into the buffer
	wake    chan struct{} // the fetcher should look again
	tick    chan struct{} // the upkeep should look again
	stopped chan struct{} // closed by Stop and Close
	over    chan struct{} // closed when nothing of it is valid any more
	fetched chan struct{} // closed when nothing is fetched any more
	tended  chan struct{} // closed when the upkeep has ended
}

// lease is how long an entry may be idle before it goes to another consumer.
type lease struct {
	timeout time.Duration // the handler's deadline; 0: none
	idle    time.Duration // an entry that was not renewed for so long is taken away
	renew   bool          // nobody calls Extend: renew everything here
	upkeep  time.Duration // how often this consumer shows that it lives
}

const (
	// minIdle keeps an entry from being taken away because a process was short of CPU for a moment.
	minIdle = 2 * time.Second
	// idleWithoutDeadline is the idle deadline of a consumer whose handlers have no deadline.
	idleWithoutDeadline = time.Minute
)

// silence is after how long a consumer that did not show is dead. A variable for tests that kill many processes.
var silence = 10 * time.Second

// leaseFor: an entry is taken away when it was not renewed for two handler timeouts. The caller renews it three times
// per timeout while its handler runs.
func leaseFor(timeout time.Duration) lease {
	l := lease{timeout: timeout, idle: max(2*timeout, minIdle)}
	if timeout <= 0 {
		l = lease{idle: idleWithoutDeadline, renew: true}
	}
	l.upkeep = min(max(l.idle/4, 500*time.Millisecond), 2*time.Second)
	return l
}

func (c *client) newSubscription(ctx context.Context, in broker.Subscribe) (*subscription, error) {
	p, err := newPlan(in.Declaration)
	if err != nil {
		return nil, err
	}
	prefetch := max(in.Prefetch, 1)
	s := &subscription{
		client: c, nodes: c.nodes, logger: cmp.Or(in.Logger, c.logger), onLost: in.Lost, topology: in.Topology, role: in.Role, plan: p,
		name: consumerName(in.Consumer), prefetch: prefetch, enough: max(1, min(prefetch/4, prefetch-in.Concurrency)), lease: leaseFor(in.Lease),
		orphans: map[int]bool{}, returns: true,
		arrived: make(chan struct{}, 1), wake: make(chan struct{}, 1), tick: make(chan struct{}, 1), stopped: make(chan struct{}),
		over: make(chan struct{}), fetched: make(chan struct{}), tended: make(chan struct{}),
	}
	if err := s.chooseStreams(ctx); err != nil {
		return nil, fmt.Errorf("consume %q: %w", in.Topology.Queue, mapError(err))
	}
	s.consumers = consumersKey(s.streams[0], s.group)
	for _, h := range p.holds {
		s.holds = append(s.holds, h.key)
	}
	if s.role == broker.ReadDeadLetter {
		s.holds = nil
	}
	return s, nil
}

// consumerName is unique: what a process got before it was restarted under the same name is not its own any more.
func consumerName(in string) string {
	if in == "" {
		in = "shove"
	}
	return header.Clip(in, 200) + "-" + strings.ToLower(rand.Text()[:10])
}

// chooseStreams says what is read.
func (s *subscription) chooseStreams(ctx context.Context) error {
	t := s.topology
	if s.role == broker.ReadDeadLetter {
		if t.DeadLetter == "" {
			return fmt.Errorf("it has no dead-letter queue: %w", broker.ErrUnsupported)
		}
		s.streams, s.modes, s.group = []string{physical(t, t.DeadLetter)}, []string{deleteEntries}, t.DeadLetter
		return nil
	}
	s.group = t.Queue
	if s.plan.verify != "" {
		source, err := s.nodes.resolve(ctx, s.plan.verify)
		if err != nil {
			return err
		}
		s.streams, s.modes = append(s.streams, source), append(s.modes, keepEntries)
	}
	if !t.External {
		s.streams, s.modes = append(s.streams, physical(t, t.Queue)), append(s.modes, deleteEntries)
	}
	return nil
}

// target is the place of the stream that takes copies and what comes back from the hold queues.
func (s *subscription) target() int { return len(s.streams) - 1 }

// begin registers the consumer and starts its goroutines.
func (s *subscription) begin(ctx context.Context) error {
	node, err := s.nodes.of(ctx, s.streams[0])
	if err != nil {
		return err
	}
	s.conn = node.Conn()
	if s.connID, err = s.conn.ClientID(ctx).Result(); err != nil && !begins(err, "NOPERM") {
		s.nodes.suspect(err)
		return err
	}
	if err := s.register(ctx); err != nil {
		return err
	}
	s.askFor(ctx)
	go s.fetchLoop()
	go s.tend()
	return nil
}

// askFor finds out what the server can do.
func (s *subscription) askFor(ctx context.Context) {
	info := goredis.NewCmd(ctx, "COMMAND", "INFO", "XACKDEL")
	if s.nodes.exec(ctx, s.streams[0], info) != nil {
		return // it may not be asked
	}
	if about, err := info.Slice(); err != nil || len(about) == 0 || about[0] == nil {
		return
	}
	for i, m := range s.modes {
		if m == deleteEntries {
			s.modes[i] = ackDel
		}
	}
}

// register makes the consumer known. A group that is missing is made where the stream is somebody else's, or where it
// was there before and was destroyed.
func (s *subscription) register(ctx context.Context) error {
	for again := false; ; again = true {
		began := time.Now()
		out, err := s.nodes.run(ctx, registerScript, append([]string{s.consumers}, s.streams...),
			[]any{s.group, s.name, s.lease.timeout.Milliseconds(), s.lease.idle.Milliseconds()})
		if err == nil {
			s.setClock(began, toInt(out[0]))
		}
		if !groupGone(err) || again {
			return err
		}
		if err := s.restoreGroups(ctx, err); err != nil {
			return err
		}
	}
}

// setClock notes what time it was at the server while we asked it, which took a moment.
func (s *subscription) setClock(began time.Time, ms int64) {
	now := time.Now()
	took := now.Sub(began)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ahead = time.UnixMilli(ms).Sub(began.Add(took / 2))
	if s.ahead.Abs() <= took/2+time.Millisecond { // that may be all
		s.ahead = 0
	}
}

func (s *subscription) clockAhead() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ahead
}

// restoreGroups makes groups anew that are missing and may be made.
func (s *subscription) restoreGroups(ctx context.Context, cause error) error {
	for i, stream := range s.streams {
		ours := s.modes[i] != keepEntries
		if ours && !s.client.wasThere(stream) {
			return fmt.Errorf("stream %q or its group %q does not exist: %w: %w", stream, s.group, broker.ErrNotFound, cause)
		}
		from := "0" // what is left in a stream of ours is not acknowledged
		if !ours {
			from = s.floor(ctx, stream)
		}
		if err := s.nodes.createGroup(ctx, stream, s.group, from, ours); err != nil {
			return err
		}
	}
	return nil
}

// floor is where a group of somebody else's stream goes on after it was destroyed: below everything that was not
// acknowledged when somebody last looked.
func (s *subscription) floor(ctx context.Context, stream string) string {
	cmd := goredis.NewCmd(ctx, "HGET", s.consumers, "#floor:"+stream)
	if s.nodes.exec(ctx, stream, cmd) != nil {
		return "0"
	}
	value, _ := cmd.Text()
	id, state, _ := strings.Cut(value, " ")
	ms, n, ok := parseID([]byte(id))
	switch {
	case !ok:
		return "0"
	case state == "read":
		return id
	case n > 0:
		return fmt.Sprintf("%d-%d", ms, n-1)
	case ms > 0:
		return fmt.Sprintf("%d-%d", ms-1, uint64(1)<<63-1)
	}
	return "0"
}

// abort ends a subscription that did not begin.
func (s *subscription) abort() {
	if s.conn != nil {
		_ = s.conn.Close()
	}
}

// Receive returns what is there, waiting for the first.
func (s *subscription) Receive(ctx context.Context) ([]*broker.Delivery, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		batch, err := s.take()
		if len(batch) > 0 || err != nil {
			return batch, err
		}
		select {
		case <-s.arrived:
		case <-s.over:
		case <-s.stopped:
		case <-ctx.Done():
			s.mu.Lock()
			s.wanted = false
			s.mu.Unlock()
			return nil, ctx.Err()
		}
	}
}

func (s *subscription) take() ([]*broker.Delivery, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.stopping || s.closed:
		return nil, broker.ErrClosed
	case s.lost != nil:
		return nil, s.lost
	}
	batch := s.buffer
	if out := s.unsettled - len(batch); out+len(batch) > s.prefetch { // reads of two streams may bring one too many
		batch = batch[:max(0, s.prefetch-out)]
	}
	s.buffer = s.buffer[len(batch):]
	if len(s.buffer) == 0 {
		s.buffer = nil
	}
	s.wanted = len(batch) == 0
	if s.wanted {
		poke(s.wake)
	}
	return batch, nil
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Stop ends fetching and puts back what was not received. Deliveries that were received stay ours.
func (s *subscription) Stop(ctx context.Context) error {
	s.mu.Lock()
	if !s.stopping && !s.closed {
		s.stopping = true
		close(s.stopped)
	}
	gone := s.lost != nil || s.closed
	s.mu.Unlock()
	if gone {
		return nil
	}
	if err := s.stopFetching(ctx); err != nil {
		return fmt.Errorf("stop consuming from stream %q: %w", s.streams[0], mapError(err))
	}
	return nil
}

// stopFetching waits for the read that is under way, and puts back what it brought.
func (s *subscription) stopFetching(ctx context.Context) error {
	poke(s.wake)
	s.unblock(ctx)
	select {
	case <-s.fetched:
	case <-ctx.Done():
		return ctx.Err()
	}
	s.mu.Lock()
	unreceived := s.buffer
	s.buffer = nil
	s.mu.Unlock()
	return s.putBack(ctx, unreceived)
}

// putBack returns deliveries that nobody saw, uncounted.
func (s *subscription) putBack(ctx context.Context, ds []*broker.Delivery) error {
	batch := make([]*entry, len(ds))
	for i, d := range ds {
		batch[i] = d.Native.(*entry)
	}
	var errs []error
	for _, g := range s.byStream(batch) {
		if _, err := s.giveBack(ctx, g.stream, g.entries); err != nil {
			errs = append(errs, err)
		}
	}
	s.forget(batch...)
	return errors.Join(errs...)
}

// unblock ends a read that waits at the server, where the user may do that; else it ends by itself within a second.
func (s *subscription) unblock(ctx context.Context) {
	s.mu.Lock()
	blocked := s.blocked
	s.mu.Unlock()
	if blocked && s.connID > 0 {
		_ = s.nodes.exec(ctx, s.streams[0], goredis.NewCmd(ctx, "CLIENT", "UNBLOCK", s.connID))
	}
}

// Close ends the subscription; what is unsettled goes back, and counts as delivered.
func (s *subscription) Close(ctx context.Context) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	if !s.stopping {
		close(s.stopped)
	}
	s.stopping, s.closed = true, true
	lost := s.lost != nil
	s.mu.Unlock()
	s.client.remove(s)
	if lost { // what it had is being handed back
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	err := s.stopFetching(ctx)
	s.end(fmt.Errorf("%w: subscription closed", broker.ErrLost))
	<-s.tended
	err = errors.Join(err, s.leave(ctx))
	s.abort()
	if err != nil {
		return fmt.Errorf("close the subscription to stream %q: %w", s.streams[0], mapError(err))
	}
	return nil
}

// end makes everything of the subscription void. It reports whether it was not.
func (s *subscription) end(why error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lost != nil {
		return false
	}
	s.lost = why
	close(s.over)
	return true
}

// fail ends the subscription because its connection or its group is gone. What it had goes back as soon as the server
// can be reached; where this process cannot do that, others do once it has been silent for a while.
func (s *subscription) fail(cause error) {
	why := fmt.Errorf("%w: %w", broker.ErrLost, cause)
	s.nodes.suspect(cause)
	s.mu.Lock()
	mine := s.stopping || s.closed
	s.mu.Unlock()
	if !s.end(why) {
		return
	}
	if !mine {
		s.logger.Warn("Redis subscription lost", "stream", s.streams[0], "consumer", s.name, "error", cause)
	}
	s.client.whileLeaving(func() {
		<-s.tended
		ctx, cancel := context.WithTimeout(context.Background(), 2*blockFor)
		s.unblock(ctx)
		select { // a read that is under way may still bring something
		case <-s.fetched:
		case <-ctx.Done():
		}
		cancel()
		s.abort()
		s.handBack()
	})
}

const (
	// handBackFor is how long a lost subscription tries to hand back what it had.
	handBackFor   = time.Minute
	handBackPause = 200 * time.Millisecond
)

func (s *subscription) handBack() {
	until := time.Now().Add(handBackFor)
	for {
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		err := s.leave(ctx)
		cancel()
		if err == nil || groupGone(err) || time.Now().After(until) {
			return
		}
		select {
		case <-s.client.ended:
			return
		default:
		}
		if !pause(handBackPause, s.client.ended) { // once more, and that is all
			until = time.Now()
		}
	}
}

// leave hands back everything that the consumer has at the server and takes its name away.
func (s *subscription) leave(ctx context.Context) error {
	const batch = 1000
	for {
		out, err := s.nodes.run(ctx, leaveScript, append([]string{s.consumers}, s.streams...), []any{s.group, s.name, returned, batch})
		if err != nil {
			return err
		}
		s.sayLost(int(toInt(out[1])))
		if toInt(out[0]) == 0 {
			return nil
		}
	}
}

// sayLost is loud about messages that somebody deleted or trimmed away before they were handled.
func (s *subscription) sayLost(n int) {
	if n <= 0 {
		return
	}
	s.logger.Error("messages are lost: somebody deleted or trimmed away entries that were delivered and not acknowledged",
		"stream", s.streams[0], "group", s.group, "messages", n)
	if s.onLost != nil {
		s.onLost(n)
	}
}
