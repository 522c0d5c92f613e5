package kafka

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/shove-dev/shove/broker"
)

// memberOptions are those of the client that is the member of the group.
func (s *subscription) memberOptions() []kgo.Opt {
	m := s.client.dialer.mode
	opts := []kgo.Opt{
		kgo.ConsumerGroup(s.group),
		kgo.Balancers(kgo.CooperativeStickyBalancer()),
		kgo.DisableAutoCommit(),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.KeepControlRecords(), // so that the position gets over them
		kgo.FetchMaxWait(fetchWait),
		kgo.OnOffsetsFetched(s.assigned),
		kgo.OnPartitionsAssigned(s.joined),
		kgo.OnPartitionsRevoked(s.revoked),
		kgo.OnPartitionsLost(func(_ context.Context, _ *kgo.Client, m map[string][]int32) { s.forgotten(m) }),
		kgo.WithHooks(groupHook{s}),
		kgo.MetadataMinAge(metadataAge),
	}
	session := sessionTimeout
	if m.sessionTimeout > 0 {
		session = m.sessionTimeout
		opts = append(opts, kgo.HeartbeatInterval(m.heartbeat))
	}
	return append(opts, kgo.SessionTimeout(session), kgo.RetryTimeoutFn(func(key int16) time.Duration {
		switch key {
		case keyJoinGroup, keySyncGroup, keyHeartbeat: // a coordinator that fails over is waited for as long as it waits for us
			return session
		}
		return retryTimeout
	}))
}

// sessionTimeout is after how long without a heartbeat the group takes a consumer for dead. It is Kafka's own default.
const sessionTimeout = 45 * time.Second

// Keys of requests (https://kafka.apache.org/protocol#protocol_api_keys).
const (
	keyJoinGroup = 11
	keyHeartbeat = 12
	keySyncGroup = 14
)

func holderOptions() []kgo.Opt {
	return []kgo.Opt{
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.KeepControlRecords(),
		kgo.FetchMaxWait(fetchWait),
		kgo.FetchMaxPartitionBytes(holdFetch),
		kgo.MetadataMinAge(metadataAge),
	}
}

// metadataAge bounds how often metadata is asked for when something looks wrong, such as a leader that moved.
const metadataAge = 250 * time.Millisecond

// groupHook learns that the member was thrown out of the group.
type groupHook struct{ s *subscription }

var _ kgo.HookGroupManageError = groupHook{}

func (h groupHook) OnGroupManageError(err error) { h.s.lose(mapError(err)) }

// joined is called whenever the group was balanced anew, before partitions begin.
func (s *subscription) joined(_ context.Context, c *kgo.Client, _ map[string][]int32) {
	id, _ := c.GroupMetadata()
	s.mu.Lock()
	was := s.memberID
	s.memberID = id
	s.mu.Unlock()
	if was != "" && was != id {
		// The group took this member for dead while it was about to join once more, and the library joined as another
		// one without a word. It may have got the partitions of before, which others may have read meanwhile.
		s.lose(fmt.Errorf("the group %q took this consumer for dead: %w", s.group, broker.ErrUnavailable))
	}
}

// assigned begins partitions: it is called with what the group committed, before anything of them is fetched.
func (s *subscription) assigned(_ context.Context, _ *kgo.Client, resp *kmsg.OffsetFetchResponse) error {
	starts := map[string]map[int32]kgo.Offset{} // of hold partitions
	s.mu.Lock()
	if s.lost != nil || s.closed {
		s.mu.Unlock()
		return nil
	}
	for _, g := range resp.Groups {
		for _, t := range g.Topics {
			for _, p := range t.Partitions {
				if p.ErrorCode != 0 {
					continue
				}
				metadata := ""
				if p.Metadata != nil {
					metadata = *p.Metadata
				}
				s.begin(t.Topic, p.Partition, p.Offset, metadata, starts)
			}
		}
	}
	s.mu.Unlock()
	if len(starts) > 0 {
		s.holder.AddConsumePartitions(starts)
		poke(s.holds.demand)
	}
	return nil
}

// begin makes one assignment.
func (s *subscription) begin(topic string, id int32, offset int64, metadata string, starts map[string]map[int32]kgo.Offset) {
	at := topicPartition{topic, id}
	if old := s.parts[at]; old != nil {
		s.drop(old, errMoved)
	}
	pos := parsePosition(offset, metadata)
	p := &partition{topic: topic, id: id, epoch: -1, fetched: offset, end: math.MaxInt64, track: newTracker(pos)}
	p.track.seen = max(p.track.seen, s.client.seenOf(place{s.group, topic, id}))
	p.priorSeen = p.track.seen
	p.dirty = pos.inFlight > 0 // of a consumer that is gone
	if p.dirty {
		s.commits.dirty()
	}
	s.parts[at] = p
	if topic == s.main {
		s.ready = append(s.ready, p)
		return
	}
	i := slices.IndexFunc(s.plan.holds, func(h holdTopic) bool { return h.name == topic })
	if i < 0 {
		return
	}
	p.delay = s.plan.holds[i].delay
	s.held = append(s.held, p)
	start := kgo.NewOffset().AtStart()
	if offset >= 0 {
		start = kgo.NewOffset().At(offset)
	}
	if starts[topic] == nil {
		starts[topic] = map[int32]kgo.Offset{}
	}
	starts[topic][id] = start
}

