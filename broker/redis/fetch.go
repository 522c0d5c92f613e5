package redis

import (
	"context"
	"slices"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
)

// entry is one delivery that a subscription holds.
type entry struct {
	broker.Delivery
	id     string
	ms, n  uint64
	stream int // its place among the subscription's streams
	fields fieldList
	sub    *subscription
	state  state
	doubt  bool // the answer to settling it did not come: what is not ours any more may be our own doing; guarded like state
	// Neighbours in the list of unsettled deliveries.
	prev, next *entry
}

// state of a delivery, guarded by its subscription's mu.
type state uint8

const (
	unsettled state = iota
	settling        // a call of Settle is at it
	settled
)

// DeliveryID is the entry's id, as XPENDING and XRANGE show it.
func (e *entry) DeliveryID() string { return e.id }

// MessageID is the entry's id, which a redelivery keeps and a copy does not (C8).
func (e *entry) MessageID() string { return e.id }

// Death is always empty: Redis moves nothing to a dead-letter queue by itself.
func (e *entry) Death() header.Death { return header.Death{} }

const (
	// linger is how long a read waits for more places when only few are free.
	linger = time.Millisecond
	// fetchTimeout bounds a read that the server holds for blockFor.
	fetchTimeout = blockFor + 5*time.Second
	// claimMost bounds how many entries one script takes.
	claimMost = 500
)

// fetchLoop reads when somebody waits for messages and there is room for them, so that no message waits in a process
// that does not ask for it.
func (s *subscription) fetchLoop() {
	defer close(s.fetched)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		n := s.room(timer)
		if n == 0 {
			return
		}
		entries, err := s.fetch(n)
		if len(entries) > 0 {
			s.keep(entries)
		}
		if err != nil {
			s.fetchFailed(err)
			return
		}
	}
}

// room waits until a read is wanted and says how many places are free; 0: it is over. Few free places are waited with
// for a moment, because more are about to be freed and reading each message by itself would be slow.
func (s *subscription) room(timer *time.Timer) int {
	lingered := false
	for {
		s.mu.Lock()
		over := s.stopping || s.lost != nil
		free := s.prefetch - s.unsettled
		wanted := s.wanted
		s.mu.Unlock()
		switch {
		case over:
			return 0
		case wanted && (free >= s.enough || free > 0 && lingered):
			return free
		case wanted && free > 0:
			timer.Reset(linger)
			select {
			case <-timer.C:
				lingered = true
			case <-s.wake:
			case <-s.over:
			}
			continue
		}
		lingered = false
		select {
		case <-s.wake:
		case <-s.over:
		}
	}
}

// fetch gets at most n entries: returned ones first, which are older, else new ones.
func (s *subscription) fetch(n int) ([]*entry, error) {
	s.mu.Lock()
	claim := s.returns
	s.returns = false
	s.mu.Unlock()
	if claim {
		entries, err := s.claim(min(n, claimMost))
		if len(entries) > 0 || err != nil {
			s.mu.Lock()
			s.returns = true // look again before reading on
			s.mu.Unlock()
			return entries, err
		}
	}
	return s.read(n)
}

// claim takes entries that nobody works on.
func (s *subscription) claim(n int) ([]*entry, error) {
	ctx, cancel := context.WithTimeout(context.Background(), fetchTimeout)
	defer cancel()
	answer, err := s.nodes.runRaw(ctx, claimScript, s.streams, []any{s.group, s.name, returned, n})
	if err != nil {
		return nil, err
	}
	r := respReader{b: answer}
	rows, err := r.array()
	if err != nil || rows < 1 || rows > len(answer) {
		return nil, errResp
	}
	lost, err := r.integer()
	if err != nil {
		return nil, err
	}
	s.sayLost(lost)
	slab := make([]entry, rows-1)
	entries := make([]*entry, 0, rows-1)
	for i := range slab {
		e := &slab[i]
		if n, err := r.array(); err != nil || n != 4 {
			return entries, errResp
		}
		place, err := r.integer()
		if err != nil || place < 1 || place > len(s.streams) {
			return entries, errResp
		}
		id, err := r.bulk()
		if err != nil {
			return entries, err
		}
		count, err := r.integer()
		if err != nil {
			return entries, err
		}
		fields, err := r.fields()
		if err != nil {
			return entries, err
		}
		e.stream, e.DeliveryCount, e.Crashes, e.Redelivered = place-1, uint32(count), uint32(max(count, 1)-1), true
		if s.filled(e, id, fields, len(answer)) {
			entries = append(entries, e)
		}
	}
	return entries, nil
}

