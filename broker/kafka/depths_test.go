package kafka

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// trim deletes the records of partition 0 below an offset.
func (d *desk) trim(topic string, below int64) {
	d.t.Helper()
	ctx, cancel := short()
	defer cancel()
	all := kadm.Offsets{}
	all.AddOffset(topic, 0, below, -1)
	resp, err := d.raw.admin.DeleteRecords(ctx, all)
	must(d.t, err)
	must(d.t, resp.Error())
}

// TestBacklogOfPositions has every relation of a committed position to the ends of a partition.
func TestBacklogOfPositions(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	const none = -1
	for name, tc := range map[string]struct {
		records        int
		start, at      int64
		metadata       string
		ready, dropped int64
	}{
		"nothing ever": {at: none},
		"nothing committed, keda#7936: log is empty":  {records: 3, start: 3, at: none},
		"nothing committed: counts from the start on": {records: 5, start: 2, at: none, ready: 3},
		"committed":                               {records: 5, at: 2, ready: 3},
		"all handled":                             {records: 5, at: 5},
		"committed below what retention left":     {records: 5, start: 4, at: 1, ready: 1},
		"parallel-consumer#894: beyond the end":   {records: 2, at: 7},
		"handled out of order":                    {records: 5, at: 1, metadata: position{next: 1, seen: 4, done: []uint64{0b110}}.encode(), ready: 2},
		"in flight, but nobody is there any more": {records: 5, at: 1, metadata: position{next: 1, seen: 4, inFlight: 3}.encode(), ready: 4},
		"another program's metadata":              {records: 5, at: 1, metadata: "shove1 x y", ready: 4},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := *d
			d.t = t
			decl := d.decl(`{"partitions": 1}`, func(s *topology.Spec) { s.Queue = testenv.KafkaServer{}.Name(d.queue) })
			queue := decl.Topology.Queue
			d.declare(decl)
			d.produce(queue, tc.records)
			if tc.start > 0 {
				d.trim(queue, tc.start)
			}
			if tc.at != none {
				d.commit(queue, queue, map[int32]kadm.Offset{0: {At: tc.at, LeaderEpoch: -1, Metadata: tc.metadata}})
			}
			want := broker.Depth{Queue: queue, Ready: broker.Known(tc.ready), InFlight: broker.Known(0), Stuck: broker.Known(0), Consumers: broker.Known(0)}
			if got := d.depth(queue); got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
		})
	}
}

// TestTransactionsReachZero is keda#5675: what a transaction leaves in the log besides records is no backlog for ever, and what
// is not committed is none yet.
func TestTransactionsReachZero(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	decl := d.decl(`{"partitions": 1}`)
	d.declare(decl)
	d.produce(d.queue, 3, kgo.TransactionalID(d.queue))

	open, err := kgo.NewClient(kgo.SeedBrokers(d.raw.servers...), kgo.TransactionalID(d.queue+".open"), kgo.ProducerLinger(0))
	must(t, err)
	defer open.Close()
	must(t, open.BeginTransaction())
	must(t, open.ProduceSync(t.Context(), &kgo.Record{Topic: d.queue, Value: []byte("m")}).FirstErr())

	c, err := Driver.OpenClient(t.Context(), broker.Config{Endpoint: endpointOf(t, d.raw.servers...)})
	must(t, err)
	defer func() { must(t, c.Close(t.Context())) }()
	s, err := c.Subscribe(t.Context(), broker.Subscribe{Declaration: decl, Prefetch: 10, Concurrency: 1})
	must(t, err)
	settleNext := func(n int) {
		for n > 0 {
			ds, err := s.Receive(t.Context())
			must(t, err)
			for _, one := range ds {
				must(t, s.Settle(t.Context(), []broker.Settlement{{Delivery: one, Action: settle.Action{Kind: settle.Done}}}))
			}
			n -= len(ds)
		}
	}
	zero := func(when string) {
		t.Helper()
		testenv.Eventually(t, bound, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			if ds, err := s.Receive(ctx); !errors.Is(err, context.DeadlineExceeded) { // the consumer asks for more, as they do
				t.Fatalf("%s: received %d, %v", when, len(ds), err)
			}
			if got := d.depth(d.queue); got.Ready != broker.Known(0) || got.InFlight != broker.Known(0) {
				return fmt.Errorf("%s: %+v", when, got)
			}
			return nil
		})
	}
	settleNext(3)
	zero("while a transaction is open")
	must(t, open.EndTransaction(t.Context(), kgo.TryAbort))
	zero("after one was aborted")
	d.produce(d.queue, 2, kgo.TransactionalID(d.queue))
	settleNext(2)
	zero("after one was committed")
}

