package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/kafka"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/config"
)

// kafkaVar names the Kafka brokers to measure on.
const kafkaVar = "SHOVE_TEST_KAFKA_SERVERS"

// onKafka is a topic on Kafka, made and filled anew before each run.
type onKafka struct {
	setup
	servers []string
	n       int
}

func newOnKafka(partitions, prefetch, n int, holds ...time.Duration) (*onKafka, error) {
	servers := os.Getenv(kafkaVar)
	if servers == "" {
		return nil, errors.New("set " + kafkaVar + " to Kafka brokers, or run make bench")
	}
	o := &onKafka{servers: strings.Split(servers, ","), n: n}
	endpoint, err := json.Marshal(map[string][]string{"bootstrapServers": o.servers})
	if err != nil {
		return nil, err
	}
	o.setup = setup{driver: kafka.Driver, kind: config.Broker{Kind: "kafka", Endpoint: endpoint}, options: fmt.Appendf(nil, `{"partitions":%d}`, partitions), prefetch: prefetch, holds: holds}
	return o, o.anew()
}

// anew deletes the topics and what the group committed, and makes them again.
func (o *onKafka) anew() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	a, err := kafka.Driver.OpenAdmin(ctx, broker.Config{Endpoint: o.kind.Endpoint})
	if err != nil {
		return err
	}
	defer a.Close(ctx)
	names := []string{"bench", "bench-dlq"}
	for _, h := range o.declaration().Topology.Holds {
		names = append(names, h.Queue)
	}
	for { // a broker that was just started has no coordinator for a while
		_, err := a.Delete(ctx, names)
		if err == nil {
			break
		}
		if !errors.Is(err, broker.ErrUnavailable) || ctx.Err() != nil {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
	c, err := o.client()
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := kadm.NewClient(c).DeleteGroups(ctx, "bench"); err != nil {
		return err
	}
	return a.Declare(ctx, o.declaration())
}

func (o *onKafka) client(opts ...kgo.Opt) (*kgo.Client, error) {
	return kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(o.servers...), kgo.DisableClientMetrics()}, opts...)...)
}

// fill publishes n messages, evenly over the partitions.
func (o *onKafka) fill() error {
	if err := o.anew(); err != nil {
		return err
	}
	c, err := o.client(kgo.RecordPartitioner(kgo.RoundRobinPartitioner()), kgo.MaxBufferedRecords(o.n))
	if err != nil {
		return err
	}
	defer c.Close()
	rs := make([]*kgo.Record, o.n)
	for i := range rs {
		rs[i] = &kgo.Record{Topic: "bench", Value: body}
	}
	return c.ProduceSync(context.Background(), rs...).FirstErr()
}

func (o *onKafka) ours(handle func(*runtime.Metadata) runtime.Outcome) run {
	return func() (sample, error) {
		if err := o.fill(); err != nil {
			return sample{}, err
		}
		c := newCountdown(o.n)
		return o.consume(o.n, func(m *runtime.Metadata) runtime.Outcome {
			r := handle(m)
			if r.Verdict == runtime.Ack.Verdict {
				c.tick()
			}
			return r
		}, c.done, nil)
	}
}

// contiguous is what a hand-written consumer needs to know of a partition: the lowest record that is not done.
type contiguous struct {
	base int64
	done map[int64]struct{}
}

type contiguousAll struct {
	mu sync.Mutex
	at map[string]map[int32]*contiguous
}

// begin notes records in the order of the log.
func (c *contiguousAll) begin(r *kgo.Record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.at[r.Topic] == nil {
		c.at[r.Topic] = map[int32]*contiguous{}
	}
	if c.at[r.Topic][r.Partition] == nil {
		c.at[r.Topic][r.Partition] = &contiguous{base: r.Offset, done: map[int64]struct{}{}}
	}
}

func (c *contiguousAll) finish(r *kgo.Record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.at[r.Topic][r.Partition]
	if r.Offset != p.base {
		p.done[r.Offset] = struct{}{}
		return
	}
	for p.base++; len(p.done) > 0; p.base++ {
		if _, ok := p.done[p.base]; !ok {
			return
		}
		delete(p.done, p.base)
	}
}

func (c *contiguousAll) commit(cl *kgo.Client) error {
	c.mu.Lock()
	offsets := map[string]map[int32]kgo.EpochOffset{}
	for t, ps := range c.at {
		offsets[t] = map[int32]kgo.EpochOffset{}
		for id, p := range ps {
			offsets[t][id] = kgo.EpochOffset{Epoch: -1, Offset: p.base}
		}
	}
	c.mu.Unlock()
	var result error
	cl.CommitOffsetsSync(context.Background(), offsets, nil)
	return result
}