// read waits for new entries for a second.
func (s *subscription) read(n int) ([]*entry, error) {
	ctx, cancel := context.WithTimeout(context.Background(), fetchTimeout)
	defer cancel()
	each := max(1, n/len(s.streams)) // COUNT is for each stream
	args := make([]any, 0, 9+2*len(s.streams))
	args = append(args, "XREADGROUP", "GROUP", s.group, s.name, "COUNT", each, "BLOCK", blockFor.Milliseconds(), "STREAMS")
	for _, stream := range s.streams {
		args = append(args, stream)
	}
	for range s.streams {
		args = append(args, ">")
	}
	cmd := goredis.NewRawCmd(ctx, args...)
	s.setBlocked(true)
	err := s.conn.Process(ctx, cmd)
	s.setBlocked(false)
	if err == nil {
		err = rawError(cmd.Val())
	}
	if err != nil {
		return nil, err
	}
	return s.parse(cmd.Val())
}

func (s *subscription) setBlocked(b bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.blocked = b
}

// parse reads [[stream, [[id, [field, value, …]], …]], …], or nothing.
func (s *subscription) parse(answer []byte) ([]*entry, error) {
	r := respReader{b: answer}
	streams, err := r.array()
	if err != nil {
		return nil, err
	}
	var entries []*entry
	for range streams {
		if n, err := r.array(); err != nil || n != 2 {
			return entries, errResp
		}
		name, err := r.bulk()
		if err != nil {
			return entries, err
		}
		place := max(0, slices.IndexFunc(s.streams, func(stream string) bool { return stream == string(name) }))
		rows, err := r.array()
		if err != nil {
			return entries, err
		}
		if entries == nil {
			entries = make([]*entry, 0, min(max(rows, 0), len(answer)/16))
		}
		if entries, err = s.parseRows(&r, rows, place, entries); err != nil {
			return entries, err
		}
	}
	return entries, nil
}

// slabSize is how many entries are allocated at once. Larger slabs keep more settled messages in memory for the sake of
// one slow one.
const slabSize = 32

func (s *subscription) parseRows(r *respReader, rows, place int, entries []*entry) ([]*entry, error) {
	var slab []entry
	for i := range rows {
		if n, err := r.array(); err != nil || n != 2 {
			return entries, errResp
		}
		id, err := r.bulk()
		if err != nil {
			return entries, err
		}
		fields, err := r.fields()
		if err != nil {
			return entries, err
		}
		if len(slab) == 0 {
			slab = make([]entry, min(slabSize, rows-i))
		}
		e := &slab[0]
		slab = slab[1:]
		e.stream, e.DeliveryCount = place, 1
		if s.filled(e, id, fields, len(r.b)) {
			entries = append(entries, e)
		}
	}
	return entries, nil
}

// filled makes a delivery of an entry. It reports false for one without fields, which was deleted: there is nothing to
// hand to anybody.
func (s *subscription) filled(e *entry, id []byte, fields fieldList, answer int) bool {
	if id == nil || fields == nil {
		s.sayLost(1)
		return false
	}
	e.sub = s
	e.fill(id, fields.detach(answer))
	return true
}

// keep puts what was fetched into the buffer.
func (s *subscription) keep(entries []*entry) {
	s.mu.Lock()
	if s.buffer == nil {
		s.buffer = make([]*broker.Delivery, 0, len(entries))
	}
	for _, e := range entries {
		s.buffer = append(s.buffer, &e.Delivery)
		s.list.push(e)
	}
	s.unsettled += len(entries)
	s.wanted = false
	s.mu.Unlock()
	poke(s.arrived)
}

// forget takes deliveries out of the unsettled ones.
func (s *subscription) forget(entries ...*entry) {
	s.mu.Lock()
	for _, e := range entries {
		s.drop(e)
	}
	s.mu.Unlock()
	poke(s.wake)
}

// drop is forget for one delivery, with the lock held.
func (s *subscription) drop(e *entry) {
	if e.state == settled {
		return
	}
	e.state = settled
	s.list.remove(e)
	s.unsettled--
}

// fetchFailed ends the subscription, unless it ended anyway. A group that was destroyed is made anew first.
func (s *subscription) fetchFailed(err error) {
	s.mu.Lock()
	ending := s.closed
	s.mu.Unlock()
	if ending {
		return
	}
	s.broken(err)
}

// broken deals with an error after which the subscription cannot go on.
func (s *subscription) broken(err error) {
	if groupGone(err) {
		s.logger.Error("the stream or its consumer group was destroyed; it is made anew, and what was not acknowledged and is still there comes again",
			"stream", s.streams[0], "group", s.group, "error", err)
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		if restored := s.restoreGroups(ctx, err); restored != nil {
			s.logger.Warn("could not make the consumer group anew", "stream", s.streams[0], "error", restored)
		}
		cancel()
	}
	s.fail(mapError(err))
}

// list is the unsettled deliveries, oldest first.
type list struct{ head, tail *entry }

func (l *list) push(e *entry) {
	e.prev, e.next = l.tail, nil
	if l.tail != nil {
		l.tail.next = e
	} else {
		l.head = e
	}
	l.tail = e
}

func (l *list) remove(e *entry) {
	if e.prev != nil {
		e.prev.next = e.next
	} else {
		l.head = e.next
	}
	if e.next != nil {
		e.next.prev = e.prev
	} else {
		l.tail = e.prev
	}
	e.prev, e.next = nil, nil
}
