package kafka

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

const (
	// commitEvery is the pace of commits while something changes: how much is handled again after a crash, and how old
	// the counts of what is in flight may be.
	commitEvery = 100 * time.Millisecond
	// commitRetry is the pause after one that failed.
	commitRetry   = time.Second
	commitTimeout = 10 * time.Second
)

// committer commits positions, one commit at a time, so that none lands behind a newer one.
type committer struct {
	sub  *subscription
	wake chan struct{}
	ctx  context.Context // of the commits that are not the last of a partition
	end  context.CancelFunc

	// mu is held while a commit is on its way, and while partitions are handed over. It is taken before the
	// subscription's.
	mu sync.Mutex
}

func (c *committer) init(s *subscription) {
	c.sub, c.wake = s, make(chan struct{}, 1)
	c.ctx, c.end = context.WithCancel(context.Background())
}

// dirty says that there is something to commit.
func (c *committer) dirty() { poke(c.wake) }

// cancel gives up what is on its way and lets nothing follow but the last commits of partitions that are handed over.
func (c *committer) cancel() { c.end() }

func (c *committer) run() {
	pace := time.NewTimer(0)
	defer pace.Stop()
	for {
		select {
		case <-c.wake:
		case <-c.ctx.Done():
			return
		}
		select {
		case <-pace.C:
		case <-c.ctx.Done():
			return
		}
		next := commitEvery
		if err := c.now(); err != nil && c.ctx.Err() == nil {
			c.sub.logger.Warn("could not commit; it is done once more", "topic", c.sub.main, "group", c.sub.group, "error", err)
			next = commitRetry
			c.dirty()
		}
		pace.Reset(next)
	}
}

// now commits what changed.
func (c *committer) now() error {
	ctx, cancel := context.WithTimeout(c.ctx, commitTimeout)
	defer cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.sub
	s.mu.Lock()
	var ps []*partition
	for _, p := range s.parts {
		if p.dirty {
			ps = append(ps, p)
		}
	}
	s.mu.Unlock()
	return c.send(ctx, ps)
}

// last commits partitions that were dropped because the subscription is closed.
func (c *committer) last(ctx context.Context, ps []*partition) error {
	c.cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.send(ctx, ps)
}

// send commits the positions of partitions. The mutex is held.
func (c *committer) send(ctx context.Context, ps []*partition) error {
	s := c.sub
	offsets := map[string]map[int32]kgo.EpochOffset{}
	metadata := map[topicPartition]string{}
	byKey := map[topicPartition]*partition{}
	s.mu.Lock()
	for _, p := range ps {
		if !p.dirty || p.track.base < 0 {
			continue
		}
		p.dirty = false
		pos := p.track.position()
		at := topicPartition{p.topic, p.id}
		byKey[at], metadata[at] = p, pos.encode()
		if offsets[p.topic] == nil {
			offsets[p.topic] = map[int32]kgo.EpochOffset{}
		}
		offsets[p.topic][p.id] = kgo.EpochOffset{Epoch: p.epoch, Offset: pos.next}
	}
	s.mu.Unlock()
	if len(offsets) == 0 {
		return nil
	}
	failed := byKey
	var result error
	ctx = kgo.PreCommitFnContext(ctx, func(req *kmsg.OffsetCommitRequest) error {
		annotate(req, metadata)
		return ctx.Err()
	})
	s.member.CommitOffsetsSync(ctx, offsets, func(_ *kgo.Client, _ *kmsg.OffsetCommitRequest, resp *kmsg.OffsetCommitResponse, err error) {
		if err != nil {
			result = err
			return
		}
		failed, result = refused(resp, byKey)
	})
	if result == nil {
		return nil
	}
	s.mu.Lock()
	for _, p := range failed {
		p.dirty = true
	}
	s.mu.Unlock()
	return mapError(result)
}

func annotate(req *kmsg.OffsetCommitRequest, metadata map[topicPartition]string) {
	for i := range req.Topics {
		t := &req.Topics[i]
		for j := range t.Partitions {
			m := metadata[topicPartition{t.Topic, t.Partitions[j].Partition}]
			t.Partitions[j].Metadata = &m
		}
	}
}

// refused lists the partitions whose commit the broker did not take.
func refused(resp *kmsg.OffsetCommitResponse, all map[topicPartition]*partition) (map[topicPartition]*partition, error) {
	failed := map[topicPartition]*partition{}
	var first error
	for _, t := range resp.Topics {
		for _, p := range t.Partitions {
			if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
				at := topicPartition{t.Topic, p.Partition}
				if all[at] != nil {
					failed[at] = all[at]
				}
				if first == nil {
					first = fmt.Errorf("%s/%d: %w", t.Topic, p.Partition, err)
				}
			}
		}
	}
	return failed, first
}
