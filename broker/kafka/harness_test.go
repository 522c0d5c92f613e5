package kafka

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// bench is a broker with everything that a test of the consuming side needs.
type bench struct {
	t     testing.TB
	raw   *raw
	mode  mode
	cfg   broker.Config
	queue string
}

// onBoth runs a test on a real broker and on kfake.
func onBoth(t *testing.T, test func(t *testing.T, b *bench)) {
	t.Run("real", func(t *testing.T) { t.Parallel(); test(t, benchOn(t, testenv.Kafka(t).Servers...)) })
	t.Run("kfake", func(t *testing.T) { t.Parallel(); test(t, newFakeBench(t)) })
}

func newFakeBench(t testing.TB) *bench {
	t.Helper()
	return benchOn(t, startFake(t, t.TempDir()).ListenAddrs()...)
}

func benchOn(t testing.TB, servers ...string) *bench {
	t.Helper()
	r := newRaw(t, servers...)
	b := &bench{t: t, raw: r, mode: r.network.mode(), cfg: broker.Config{Endpoint: endpointOf(t, servers...), Name: "test"}, queue: "t." + strings.ToLower(rand.Text()[:10])}
	return b
}

// declare makes a topology of one tier and a dead-letter queue; its topics are deleted at the end.
func (b *bench) declare(partitions int, delays ...time.Duration) broker.Declaration {
	b.t.Helper()
	top, err := topology.Derive(topology.Spec{Queue: b.queue, Holds: delays, DeadLetter: true})
	must(b.t, err)
	d := broker.Declaration{Topology: top, Options: fmt.Appendf(nil, `{"partitions": %d}`, partitions)}
	b.admin(func(ctx context.Context, a broker.Admin) error { return a.Declare(ctx, d) })
	b.t.Cleanup(func() {
		var names []string
		for _, q := range top.Queues() {
			names = append(names, physical(top, q.Name))
		}
		b.admin(func(ctx context.Context, a broker.Admin) error { _, err := a.Delete(ctx, names); return err })
	})
	return d
}

func (b *bench) admin(do func(context.Context, broker.Admin) error) {
	b.t.Helper()
	ctx, cancel := short()
	defer cancel()
	a, err := Driver.OpenAdmin(ctx, b.cfg)
	must(b.t, err)
	defer closeBounded(b.t, a)
	must(b.t, do(ctx, a))
}

func closeBounded(t testing.TB, c interface{ Close(context.Context) error }) {
	t.Helper()
	ctx, cancel := short()
	defer cancel()
	if err := c.Close(ctx); err != nil {
		t.Logf("closing: %v", err)
	}
}

// subscribe joins with a client of its own, as another process does.
func (b *bench) subscribe(d broker.Declaration, prefetch int) *subscription {
	b.t.Helper()
	ctx, cancel := short()
	defer cancel()
	c, err := b.mode.driver().OpenClient(ctx, b.cfg)
	must(b.t, err)
	b.t.Cleanup(func() { closeBounded(b.t, c) })
	s, err := c.Subscribe(ctx, broker.Subscribe{Declaration: d, Prefetch: prefetch, Concurrency: prefetch, Consumer: "test"})
	must(b.t, err)
	return s.(*subscription)
}

// put stores messages in one partition.
func (b *bench) put(topic string, partition int32, bodies ...string) {
	b.t.Helper()
	c, err := kgo.NewClient(kgo.SeedBrokers(b.raw.servers...), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.DisableClientMetrics(), kgo.ProducerLinger(0))
	must(b.t, err)
	defer c.Close()
	ctx, cancel := short()
	defer cancel()
	for _, body := range bodies {
		must(b.t, c.ProduceSync(ctx, &kgo.Record{Topic: topic, Partition: partition, Value: []byte(body), Headers: []kgo.RecordHeader{{Key: header.MessageID, Value: []byte(body)}}}).FirstErr())
	}
}

// receive takes at least n deliveries.
func receive(t testing.TB, s broker.Subscription, n int) []*broker.Delivery {
	t.Helper()
	ctx, cancel := short()
	defer cancel()
	var all []*broker.Delivery
	for len(all) < n {
		ds, err := s.Receive(ctx)
		if err != nil {
			t.Fatalf("received %d of %d: %v", len(all), n, err)
		}
		all = append(all, ds...)
	}
	return all
}

