package redis

import (
	"context"
	"errors"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

const (
	// dueEvery is the longest time between two looks for held messages that are due. A consumer knows when those are
	// due that it saw or wrote itself, and looks then; this is for those of others.
	dueEvery = 100 * time.Millisecond
	// dueMost is how many one script moves: the server does nothing else meanwhile, for one or two milliseconds.
	dueMost = 100
	// returnsEvery is the longest time between two looks for returned entries where there is nothing held.
	returnsEvery = 500 * time.Millisecond
	// tendTimeout bounds one script of the upkeep.
	tendTimeout = 5 * time.Second
	// reclaimMost is how many entries one look returns.
	reclaimMost = 500
	// brokenAfter is how long the upkeep may fail before the subscription is given up.
	brokenAfter = 8 * time.Second
)

var _ broker.Extender = (*subscription)(nil)

// tend does what has to be done beside fetching and settling: it moves held messages that are due, shows that this
// consumer lives, returns the entries of dead or slow ones, and renews leases that nobody else renews.
func (s *subscription) tend() {
	defer close(s.tended)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { // a script must not hold up the end
		select {
		case <-s.over:
			cancel()
		case <-ctx.Done():
		}
	}()
	now := time.Now()
	u := upkeep{s: s, beat: now.Add(s.lease.upkeep), renewed: now, since: now, healthy: now}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-s.tick:
		case <-s.over:
			return
		}
		next, err := u.round(ctx)
		if s.isOver() {
			return
		}
		if err != nil && u.failed(err) {
			return
		}
		s.mu.Lock()
		if !s.dueAt.IsZero() {
			next = min(next, max(time.Until(s.dueAt), 0))
		}
		s.mu.Unlock()
		timer.Reset(max(next, time.Millisecond))
	}
}

func (s *subscription) isOver() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lost != nil
}

// upkeep is the state of one subscription's upkeep.
type upkeep struct {
	s       *subscription
	beat    time.Time // when to show again
	renewed time.Time
	since   time.Time // since when this consumer was seen without a gap
	shown   time.Time // when it last was
	healthy time.Time // when a script last succeeded
}

// round does what is due and says when to come back.
func (u *upkeep) round(ctx context.Context) (time.Duration, error) {
	next, err := u.due(ctx)
	if err != nil {
		return next, err
	}
	if now := time.Now(); !now.Before(u.beat) {
		if err := u.show(ctx, now); err != nil {
			return next, err
		}
		u.beat = now.Add(u.s.lease.upkeep)
	}
	if time.Since(u.renewed) >= u.s.lease.idle/6 {
		u.renewed = time.Now()
		if err := u.renewOwn(ctx); err != nil {
			return next, err
		}
	}
	if err := u.findOrphans(ctx); err != nil {
		return next, err
	}
	u.healthy = time.Now()
	return min(next, time.Until(u.beat)), nil
}

// failed reports whether an error of the upkeep ended the subscription.
func (u *upkeep) failed(err error) bool {
	u.since = time.Now()
	switch {
	case groupGone(err), errors.Is(err, errFenced):
		u.s.broken(err)
		return true
	case time.Since(u.healthy) > brokenAfter:
		u.s.fail(mapError(err))
		return true
	}
	u.s.logger.Debug("looking after a stream failed", "stream", u.s.streams[0], "error", err)
	return false
}

// due moves held messages whose time has come, and looks for returned entries.
func (u *upkeep) due(ctx context.Context) (time.Duration, error) {
	s := u.s
	s.mu.Lock()
	holds := s.holds
	s.dueAt = time.Time{}
	s.mu.Unlock()
	most := returnsEvery
	keys := []string{s.streams[s.target()]}
	keys = append(keys, s.streams[:s.target()]...)
	streams := len(keys)
	if len(holds) > 0 {
		most = dueEvery
		keys = append(keys, holds...)
	}
	for {
		call, cancel := context.WithTimeout(ctx, tendTimeout)
		out, err := s.nodes.run(call, dueScript, keys, []any{s.group, returned, streams, dueMost})
		cancel()
		if err != nil {
			return most, err
		}
		if toInt(out[2]) > 0 {
			s.returnsWait(ctx)
		}
		if toInt(out[0]) == dueMost {
			continue
		}
		if wait := toInt(out[1]); wait >= 0 {
			most = min(most, time.Duration(wait)*time.Millisecond)
		}
		return most, nil
	}
}

