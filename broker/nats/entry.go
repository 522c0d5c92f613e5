package nats

import (
	"strconv"
	"strings"
	"time"

	natsgo "github.com/nats-io/nats.go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
)

// slabSize is how many entries are allocated at once. Larger slabs keep more settled messages in memory for the sake
// of one slow one.
const slabSize = 32

// entry is one delivery that a subscription holds: what the caller sees, what the library gave, and its place among
// the unsettled ones. Entries are allocated in slabs.
type entry struct {
	broker.Delivery
	msg    *natsgo.Msg
	sub    *subscription
	from   *puller
	origin origin

	// Guarded by the subscription's mu.
	state      state
	renewed    time.Time // since when the server counts the ack wait
	until      time.Time // the end of the lease; zero: none
	received   bool      // Receive returned it
	prev, next *entry
}

// state of a delivery.
type state uint8

const (
	unsettled state = iota
	settling        // a call of Settle is at it
	settled
)

// origin is what the reply subject of a delivery says.
type origin struct {
	seq       uint64 // in the stream
	delivered uint64 // how often, this time included
	stamp     int64  // when the stream stored it, Unix nanoseconds
}

// parseReply reads $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>, also with the
// domain and account before the stream, and a further token at the end. What comes before the numbers is the same for
// all messages of a consumer, and is returned to be skipped the next time.
func parseReply(reply, prefix string) (o origin, same string, ok bool) {
	if prefix == "" || !strings.HasPrefix(reply, prefix) {
		if prefix, ok = replyPrefix(reply); !ok {
			return origin{}, "", false
		}
	}
	var n [4]uint64
	rest := reply[len(prefix):]
	for i := range n {
		end := strings.IndexByte(rest, '.')
		if end <= 0 || end > 20 {
			return origin{}, "", false
		}
		for _, c := range []byte(rest[:end]) {
			if c < '0' || c > '9' {
				return origin{}, "", false
			}
			n[i] = n[i]*10 + uint64(c-'0')
		}
		rest = rest[end+1:]
	}
	return origin{delivered: n[0], seq: n[1], stamp: int64(n[3])}, prefix, true
}

func replyPrefix(reply string) (string, bool) {
	const start = "$JS.ACK."
	if !strings.HasPrefix(reply, start) {
		return "", false
	}
	skip := 2 // stream and consumer
	if strings.Count(reply, ".") >= 10 {
		skip = 4
	}
	end := len(start)
	for range skip {
		i := strings.IndexByte(reply[end:], '.')
		if i < 0 {
			return "", false
		}
		end += i + 1
	}
	return reply[:end], true
}

// Header names of NATS (https://docs.nats.io/nats-concepts/jetstream/headers).
const (
	natsPrefix      = "Nats-"
	headerMsgID     = "Nats-Msg-Id"
	headerSchedule  = "Nats-Schedule"
	headerTarget    = "Nats-Schedule-Target"
	headerScheduler = "Nats-Scheduler" // on a message that was scheduled
	headerNext      = "Nats-Schedule-Next"
	contentType     = "Content-Type"
)

// fill makes the caller's view of a delivery.
func (e *entry) fill() {
	m := e.msg
	delivered := uint32(min(e.origin.delivered, 1<<31))
	e.Delivery = broker.Delivery{
		Body:          m.Data,
		Redelivered:   delivered > 1,
		DeliveryCount: delivered,
		Partition:     -1,
		Offset:        int64(e.origin.seq),
		Timestamp:     time.Unix(0, e.origin.stamp),
		Native:        e,
	}
	if len(m.Header) > 0 {
		e.Headers = headersOf(m.Header)
		e.ContentType = m.Header.Get(contentType)
		e.Key = m.Header.Get(header.Key)
	}
}

// headersOf is the caller's view of headers: what is the application's and ours, without what is NATS's own. Several
// values of one name become one text; a copy keeps them apart.
func headersOf(h natsgo.Header) header.Map {
	m := make(header.Map, len(h))
	for name, values := range h {
		switch {
		case len(values) == 0, name == contentType:
		case strings.HasPrefix(name, natsPrefix) && (name != headerMsgID || len(h[header.MessageID]) > 0):
		case len(values) == 1:
			m[name] = values[0]
		default:
			m[name] = strings.Join(values, ",")
		}
	}
	return m
}

// DeliveryID is the stream, the message's place in it, and how often it was delivered.
func (e *entry) DeliveryID() string {
	return e.from.stream + "/" + strconv.FormatUint(e.origin.seq, 10) + "/" + strconv.FormatUint(e.origin.delivered, 10)
}

// MessageID is the stream and the message's place in it (C8).
func (e *entry) MessageID() string {
	return e.from.stream + "/" + strconv.FormatUint(e.origin.seq, 10)
}

// Death is nothing: NATS dead-letters no message by itself.
func (e *entry) Death() header.Death { return header.Death{} }

// list is the unsettled deliveries in the order of their arrival.
type list struct {
	head, tail *entry
	n          int
}

func (l *list) push(e *entry) {
	e.prev, e.next = l.tail, nil
	if l.tail != nil {
		l.tail.next = e
	} else {
		l.head = e
	}
	l.tail = e
	l.n++
}

func (l *list) remove(e *entry) {
	switch {
	case e.prev != nil:
		e.prev.next = e.next
	case l.head == e:
		l.head = e.next
	default:
		return // not in the list
	}
	if e.next != nil {
		e.next.prev = e.prev
	} else {
		l.tail = e.prev
	}
	e.prev, e.next = nil, nil
	l.n--
}
