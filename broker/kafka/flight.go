package kafka

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/shove-dev/shove/broker"
)

const (
	// maxBatch bounds one produce request; a broker by default takes a batch of 1 MiB (max.message.bytes).
	maxBatch = 1_000_012
	// cancelGrace is how long a record that need not be sent any more may take to say so.
	cancelGrace = 100 * time.Millisecond
	// deliveryTimeout is how long the library goes on with a record nobody waits for any more.
	deliveryTimeout = 2 * time.Minute
)

// producerOptions are those of the client that publishes: idempotent, confirmed by all in-sync replicas, and at once.
func producerOptions() []kgo.Opt {
	return []kgo.Opt{
		kgo.RequiredAcks(kgo.AllISRAcks()),
		kgo.ProducerLinger(0),
		kgo.RecordPartitioner(spread{}),
		kgo.ProducerBatchMaxBytes(maxBatch),
		kgo.RecordDeliveryTimeout(deliveryTimeout),
		kgo.MetadataMinAge(metadataAge),
	}
}

// flight is records on their way.
type flight struct {
	client  *kgo.Client
	ctx     context.Context
	records []*kgo.Record
	results chan result
}

type result struct {
	index int
	err   error
}

func newFlight(c *kgo.Client, n int) *flight {
	return &flight{client: c, records: make([]*kgo.Record, 0, n), results: make(chan result, n)}
}

// send hands a record to the library, at most as many as the flight was made for.
func (f *flight) send(ctx context.Context, r *kgo.Record) {
	i := len(f.records)
	f.ctx = ctx
	f.records = append(f.records, r)
	f.client.Produce(ctx, r, func(_ *kgo.Record, err error) { f.results <- result{i, err} })
}

// wait returns what became of each record. One that is not known to be stored is an error; of those that are not known
// not to be stored it wraps ErrUnknown. It is called once.
func (f *flight) wait() []error {
	errs := make([]error, len(f.records))
	if len(f.records) == 0 {
		return errs
	}
	pending := make([]bool, len(f.records))
	for i := range pending {
		pending[i] = true
	}
	over := f.ctx.Done()
	var grace <-chan time.Time
	for range f.records {
		select {
		case r := <-f.results:
			errs[r.index], pending[r.index] = f.outcome(r), false
			continue
		default:
		}
		for got := false; !got; {
			select {
			case r := <-f.results:
				errs[r.index], pending[r.index] = f.outcome(r), false
				got = true
			case <-over:
				over, grace = nil, time.After(cancelGrace)
			case <-grace:
				for i, p := range pending {
					if p {
						errs[i] = fmt.Errorf("no confirm came: %w: %w", broker.ErrUnknown, context.Cause(f.ctx))
					}
				}
				return errs
			}
		}
	}
	return errs
}

func (f *flight) outcome(r result) error {
	if r.err == nil {
		return nil
	}
	if errors.Is(r.err, kerr.UnknownTopicOrPartition) || errors.Is(r.err, kerr.UnknownTopicID) {
		// The library remembers the topic; one that is made anew would never be found.
		f.client.PurgeTopicsFromProducing(f.records[r.index].Topic)
	}
	return produceError(r.err)
}

// produceError puts an error of producing under one of the seam's. The library fails a record with a context's error
// only as long as it was not sent.
func produceError(err error) error {
	switch {
	case errors.Is(err, kerr.UnknownTopicOrPartition), errors.Is(err, kerr.UnknownTopicID):
		return fmt.Errorf("%w: the topic does not exist: %w", broker.ErrUnroutable, err)
	case errors.Is(err, kerr.MessageTooLarge), errors.Is(err, kerr.RecordListTooLarge):
		return fmt.Errorf("%w: %w", broker.ErrTooLarge, err)
	case errors.Is(err, kerr.TopicAuthorizationFailed), errors.Is(err, kerr.ClusterAuthorizationFailed):
		return fmt.Errorf("%w: %w", broker.ErrUnauthorized, err)
	case errors.Is(err, kerr.InvalidRecord), errors.Is(err, kerr.InvalidTimestamp), errors.Is(err, kerr.PolicyViolation),
		errors.Is(err, kerr.InvalidRequiredAcks), errors.Is(err, kerr.UnsupportedForMessageFormat), errors.Is(err, kerr.NotEnoughReplicas):
		return fmt.Errorf("%w: %w", broker.ErrRejected, err)
	case errors.Is(err, kgo.ErrMaxBuffered), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), errors.Is(err, kgo.ErrRecordTimeout):
		return fmt.Errorf("not sent: %w: %w", broker.ErrUnavailable, err)
	default:
		return fmt.Errorf("%w: %w", broker.ErrUnknown, err)
	}
}

// spread puts records with a key where Kafka's own clients put them, and the others where their Partition says, modulo
// the number of partitions.
type spread struct{}

func (spread) ForTopic(topic string) kgo.TopicPartitioner {
	return &spreadTopic{keyed: kgo.StickyKeyPartitioner(nil).ForTopic(topic)}
}

type spreadTopic struct{ keyed kgo.TopicPartitioner }

func (*spreadTopic) RequiresConsistency(r *kgo.Record) bool { return len(r.Key) > 0 }

func (t *spreadTopic) Partition(r *kgo.Record, n int) int {
	if len(r.Key) > 0 {
		return t.keyed.Partition(r, n)
	}
	return int(r.Partition) % n
}

// turns says where records without a key go: on to the next partition after each run, so that every consumer gets its
// share and a request still has few batches.
type turns struct{ next atomic.Uint32 }

// batchRuns is into how many runs the messages of one call are split at least, as far as there are so many.
const batchRuns = 16

func (t *turns) take() int32 { return int32(t.next.Add(1) & (1<<30 - 1)) }

// run is how many of n records go to one partition.
func run(n int) int { return max(1, n/batchRuns) }