// returnsWait has the fetcher take returned entries, where it has room.
func (s *subscription) returnsWait(ctx context.Context) {
	s.mu.Lock()
	s.returns = true
	room := s.unsettled < s.prefetch && !s.stopping
	s.mu.Unlock()
	if room {
		s.unblock(ctx)
	}
}

// dueIn has the upkeep look when something is due that was just held.
func (s *subscription) dueIn(d time.Duration) {
	at := time.Now().Add(d)
	s.mu.Lock()
	sooner := s.dueAt.IsZero() || at.Before(s.dueAt)
	if sooner {
		s.dueAt = at
	}
	s.mu.Unlock()
	if sooner && d < dueEvery {
		poke(s.tick)
	}
}

var errFenced = errors.New("this consumer was silent for so long that it was taken for dead, and others have what it had")

// show lets the others know that this consumer lives, and looks after them. It judges nobody before it was seen itself
// for as long as a consumer may be silent: after an outage of the server all of them were.
func (u *upkeep) show(ctx context.Context, now time.Time) error {
	s := u.s
	if !u.shown.IsZero() && now.Sub(u.shown) > 3*s.lease.upkeep {
		u.since = now
	}
	judge := int64(0)
	if now.Sub(u.since) > silence {
		judge = silence.Milliseconds()
	}
	trim := 0
	for i, m := range s.modes {
		if m != keepEntries {
			trim |= 1 << i
		}
	}
	ctx, cancel := context.WithTimeout(ctx, tendTimeout)
	defer cancel()
	began := time.Now()
	out, err := s.nodes.run(ctx, upkeepScript, append([]string{s.consumers}, s.streams...), []any{s.group, s.name, returned,
		s.lease.timeout.Milliseconds(), s.lease.idle.Milliseconds(), judge, reclaimMost, trim, s.lease.upkeep.Milliseconds() / 2})
	if err != nil {
		return err
	}
	if toInt(out[0]) == 0 {
		return errFenced
	}
	s.setClock(began, toInt(out[0]))
	u.shown = now
	if n := toInt(out[1]); n > 0 {
		s.logger.Info("took entries back from consumers that are gone, or that did not settle them in time", "stream", s.streams[0], "entries", n)
		s.returnsWait(ctx)
	}
	s.sayLost(int(toInt(out[2])))
	if i := toInt(out[3]); i > 0 {
		s.orphaned(int(i - 1))
	}
	return u.retired(ctx)
}

// retired finds hold queues that left the topology's spec and may still hold messages.
func (u *upkeep) retired(ctx context.Context) error {
	s := u.s
	if s.role != broker.ReadMain || s.topology.External {
		return nil
	}
	cmd := goredis.NewCmd(ctx, "HGETALL", s.plan.registry)
	if err := s.nodes.exec(ctx, s.plan.registry, cmd); err != nil {
		return err
	}
	fields, _ := cmd.Slice()
	holds := make([]string, 0, len(s.plan.holds))
	seen := map[string]bool{}
	for _, h := range s.plan.holds {
		holds, seen[h.key] = append(holds, h.key), true
	}
	prefix := physical(s.topology, topology.HoldName(s.topology.Queue, 0))
	prefix = strings.TrimSuffix(prefix, "0s")
	for i := 0; i+1 < len(fields); i += 2 {
		key, _ := fields[i].(string)
		what, _ := fields[i+1].(string)
		if strings.HasPrefix(what, isHold) && strings.HasPrefix(key, prefix) && !seen[key] {
			holds = append(holds, key)
		}
	}
	s.mu.Lock()
	s.holds = holds
	s.mu.Unlock()
	return nil
}

