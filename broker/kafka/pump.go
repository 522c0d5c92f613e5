package kafka

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/shove-dev/shove/broker"
)

const (
	// minPoll is how many records are taken from the library at once, at least.
	minPoll = 500
	// holdHigh and holdLow are between how many records of a hold partition are kept here. What is fetched ahead of
	// its time makes up for the time that the next fetch takes.
	holdHigh = 4096
	holdLow  = 1024
	// fetchWait is how long a broker keeps a fetch that finds nothing. A partition that is added or resumed waits for
	// it.
	fetchWait = 250 * time.Millisecond
	// holdFetch bounds what one fetch brings of a hold partition in bytes: what is on its way when the partition is
	// paused is fetched twice.
	holdFetch = 512 << 10
)

// pump takes records from a client of the library, as many as are wanted. Between taking them and putting them into
// their partition's queue a partition may be revoked, and even assigned again, so that they belong to an assignment
// that is over: whoever ends an assignment waits at the barrier, after which no such records are on their way.
type pump struct {
	demand chan struct{} // poked when more is wanted

	mu     sync.Mutex
	cancel context.CancelFunc
	round  chan struct{} // closed when the poll that is under way is dealt with; nil: there is none
	over   bool
}

// run polls until the subscription is over.
func (p *pump) run(s *subscription, c *kgo.Client, most int, wanted func() bool, take func(kgo.Fetches)) {
	for {
		for !wanted() {
			select {
			case <-p.demand:
			case <-s.ended:
				return
			}
		}
		ctx, round, ok := p.begin()
		if !ok {
			return
		}
		fetches := c.PollRecords(ctx, most)
		take(fetches)
		p.end(round)
		if !s.usable(fetches) {
			return
		}
	}
}

func (p *pump) begin() (context.Context, chan struct{}, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over {
		return nil, nil, false
	}
	ctx, cancel := context.WithCancel(context.Background())
	p.cancel, p.round = cancel, make(chan struct{})
	return ctx, p.round, true
}

func (p *pump) end(round chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cancel()
	p.cancel, p.round = nil, nil
	close(round)
}

// barrier waits until records that were taken before it are dealt with.
func (p *pump) barrier() {
	p.mu.Lock()
	round := p.round
	if p.cancel != nil {
		p.cancel()
	}
	p.mu.Unlock()
	if round != nil {
		<-round
	}
}

// stop makes the pump end.
func (p *pump) stop() {
	p.mu.Lock()
	p.over = true
	p.mu.Unlock()
	p.barrier()
}

// usable looks at the errors of a poll, and reports whether polling makes sense after it.
func (s *subscription) usable(fetches kgo.Fetches) bool {
	for _, e := range fetches.Errors() {
		switch {
		case errors.Is(e.Err, context.Canceled):
			continue
		case errors.Is(e.Err, kgo.ErrClientClosed):
			return false
		}
		if _, lost := errors.AsType[*kgo.ErrDataLoss](e.Err); lost {
			// The log ends before what was read of it: what is there now has other offsets than what is tracked.
			s.lose(e.Err)
			return false
		}
		if _, session := errors.AsType[*kgo.ErrGroupSession](e.Err); session || isFinal(e.Err) {
			s.lose(mapError(e.Err))
			return false
		}
		s.logger.Warn("could not fetch", "topic", e.Topic, "partition", e.Partition, "error", e.Err)
		select { // none of these errors should come without a pause, but nothing says so
		case <-time.After(100 * time.Millisecond):
		case <-s.ended:
		}
	}
	return true
}

// isFinal says whether fetching does not get over an error by itself.
func isFinal(err error) bool {
	if errors.Is(err, broker.ErrUnauthorized) {
		return true
	}
	for _, e := range []error{kerr.TopicAuthorizationFailed, kerr.GroupAuthorizationFailed, kerr.UnknownTopicOrPartition, kerr.UnknownTopicID} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

func (s *subscription) wantsMain() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wantsMainLocked()
}

// wantsMainLocked: what is fetched is bounded by what can be delivered soon; the library keeps the rest.
func (s *subscription) wantsMainLocked() bool { return s.backlog < s.prefetch && !s.stopping }

func (s *subscription) wantsHeld() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wantsHeldLocked()
}

func (s *subscription) wantsHeldLocked() bool {
	if s.stopping {
		return false
	}
	for _, p := range s.held {
		if p.queue.len() < holdLow {
			return true
		}
	}
	return len(s.held) == 0
}

// takeMain puts records of the main topic into the queues of their partitions. What belongs to no partition of ours any
// more is dropped: whoever has it now reads it again.
func (s *subscription) takeMain(fetches kgo.Fetches) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.backlog
	fetches.EachPartition(func(f kgo.FetchTopicPartition) {
		if p := s.receiving(f); p != nil {
			p.queue.push(f.Records)
			if !p.paused {
				s.backlog += len(f.Records)
			}
		}
	})
	if s.backlog > before {
		poke(s.arrived)
	}
}

func (s *subscription) takeHeld(fetches kgo.Fetches) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	fetches.EachPartition(func(f kgo.FetchTopicPartition) {
		p := s.receiving(f)
		if p == nil {
			return
		}
		if first := f.Records[0]; first.Offset >= p.end && byBroker(first) && !p.paused {
			s.client.clock.received(first.Timestamp, now) // it was not there when the fetch before ended
		}
		p.end = f.HighWatermark
		p.queue.push(f.Records)
		if p.queue.len() >= holdHigh && !p.paused {
			p.paused = true
			s.holder.PauseFetchPartitions(map[string][]int32{p.topic: {p.id}})
		}
		poke(s.arrived)
	})
}

// receiving finds the partition that fetched records belong to; nil: none, or there are none.
func (s *subscription) receiving(f kgo.FetchTopicPartition) *partition {
	if len(f.Records) == 0 || s.stopping {
		return nil
	}
	p := s.parts[topicPartition{f.Topic, f.Partition}]
	if p == nil || p.revoking.Load() {
		return nil
	}
	first := f.Records[0]
	if first.Offset < p.fetched {
		// The group had got further than the log goes now: it was cut back, or deleted and filled anew.
		s.logger.Warn("the log of a partition begins anew: what is there is handled again", "partition", p.String(), "offset", first.Offset, "committed", p.fetched)
		p.track = newTracker(position{next: first.Offset, seen: first.Offset})
	}
	last := f.Records[len(f.Records)-1]
	p.fetched = last.Offset + 1
	p.epoch = last.LeaderEpoch
	return p
}
