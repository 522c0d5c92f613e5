package kafka

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/shove-dev/shove/broker"
)

const (
	// watchEvery is how often a subscription looks after its topics: nothing tells a consumer that a topic was deleted,
	// and one that was made anew under the same name is never read.
	watchEvery   = 5 * time.Second
	watchTimeout = 10 * time.Second
)

// watch looks after the topics of a subscription.
type watch struct {
	sub  *subscription
	wake chan struct{}

	mu     sync.Mutex
	topics map[string]*seenTopic
}

// seenTopic is a topic; its id is zero while it does not exist.
type seenTopic struct {
	id         [16]byte
	there      bool
	partitions int
}

// begin looks for the topics. The main topic must be there; a hold topic that is not is read as soon as it is.
func (w *watch) begin(ctx context.Context, s *subscription) error {
	w.sub, w.wake, w.topics = s, make(chan struct{}, 1), map[string]*seenTopic{s.main: {}}
	for _, h := range s.plan.holds {
		w.topics[h.name] = &seenTopic{}
	}
	found, err := w.look(ctx)
	if err != nil {
		return err
	}
	for name, f := range found {
		if f.err != nil && (name == s.main || !errors.Is(f.err, kerr.UnknownTopicOrPartition)) {
			return fmt.Errorf("topic %q: %w", name, mapError(f.err))
		}
		*w.topics[name] = f.seenTopic
	}
	return nil
}

// present are the topics that exist.
func (w *watch) present() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var names []string
	for name, t := range w.topics {
		if t.there {
			names = append(names, name)
		}
	}
	return names
}

type found struct {
	seenTopic
	err error
}

func (w *watch) look(ctx context.Context) (map[string]found, error) {
	return describeTopics(ctx, w.sub.member, w.names())
}

func (w *watch) names() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	names := make([]string, 0, len(w.topics))
	for name := range w.topics {
		names = append(names, name)
	}
	return names
}

func describeTopics(ctx context.Context, c *kgo.Client, names []string) (map[string]found, error) {
	req := kmsg.NewPtrMetadataRequest()
	for _, name := range names {
		t := kmsg.NewMetadataRequestTopic()
		t.Topic = kmsg.StringPtr(name)
		req.Topics = append(req.Topics, t)
	}
	resp, err := req.RequestWith(ctx, c)
	if err != nil {
		return nil, err
	}
	all := map[string]found{}
	for _, t := range resp.Topics {
		if t.Topic == nil {
			continue
		}
		err := kerr.ErrorForCode(t.ErrorCode)
		all[*t.Topic] = found{seenTopic{id: t.TopicID, there: err == nil, partitions: len(t.Partitions)}, err}
	}
	return all, nil
}

// wrote notes that a copy was written to a topic: it exists.
func (w *watch) wrote(topic string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if t := w.topics[topic]; t != nil && !t.there {
		poke(w.wake)
	}
}

func (w *watch) run() {
	every := watchEvery
	if m := w.sub.client.dialer.mode.watch; m > 0 {
		every = m
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-w.wake:
		case <-w.sub.ended:
			return
		}
		ctx, cancel := context.WithTimeout(w.sub.commits.ctx, watchTimeout)
		all, err := w.look(ctx)
		cancel()
		if err == nil { // else the group notices
			w.compare(all)
		}
	}
}

// compare looks for topics that are gone, other ones, new or larger.
func (w *watch) compare(all map[string]found) {
	s := w.sub
	w.mu.Lock()
	defer w.mu.Unlock()
	for name, now := range all {
		was := w.topics[name]
		switch {
		case was == nil || now.err != nil && !errors.Is(now.err, kerr.UnknownTopicOrPartition):
		case was.there && !now.there:
			s.lose(fmt.Errorf("topic %q is gone: %w", name, broker.ErrNotFound))
			return
		case was.there && was.id != now.id:
			s.lose(fmt.Errorf("topic %q was deleted and made anew: %w", name, broker.ErrNotFound))
			return
		case !was.there && now.there:
			s.logger.Info("reading a hold topic that was made now", "topic", name)
			s.member.AddConsumeTopics(name)
			*was = now.seenTopic
		case now.partitions > was.partitions && was.there:
			s.member.ForceMetadataRefresh()
			was.partitions = now.partitions
		}
	}
}