// renewOwn renews what nobody renews: deliveries that were not received yet, and all of them where handlers have no
// deadline.
func (u *upkeep) renewOwn(ctx context.Context) error {
	s := u.s
	s.mu.Lock()
	var entries []*entry
	if s.lease.renew {
		for e := s.list.head; e != nil; e = e.next {
			entries = append(entries, e)
		}
	} else {
		for _, d := range s.buffer {
			entries = append(entries, d.Native.(*entry))
		}
	}
	s.mu.Unlock()
	return s.renew(ctx, entries)
}

// Extend renews the leases of deliveries. How long for is the same for all: two handler timeouts.
func (s *subscription) Extend(ctx context.Context, deliveries []*broker.Delivery, _ time.Duration) error {
	entries := make([]*entry, 0, len(deliveries))
	s.mu.Lock()
	if s.lost != nil {
		defer s.mu.Unlock()
		return s.lost
	}
	for _, d := range deliveries {
		if e := entryOf(d); e != nil && e.sub == s && e.state != settled {
			entries = append(entries, e)
		}
	}
	s.mu.Unlock()
	if err := s.renew(ctx, entries); err != nil {
		return mapError(err)
	}
	return nil
}

func (s *subscription) renew(ctx context.Context, entries []*entry) error {
	for _, g := range s.byStream(entries) {
		args := make([]any, 0, 2+len(g.entries))
		args = append(args, s.group, s.name)
		for _, e := range g.entries {
			args = append(args, &e.id)
		}
		call, cancel := context.WithTimeout(ctx, tendTimeout)
		out, err := s.nodes.run(call, renewScript, []string{s.streams[g.stream]}, args)
		cancel()
		if err != nil {
			return err
		}
		if n := toInt(out[0]); n > 0 {
			s.logger.Debug("leases were lost, or entries settled while they were renewed", "stream", s.streams[g.stream], "entries", n)
		}
		if toInt(out[1]) > 0 {
			s.suspectOrphans(g.stream)
		}
		s.sayLost(int(toInt(out[2])))
	}
	return nil
}

// suspectOrphans notes that an entry is in its stream and nobody has it. In somebody else's stream that is what an
// acknowledged one looks like.
func (s *subscription) suspectOrphans(stream int) {
	if s.modes[stream] != keepEntries {
		s.orphaned(stream)
	}
}

// orphaned notes that a stream has entries that were delivered and that nobody has.
func (s *subscription) orphaned(stream int) {
	s.mu.Lock()
	s.orphans[stream] = true
	s.mu.Unlock()
	poke(s.tick)
}

// findOrphans returns entries that nobody has, because somebody deleted a consumer that had some.
func (u *upkeep) findOrphans(ctx context.Context) error {
	s := u.s
	s.mu.Lock()
	streams := s.orphans
	s.orphans = map[int]bool{}
	s.mu.Unlock()
	for i := range streams {
		if s.modes[i] == keepEntries {
			s.logger.Error("somebody deleted a consumer with entries that it had not acknowledged; they cannot be told from acknowledged ones and are not delivered again",
				"stream", s.streams[i], "group", s.group)
			continue
		}
		found := int64(0)
		for from := "-"; from != ""; {
			call, cancel := context.WithTimeout(ctx, tendTimeout)
			out, err := s.nodes.run(call, orphansScript, []string{s.streams[i]}, []any{s.group, returned, from, dueMost})
			cancel()
			if err != nil {
				s.orphaned(i)
				return err
			}
			found += toInt(out[1])
			from, _ = out[0].(string)
		}
		if found > 0 {
			s.logger.Error("somebody deleted a consumer with entries that it had not acknowledged; they are delivered again",
				"stream", s.streams[i], "group", s.group, "entries", found)
			s.returnsWait(ctx)
		}
	}
	return nil
}