// byHand is a poll loop with ten workers, as many as our handlers, a tracker of what is done, and a commit every 100 ms.
func (o *onKafka) byHand(handle func(c *kgo.Client, r *kgo.Record, finish func())) run {
	return func() (sample, error) {
		if err := o.fill(); err != nil {
			return sample{}, err
		}
		stop := watch(o.n)
		topics := []string{"bench"}
		for _, h := range o.declaration().Topology.Holds {
			topics = append(topics, h.Queue)
		}
		c, err := o.client(kgo.ConsumerGroup("bench"), kgo.ConsumeTopics(topics...), kgo.DisableAutoCommit(), kgo.FetchMaxWait(250*time.Millisecond), kgo.ProducerLinger(0))
		if err != nil {
			return sample{}, err
		}
		defer c.Close()
		track := &contiguousAll{at: map[string]map[int32]*contiguous{}}
		left := newCountdown(o.n)
		work := make(chan *kgo.Record, o.prefetch)
		var wg sync.WaitGroup
		for range workers {
			wg.Go(func() {
				for r := range work {
					handle(c, r, func() {
						track.finish(r)
						if r.Topic == topics[len(topics)-1] {
							left.tick()
						}
					})
				}
			})
		}
		ended := make(chan struct{})
		wg.Go(func() {
			tick := time.NewTicker(100 * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-tick.C:
					_ = track.commit(c)
				case <-ended:
					return
				}
			}
		})
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		go func() { <-left.done; cancel() }()
		for ctx.Err() == nil {
			c.PollRecords(ctx, o.prefetch).EachPartition(func(p kgo.FetchTopicPartition) {
				for _, r := range p.Records {
					track.begin(r)
				}
				if p.Topic != "bench" && len(p.Records) > 0 { // of one delay, so that they fall due in order
					time.Sleep(time.Until(p.Records[len(p.Records)-1].Timestamp.Add(o.holds[0])))
				}
				for _, r := range p.Records {
					work <- r
				}
			})
		}
		cancel()
		close(work)
		close(ended)
		wg.Wait()
		err = track.commit(c)
		return stop(), err
	}
}

// workers is Concurrency's default.
const workers = 10

// copyOnce writes every message to the hold topic once, with as many on their way as the prefetch allows.
func (o *onKafka) copyOnce() func(*kgo.Client, *kgo.Record, func()) {
	hold := o.declaration().Topology.Holds[0].Queue
	flights := make(chan struct{}, o.prefetch)
	return func(c *kgo.Client, r *kgo.Record, finish func()) {
		if r.Topic != "bench" {
			finish()
			return
		}
		flights <- struct{}{}
		c.Produce(context.Background(), &kgo.Record{Topic: hold, Value: r.Value, Headers: []kgo.RecordHeader{{Key: "x-shove-retry-count", Value: []byte("1")}}},
			func(_ *kgo.Record, err error) {
				<-flights
				if err == nil {
					finish()
				}
			})
	}
}

func kafkaPairs() []lazyPair {
	var all []lazyPair
	for _, prefetch := range []int{100, 500} {
		where := fmt.Sprintf("kafka, 8 partitions, prefetch %d", prefetch)
		all = append(all,
			lazyPair{where + ", no-op", func(name string) (pair, error) {
				o, err := newOnKafka(8, prefetch, 300_000)
				if err != nil {
					return pair{}, err
				}
				return pair{name: name, goal: 0.9, ours: o.ours(noop), baseline: o.byHand(func(_ *kgo.Client, _ *kgo.Record, finish func()) { finish() })}, nil
			}},
			lazyPair{where + ", retried once", func(name string) (pair, error) {
				o, err := newOnKafka(8, prefetch, 50_000, 10*time.Millisecond)
				if err != nil {
					return pair{}, err
				}
				return pair{name: name, goal: 0.7, ours: o.ours(retryFirst), baseline: func() (sample, error) { return o.byHand(o.copyOnce())() }}, nil
			}})
	}
	return all
}

func kafkaHeld() held {
	return held{name: "kafka, 3 partitions, 100,000 held", p99: 50 * time.Millisecond, make: func() (setup, error) {
		o, err := newOnKafka(3, 500, 0, heldFor)
		if err != nil {
			return setup{}, err
		}
		return o.setup, nil
	}}
}

// timed is a run of ours that must end in time.
type timed struct {
	name string
	most time.Duration
	run  func() (sample, error)
}

func (t timed) check(out io.Writer) (bool, error) {
	s, err := t.run()
	if err != nil {
		return false, err
	}
	ok := s.wall <= t.most
	fmt.Fprintf(out, "%-46s %.2f s goal ≤%.1f s | %s\n", t.name, s.wall.Seconds(), t.most.Seconds(), map[bool]string{true: "ok", false: "MISSED"}[ok])
	return ok, nil
}

// kafkaParallel is the workload of Confluent's parallel consumer: 10,000 records of 0 to 5 ms of work each in one
// partition.
func kafkaParallel() []timed {
	return []timed{{"kafka, 10,000 records of 0–5 ms, one partition", 2300 * time.Millisecond, func() (sample, error) {
		o, err := newOnKafka(1, 200, 10_000)
		if err != nil {
			return sample{}, err
		}
		o.concurrency = 20
		if err := o.fill(); err != nil {
			return sample{}, err
		}
		c := newCountdown(o.n)
		return o.consume(o.n, func(*runtime.Metadata) runtime.Outcome {
			time.Sleep(time.Duration(rand.IntN(5_000)) * time.Microsecond)
			c.tick()
			return runtime.Ack
		}, c.done, nil)
	}}}
}
