package kafka

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/settle"
)

// TestFencing is about a consumer that was out of reach for so long that another one took over its partition, on a real
// broker, which is stricter than the fake: it refuses what the former member commits, and so does the consumer itself.
func TestFencing(t *testing.T) {
	t.Parallel()
	b := benchOn(t, testenv.Kafka(t).Servers...)
	away := newNetwork(b.raw.client)
	b.mode = away.mode()
	d := b.declare(1)
	b.put(d.Topology.Queue, 0, "0", "1", "2")
	stale := b.subscribe(d, 10)
	ds := receive(t, stale, 3)
	member, generation := stale.member.GroupMetadata()

	away.setRefuse(true)
	away.breakConns() // and its member is not taken out of the group: its session has to end
	b.mode = newNetwork(b.raw.client).mode()
	owner := b.subscribe(d, 10)
	must(t, settleAll(owner, settle.Action{Kind: settle.Done}, receive(t, owner, 3)...))
	b.eventuallyCommitted(d, 0, 3)

	found, err := describeTopics(t.Context(), b.raw.client, []string{d.Topology.Queue})
	must(t, err)
	id, now := owner.member.GroupMetadata()
	for name, tc := range map[string]struct {
		member     string
		generation int32
		want       error
	}{
		"the former owner":       {member, generation, kerr.UnknownMemberID},
		"an older generation":    {id, now - 1, kerr.IllegalGeneration},
		"a generation to come":   {id, now + 1, kerr.IllegalGeneration},
		"nobody, but by its id":  {"", -1, kerr.UnknownMemberID},
		"the owner, as a check ": {id, now, nil},
	} {
		req := kmsg.NewPtrOffsetCommitRequest()
		req.Group, req.MemberID, req.Generation = b.queue, tc.member, tc.generation
		at := int64(1)
		if tc.want == nil {
			at = 3
		}
		topic := kmsg.NewOffsetCommitRequestTopic()
		topic.Topic, topic.TopicID = d.Topology.Queue, found[d.Topology.Queue].id
		part := kmsg.NewOffsetCommitRequestTopicPartition()
		part.Offset = at
		topic.Partitions = append(topic.Partitions, part)
		req.Topics = append(req.Topics, topic)
		ctx, cancel := short()
		resp, err := req.RequestWith(ctx, b.raw.client)
		cancel()
		must(t, err)
		if got := kerr.ErrorForCode(resp.Topics[0].Partitions[0].ErrorCode); !errors.Is(got, tc.want) {
			t.Errorf("commit by %s: %v, want %v", name, got, tc.want)
		}
	}

	away.setRefuse(false)
	err = settleAll(stale, settle.Action{Kind: settle.Done}, ds[0])
	failed, ok := errors.AsType[*broker.SettleError](err)
	if err != nil && (!ok || !errors.Is(failed.Items[0].Err, broker.ErrLost)) {
		t.Errorf("a late outcome got %v, want ErrLost", err)
	}
	b.eventually("the former owner is over", func() error {
		ctx, cancel := short()
		defer cancel()
		if ds, err := stale.Receive(ctx); !errors.Is(err, broker.ErrLost) {
			return fmt.Errorf("received %d, %w", len(ds), err)
		}
		return nil
	})
	testenv.Consistently(t, 300*time.Millisecond, func() error {
		if at := b.committed(b.queue, d.Topology.Queue, 0); at != 3 {
			return fmt.Errorf("the position went to %d", at)
		}
		return nil
	})
}