func TestHoldsCountWhatIsDue(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	decl := d.decl(`{"partitions": 1}`, func(s *topology.Spec) { s.Holds = []time.Duration{2 * time.Second, time.Hour} })
	d.declare(decl)
	short, long := d.queue+"-hold-2s", d.queue+"-hold-3600s"
	d.produce(long, 2)
	d.produce(short, 4)
	d.commit(d.queue, short, map[int32]kadm.Offset{0: {At: 1, LeaderEpoch: -1}})
	if got := d.depth(short); got.Ready != broker.Known(3) || got.Due.N > 3 || !got.Due.Known {
		t.Errorf("before: %+v", got)
	}
	testenv.Eventually(t, bound, func() error {
		if got := d.depth(short); got.Due != broker.Known(3) || got.Ready != broker.Known(3) {
			return fmt.Errorf("after 2 s: %+v", got)
		}
		return nil
	})
	if got := d.depth(long); got.Due != broker.Known(0) || got.Ready != broker.Known(2) {
		t.Errorf("of an hour: %+v", got)
	}
	// Whoever sees the names alone finds the group and the delay in them.
	other := openTestAdmin(t, broker.Config{Endpoint: endpointOf(t, d.raw.servers...)})
	got, err := other.Depths(t.Context(), []string{short, d.queue, d.queue + "-hold-7s"})
	must(t, err)
	if got[0].Due != broker.Known(3) || got[1].Ready != broker.Known(0) || !got[2].Missing {
		t.Errorf("by name: %+v", got)
	}
}

// TestUnknownIsNotZero: whoever has only names does not know who reads a topic with records.
func TestUnknownIsNotZero(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	decl := d.decl(`{"partitions": 1, "groupId": "` + d.queue + `.adopted"}`)
	d.declare(decl)
	d.produce(d.queue, 3)
	d.commit(d.queue+".adopted", d.queue, map[int32]kadm.Offset{0: {At: 3, LeaderEpoch: -1}})
	if got := d.depth(d.queue); got.Ready != broker.Known(0) {
		t.Errorf("with the adopted group: %+v", got)
	}
	other := openTestAdmin(t, broker.Config{Endpoint: endpointOf(t, d.raw.servers...)})
	got, err := other.Depths(t.Context(), []string{d.queue, d.queue + "-dlq"})
	must(t, err)
	if got[0].Ready.Known || got[0].Missing || got[1].Ready != broker.Known(0) {
		t.Errorf("without the declaration: %+v", got)
	}
	_, err = other.Observe(t.Context(), []broker.Declaration{decl})
	must(t, err)
	got, err = other.Depths(t.Context(), []string{d.queue})
	must(t, err)
	if got[0].Ready != broker.Known(0) {
		t.Errorf("once the declaration was observed: %+v", got)
	}
}

// TestSourceCountsOneReader: each Topology of a source has its own backlog, which is that of the source and of what came
// back to it at once.
func TestSourceCountsOneReader(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	d.foreign(d.queue, 1, nil)
	audit := d.decl(`{"partitions": 1}`, func(s *topology.Spec) { s.Queue, s.Source = d.queue+".audit", d.queue })
	d.declare(audit)
	d.produce(d.queue, 5)
	d.produce(d.queue+".audit", 1)
	d.commit(d.queue+".audit", d.queue, map[int32]kadm.Offset{0: {At: 3, LeaderEpoch: -1}})
	if got := d.depth(d.queue + ".audit"); got.Ready != broker.Known(3) {
		t.Errorf("got %+v, want 2 of the source and 1 of its own", got)
	}
}
