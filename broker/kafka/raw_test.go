package kafka

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/brokertest"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/topology"
)

// bound is how long a test waits for something that should come soon.
const bound = 20 * time.Second

func endpointOf(t testing.TB, servers ...string) json.RawMessage {
	t.Helper()
	out, err := json.Marshal(map[string]any{"bootstrapServers": servers})
	must(t, err)
	return out
}

// raw reads and writes the brokers with the plain client library.
type raw struct {
	servers []string
	client  *kgo.Client
	admin   *kadm.Client
	network *network
}

func newRaw(t testing.TB, servers ...string) *raw {
	t.Helper()
	c, err := kgo.NewClient(kgo.SeedBrokers(servers...), kgo.RecordPartitioner(kgo.RoundRobinPartitioner()), kgo.ProducerLinger(0), kgo.MetadataMinAge(50*time.Millisecond), kgo.DisableClientMetrics(), kgo.ConnIdleTimeout(500*time.Millisecond))
	must(t, err)
	t.Cleanup(c.Close)
	return &raw{servers: servers, client: c, admin: kadm.NewClient(c), network: newNetwork(c)}
}

func short() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), bound)
}

func (r *raw) Publish(t testing.TB, d broker.Declaration, q topology.Queue, msgs ...brokertest.Message) {
	t.Helper()
	ctx, cancel := short()
	defer cancel()
	for _, m := range msgs {
		rec := &kgo.Record{Topic: physical(d.Topology, q.Name), Value: m.Body}
		if m.Key != "" {
			rec.Key = []byte(m.Key)
		}
		if m.ContentType != "" {
			rec.Headers = append(rec.Headers, kgo.RecordHeader{Key: contentType, Value: []byte(m.ContentType)})
		}
		for name, v := range m.Headers {
			rec.Headers = append(rec.Headers, kgo.RecordHeader{Key: name, Value: text(v)})
		}
		must(t, r.client.ProduceSync(ctx, rec).FirstErr())
	}
}

// placeOf is the topic of a queue and the group that reads it.
func placeOf(t testing.TB, d broker.Declaration, q topology.Queue) (topic, group string) {
	t.Helper()
	p, err := newPlan(d)
	must(t, err)
	if q.Role == topology.RoleDeadLetter {
		return p.dead, p.deadGroup
	}
	return physical(d.Topology, q.Name), p.group
}

// partitionState is one partition as its group sees it.
type partitionState struct {
	id         int32
	start, end int64
	pos        position
}

func (r *raw) state(t testing.TB, topic, group string) []partitionState {
	t.Helper()
	ctx, cancel := short()
	defer cancel()
	var commits kadm.OffsetResponses
	testenv.Eventually(t, bound, func() (err error) {
		commits, err = r.admin.FetchOffsetsForTopics(ctx, group, topic)
		switch {
		case err == nil, errors.Is(err, kerr.UnknownTopicOrPartition), errors.Is(err, kerr.GroupIDNotFound):
			return nil
		case !kerr.IsRetriable(err): // a coordinator of a group that nobody asked for before takes a moment
			t.Fatalf("offsets of group %q: %v", group, err)
		}
		return err
	})
	ends, err := r.admin.ListEndOffsets(ctx, topic)
	if err != nil && !errors.Is(err, kerr.UnknownTopicOrPartition) {
		t.Fatalf("ends of %q: %v", topic, err)
	}
	starts, err := r.admin.ListStartOffsets(ctx, topic)
	if err != nil && !errors.Is(err, kerr.UnknownTopicOrPartition) {
		t.Fatalf("starts of %q: %v", topic, err)
	}
	var all []partitionState
	ends.Each(func(e kadm.ListedOffset) {
		if e.Err != nil {
			return
		}
		s := partitionState{id: e.Partition, end: e.Offset}
		if start, ok := starts.Lookup(topic, e.Partition); ok && start.Err == nil {
			s.start = start.Offset
		}
		s.pos = position{next: s.start, seen: s.start}
		if c, ok := commits.Lookup(topic, e.Partition); ok && c.Err == nil && c.At >= 0 {
			s.pos = parsePosition(c.At, c.Metadata)
		}
		all = append(all, s)
	})
	return all
}

func (r *raw) Count(t testing.TB, d broker.Declaration, q topology.Queue) (ready, inFlight int) {
	t.Helper()
	topic, group := placeOf(t, d, q)
	members := false
	for _, s := range r.network.live() {
		if s.group == group {
			members = true
			_ = s.commits.now() // the present state, not that of a while ago
		}
	}
	for _, s := range r.state(t, topic, group) {
		a, b := s.pos.backlog(s.start, s.end)
		if !members {
			a, b = a+b, 0
		}
		ready, inFlight = ready+int(a), inFlight+int(b)
	}
	return ready, inFlight
}

// Take removes what is not done from the log.
func (r *raw) Take(t testing.TB, d broker.Declaration, q topology.Queue) []brokertest.Message {
	t.Helper()
	topic, group := placeOf(t, d, q)
	var records []*kgo.Record
	for _, s := range r.state(t, topic, group) {
		records = append(records, r.read(t, topic, s)...)
	}
	slices.SortStableFunc(records, func(a, b *kgo.Record) int { return a.Timestamp.Compare(b.Timestamp) })
	var out []brokertest.Message
	for _, rec := range records {
		m := brokertest.Message{Body: rec.Value, Key: string(rec.Key)}
		m.Headers, m.ContentType = headersOf(rec.Headers)
		out = append(out, m)
	}
	return out
}

// read takes what is left of a partition.
func (r *raw) read(t testing.TB, topic string, s partitionState) []*kgo.Record {
	t.Helper()
	from := max(s.start, s.pos.next)
	if from >= s.end {
		return nil
	}
	c, err := kgo.NewClient(kgo.SeedBrokers(r.servers...), kgo.DisableClientMetrics(), kgo.FetchMaxWait(50*time.Millisecond),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {s.id: kgo.NewOffset().At(from)}}))
	must(t, err)
	defer c.Close()
	ctx, cancel := short()
	defer cancel()
	var out []*kgo.Record
	for next := from; next < s.end; {
		f := c.PollFetches(ctx)
		if err := f.Err(); err != nil {
			t.Fatalf("read %s/%d: %v", topic, s.id, err)
		}
		f.EachRecord(func(rec *kgo.Record) {
			next = rec.Offset + 1
			i := rec.Offset - s.pos.next
			if done := i >= 0 && i/64 < int64(len(s.pos.done)) && s.pos.done[i/64]&(1<<(i%64)) != 0; !done && rec.Offset < s.end {
				out = append(out, rec)
			}
		})
	}
	gone := kadm.Offsets{}
	gone.Add(kadm.Offset{Topic: topic, Partition: s.id, At: s.end, LeaderEpoch: -1})
	_, err = r.admin.DeleteRecords(ctx, gone)
	must(t, err)
	return out
}