// nothing fails when a delivery comes within d.
func nothing(t testing.TB, s broker.Subscription, d time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	if ds, err := s.Receive(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("received %v and %v, want none", bodies(ds), err)
	}
}

func bodies(ds []*broker.Delivery) []string {
	out := make([]string, len(ds))
	for i, d := range ds {
		out[i] = string(d.Body)
	}
	return out
}

func settleAll(s broker.Subscription, a settle.Action, ds ...*broker.Delivery) error {
	ctx, cancel := short()
	defer cancel()
	batch := make([]broker.Settlement, len(ds))
	for i, d := range ds {
		batch[i] = broker.Settlement{Delivery: d, Action: a}
		if a.Kind.Copies() {
			batch[i].Stamp = header.Stamp(nil, header.Parse(d.Headers), a, "orders", d.Native.DeliveryID(), time.Now())
		}
	}
	return s.Settle(ctx, batch)
}

var done = settle.Action{Kind: settle.Done}

func hold(delay time.Duration) settle.Action {
	return settle.Action{Kind: settle.Hold, Delay: delay, Retries: 1}
}

// committed is what a group committed of a partition; -1: nothing.
func (b *bench) committed(group, topic string, partition int32) int64 {
	b.t.Helper()
	ctx, cancel := short()
	defer cancel()
	all, err := b.raw.admin.FetchOffsetsForTopics(ctx, group, topic)
	must(b.t, err)
	if o, ok := all.Lookup(topic, partition); ok {
		return o.At
	}
	return -1
}

func (b *bench) eventually(what string, check func() error) {
	b.t.Helper()
	testenv.Eventually(b.t, bound, func() error {
		if err := check(); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	})
}

func (b *bench) eventuallyCommitted(d broker.Declaration, partition int32, want int64) {
	b.t.Helper()
	b.eventually("committed", func() error {
		if got := b.committed(b.queue, d.Topology.Queue, partition); got != want {
			return fmt.Errorf("%d of partition %d, want %d", got, partition, want)
		}
		return nil
	})
}

// owns waits until subscriptions have these numbers of partitions of the main topic.
func (b *bench) owns(want map[*subscription]int) {
	b.t.Helper()
	b.eventually("the group is balanced", func() error {
		for s, n := range want {
			s.mu.Lock()
			have := len(s.ready)
			s.mu.Unlock()
			if have != n {
				return fmt.Errorf("a consumer has %d partitions, want %d", have, n)
			}
		}
		return nil
	})
}

// end is the end of a partition's log.
func (b *bench) end(topic string, partition int32) int64 {
	b.t.Helper()
	ctx, cancel := short()
	defer cancel()
	ends, err := b.raw.admin.ListEndOffsets(ctx, topic)
	must(b.t, err)
	o, _ := ends.Lookup(topic, partition)
	return o.Offset
}

func (b *bench) deleteTopics(topics ...string) {
	b.t.Helper()
	ctx, cancel := short()
	defer cancel()
	_, err := b.raw.admin.DeleteTopics(ctx, topics...)
	must(b.t, err)
	b.eventually("topics are gone", func() error {
		all, err := b.raw.admin.ListTopics(ctx, topics...)
		if err != nil {
			return err
		}
		for _, t := range topics {
			if all.Has(t) {
				return errors.New(t + " is there")
			}
		}
		return nil
	})
}

// set is a set of strings for several goroutines.
type set struct {
	mu sync.Mutex
	m  map[string]int
}

func (s *set) add(id string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.m == nil {
		s.m = map[string]int{}
	}
	s.m[id]++
	return s.m[id]
}

func (s *set) len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.m)
}

type ctxt = context.Context

func withoutHolds(d broker.Declaration) topology.Topology {
	t := d.Topology
	t.Holds = nil
	return t
}

// fill stores n messages in one partition.
func (b *bench) fill(topic string, partition int32, n int) {
	b.t.Helper()
	c, err := kgo.NewClient(kgo.SeedBrokers(b.raw.servers...), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.DisableClientMetrics())
	must(b.t, err)
	defer c.Close()
	ctx, cancel := short()
	defer cancel()
	rs := make([]*kgo.Record, n)
	for i := range rs {
		rs[i] = &kgo.Record{Topic: topic, Partition: partition, Value: []byte("x")}
	}
	must(b.t, c.ProduceSync(ctx, rs...).FirstErr())
}
