package kafka

import (
	"fmt"
	"strconv"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
)

// slabSize is how many entries are allocated at once. Larger slabs keep more settled messages in memory for the sake
// of one slow one.
const slabSize = 32

// contentType is the header that says what the value is, as CloudEvents and others write it.
const contentType = "content-type"

// entry is one delivery of a subscription. Entries are allocated in slabs.
type entry struct {
	broker.Delivery
	record *kgo.Record
	from   *partition
	state  state // guarded by the subscription's mu
}

// state of a delivery.
type state uint8

const (
	unsettled state = iota
	settling        // a call of Settle is at it
	settled
)

// partition is one assignment of a partition to this consumer. When it is assigned again that is another value, so
// that a late outcome never touches a newer assignment.
type partition struct {
	topic string
	id    int32
	// delay is that of the hold topic; zero: it is no hold topic.
	delay time.Duration

	// revoking: nothing more is delivered, and what no handler has begun should be given back.
	revoking atomic.Bool

	// Guarded by the subscription's mu.
	track     *tracker
	priorSeen int64 // what is below was delivered before this assignment
	queue     queue // fetched, not delivered
	again     []*entry
	fetched   int64 // the end of what was fetched
	end       int64 // of the log, when it was last fetched from; of hold topics
	epoch     int32 // of the leader that the last record came from
	dirty     bool
	lost      error // it is not ours any more
	paused    bool  // nothing more is fetched for now
}

func (p *partition) String() string { return p.topic + "/" + strconv.Itoa(int(p.id)) }

// queue holds records in the order of the log.
type queue struct {
	records []*kgo.Record
	head    int
}

func (q *queue) len() int { return len(q.records) - q.head }

func (q *queue) push(rs []*kgo.Record) {
	if q.head == len(q.records) {
		q.records, q.head = q.records[:0], 0
	}
	if q.head > 0 && q.head >= len(q.records)/2 {
		n := copy(q.records, q.records[q.head:])
		clear(q.records[n:])
		q.records, q.head = q.records[:n], 0
	}
	q.records = append(q.records, rs...)
}

func (q *queue) peek() *kgo.Record { return q.records[q.head] }

func (q *queue) pop() {
	q.records[q.head] = nil
	q.head++
}

func (q *queue) clear() { q.records, q.head = nil, 0 }

// fill makes the caller's view of a delivery.
func (e *entry) fill(r *kgo.Record, from *partition) {
	e.record, e.from = r, from
	e.Delivery = broker.Delivery{
		Body:        r.Value,
		Key:         string(r.Key),
		Redelivered: r.Offset < from.priorSeen,
		Partition:   r.Partition,
		Offset:      r.Offset,
		Timestamp:   r.Timestamp,
		Native:      e,
	}
	if len(r.Headers) > 0 {
		e.Headers, e.ContentType = headersOf(r.Headers)
	}
}

// headersOf is the caller's view of headers: text where it is text, else bytes. Of several headers of one name the last
// counts, as for Kafka's own clients; a copy keeps them all.
func headersOf(hs []kgo.RecordHeader) (m header.Map, ct string) {
	m = make(header.Map, len(hs))
	for _, h := range hs {
		switch {
		case h.Key == contentType:
			ct = string(h.Value)
		case utf8.Valid(h.Value):
			m[h.Key] = string(h.Value)
		default:
			m[h.Key] = h.Value
		}
	}
	return m, ct
}

// DeliveryID is the topic, the partition and the offset.
func (e *entry) DeliveryID() string { return e.MessageID() }

// MessageID is the place in the log, which a redelivery repeats (C8).
func (e *entry) MessageID() string {
	return e.from.String() + "/" + strconv.FormatInt(e.record.Offset, 10)
}

// Death is nothing: Kafka dead-letters no message by itself.
func (e *entry) Death() header.Death { return header.Death{} }

// Revoked says that the partition is moving to another consumer (broker.Revocable).
func (e *entry) Revoked() bool { return e.from.revoking.Load() }

// text is a header's value on the wire.
func text(v any) []byte {
	switch x := v.(type) {
	case string:
		return []byte(x)
	case []byte:
		return x
	case int64:
		return strconv.AppendInt(nil, x, 10)
	case nil:
		return nil
	case time.Time:
		return []byte(x.UTC().Format(time.RFC3339Nano))
	default:
		return []byte(fmt.Sprint(x))
	}
}
