package main

import (
	"errors"
	"maps"
	"strconv"
	"strings"
	"sync"

	natsgo "github.com/nats-io/nats.go"

	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/hack/demo/ledger"
)

// tapPrefix is put before the subjects under which streams publish the headers of what they stored.
const tapPrefix = "shove-demo."

// Subjects and headers of JetStream. See https://docs.nats.io/reference/reference-protocols/nats_api_reference.
const (
	ackPrefix       = "$JS.ACK."
	headerStream    = "Nats-Stream"
	headerSubject   = "Nats-Subject"
	headerSequence  = "Nats-Sequence"
	headerScheduler = "Nats-Scheduler"
)

// natsTap listens to what the server stores and to the acknowledgements that it gets. From the place of a message in
// its stream it tells which one was acknowledged. Deliveries are not published anywhere: a message was delivered when
// it is acknowledged, or when its copy is stored.
type natsTap struct {
	messages chan *natsgo.Msg
	done     chan struct{}

	mu    sync.Mutex
	books *ledger.Ledger
	seen  seen
	// places are messages that were stored and not acknowledged, waiting those of them that were not seen delivered, by
	// the message's id.
	places  map[place]*stored
	waiting map[string]place
	early   map[place]ack // acknowledgements that came before the message that they are about
}

// place is a message's in its stream.
type place struct {
	stream string
	seq    uint64
}

type stored struct {
	queue     string
	id        string
	headers   header.Map
	delivered bool
}

type ack struct{ deliveries int }

// seen is what the tap has seen stored: by queue, and up to which place of each stream.
type seen struct {
	queues map[string]int
	last   map[string]uint64
}

func openNATSTap(conn *natsgo.Conn) (*natsTap, error) {
	t := &natsTap{
		messages: make(chan *natsgo.Msg, 1<<16), done: make(chan struct{}), seen: seen{map[string]int{}, map[string]uint64{}},
		places: map[place]*stored{}, waiting: map[string]place{}, early: map[place]ack{},
	}
	for _, subject := range []string{tapPrefix + ">", ackPrefix + ">"} {
		if _, err := conn.ChanSubscribe(subject, t.messages); err != nil {
			return nil, err
		}
	}
	if err := conn.Flush(); err != nil {
		return nil, err
	}
	go func() {
		defer close(t.done)
		for m := range t.messages {
			t.take(m)
		}
	}()
	return t, nil
}

// close ends the tap; its connection is closed already.
func (t *natsTap) close() {
	close(t.messages)
	<-t.done
}

func (t *natsTap) open(l *ledger.Ledger) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.books = l
}

func (t *natsTap) stored() seen {
	t.mu.Lock()
	defer t.mu.Unlock()
	return seen{maps.Clone(t.seen.queues), maps.Clone(t.seen.last)}
}

func (t *natsTap) take(m *natsgo.Msg) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.books == nil {
		return
	}
	if strings.HasPrefix(m.Subject, ackPrefix) {
		if p, a, err := parseAck(m.Subject); err == nil && isAck(m.Data) {
			t.acked(p, a)
		}
		return
	}
	seq, err := strconv.ParseUint(m.Header.Get(headerSequence), 10, 64)
	p := place{m.Header.Get(headerStream), seq}
	if err != nil || p.stream == "" {
		return
	}
	t.store(p, m.Header)
}

// store books a message that a stream stored.
func (t *natsTap) store(p place, h natsgo.Header) {
	queue, _, _ := strings.Cut(h.Get(headerSubject), ".")
	s := &stored{queue: queue, headers: header.Map{}}
	for name, values := range h {
		if !strings.HasPrefix(name, "Nats-") && len(values) > 0 {
			s.headers[name] = values[0]
		}
	}
	s.id = header.Parse(s.headers).MessageID
	t.seen.queues[queue]++
	t.seen.last[p.stream] = max(t.seen.last[p.stream], p.seq)
	q := t.books.Queues()
	if queue != q.Main { // a copy: so its original was delivered
		t.deliver(t.waiting[s.id], 1)
	}
	if h.Get(headerScheduler) == "" { // else the server moved it from where it was held
		t.books.Record(ledger.Event{Published: true, Queue: queue, MessageID: s.id, Headers: s.headers})
	}
	if queue != q.Main && queue != q.DeadLetter {
		return // what is held is not delivered from there
	}
	t.places[p] = s
	if queue == q.Main {
		t.waiting[s.id] = p
	}
	if a, ok := t.early[p]; ok {
		delete(t.early, p)
		t.acked(p, a)
	}
}

func (t *natsTap) acked(p place, a ack) {
	if t.places[p] == nil {
		if p.seq > t.seen.last[p.stream] {
			t.early[p] = a
		}
		return // acknowledged already
	}
	t.deliver(p, a.deliveries)
	delete(t.places, p)
}

// deliver books the handover of a message to a consumer, once.
func (t *natsTap) deliver(p place, times int) {
	s := t.places[p]
	if s == nil || s.delivered {
		return
	}
	s.delivered = true
	if t.waiting[s.id] == p {
		delete(t.waiting, s.id)
	}
	for i := range times {
		t.books.Record(ledger.Event{Queue: s.queue, Redelivered: i > 0, MessageID: s.id, Headers: s.headers})
	}
}

// isAck tells an acknowledgement from a sign of life or a handing back.
func isAck(data []byte) bool {
	text := string(data)
	return text == "" || strings.HasPrefix(text, "+ACK") || strings.HasPrefix(text, "+TERM")
}

// parseAck reads $JS.ACK.{stream}.{consumer}.{deliveries}.{place in the stream}.…, or the longer form with domain and
// account before the stream.
func parseAck(subject string) (place, ack, error) {
	tokens := strings.Split(strings.TrimPrefix(subject, ackPrefix), ".")
	if len(tokens) >= 9 {
		tokens = tokens[2:]
	}
	if len(tokens) < 7 {
		return place{}, ack{}, errors.New("not the subject of an acknowledgement")
	}
	deliveries, err := strconv.Atoi(tokens[2])
	if err != nil {
		return place{}, ack{}, err
	}
	seq, err := strconv.ParseUint(tokens[3], 10, 64)
	return place{tokens[0], seq}, ack{deliveries}, err
}