// errMoved is what a delivery gets whose partition went to another consumer.
var errMoved = &moved{}

type moved struct{}

func (*moved) Error() string        { return "its partition went to another consumer" }
func (*moved) Is(target error) bool { return target == broker.ErrLost }

// revoked hands partitions over to other consumers: nothing more is begun, what runs may finish for a while, and what
// is done is committed. What comes later is discarded.
func (s *subscription) revoked(_ context.Context, _ *kgo.Client, m map[string][]int32) {
	ps := s.revoke(m)
	if len(ps) == 0 {
		return
	}
	s.mu.Lock()
	tell, quick := s.onRevoke, s.closed || s.lost != nil
	s.mu.Unlock()
	s.mains.barrier()
	s.holds.barrier()
	if !quick {
		if tell != nil {
			tell()
		}
		s.awaitIdle(ps)
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	s.commits.mu.Lock()
	defer s.commits.mu.Unlock()
	s.mu.Lock()
	late := 0
	for _, p := range ps {
		late += p.track.inFlight
		s.drop(p, errMoved)
	}
	s.mu.Unlock()
	if late > 0 && !quick {
		s.logger.Warn("partitions went to another consumer while their messages were handled; they are handled again there", "messages", late)
	}
	if err := s.commits.send(ctx, ps); err != nil && !quick {
		s.logger.Warn("could not commit what is done of partitions that went to another consumer; it is handled again there", "error", err)
	}
}

// revoke marks partitions and drops what was fetched of them.
func (s *subscription) revoke(m map[string][]int32) []*partition {
	var ps []*partition
	held := map[string][]int32{}
	s.mu.Lock()
	for topic, ids := range m {
		for _, id := range ids {
			p := s.parts[topicPartition{topic, id}]
			if p == nil {
				continue
			}
			ps = append(ps, p)
			p.revoking.Store(true)
			if p.delay == 0 && !p.paused {
				s.backlog -= p.queue.len()
			}
			p.queue.clear()
			s.repeats -= len(p.again)
			p.again = nil
			if p.delay > 0 {
				held[topic] = append(held[topic], id)
			}
		}
	}
	s.mu.Unlock()
	if len(held) > 0 {
		s.holder.RemoveConsumePartitions(held)
	}
	return ps
}

// forgotten drops partitions that the group took away without asking: nothing may be committed for them.
func (s *subscription) forgotten(m map[string][]int32) {
	s.commits.cancel()
	ps := s.revoke(m)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range ps {
		s.drop(p, errMoved)
	}
}

// awaitIdle waits until nothing of partitions is handled any more, for a bounded time.
func (s *subscription) awaitIdle(ps []*partition) {
	limit := time.NewTimer(cmp.Or(s.client.dialer.mode.revoke, revokeTimeout))
	defer limit.Stop()
	for {
		s.mu.Lock()
		running := 0
		for _, p := range ps {
			running += p.track.inFlight
		}
		s.mu.Unlock()
		if running == 0 {
			return
		}
		select {
		case <-s.settled:
		case <-s.ended:
			return
		case <-limit.C:
			return
		}
	}
}

// drop ends an assignment. The mutex is held.
func (s *subscription) drop(p *partition, cause error) {
	if p.lost != nil {
		return
	}
	p.lost = cause
	if !p.revoking.Swap(true) && p.delay == 0 && !p.paused {
		s.backlog -= p.queue.len()
	}
	p.queue.clear()
	s.repeats -= len(p.again)
	p.again = nil
	s.out -= p.track.inFlight
	p.track.inFlight = 0
	s.client.noteSeen(place{s.group, p.topic, p.id}, p.track.seen)
	delete(s.parts, topicPartition{p.topic, p.id})
	other := func(x *partition) bool { return x == p }
	s.ready = slices.DeleteFunc(s.ready, other)
	s.held = slices.DeleteFunc(s.held, other)
	if p.paused {
		p.paused = false
		c := s.member
		if p.delay > 0 {
			c = s.holder
		}
		c.ResumeFetchPartitions(map[string][]int32{p.topic: {p.id}})
	}
	poke(s.arrived)
}
