// Package ledger keeps the books of the demo: what became of every message, as the broker itself reports it. It takes
// what a broker tells about itself (what was published into which queue, what was delivered out of which queue, with all
// headers) and nothing that a worker says.
package ledger

import (
	"strings"
	"sync"
	"time"

	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/settle"
)

// Queues are the physical names of a topology's queues.
type Queues struct {
	Main       string
	Holds      []string // the shortest delay first
	DeadLetter string
}

// Event is one thing that happened at the broker.
type Event struct {
	// Published into Queue; otherwise delivered out of it.
	Published   bool
	Queue       string
	Redelivered bool
	MessageID   string // the message's property; the header counts when it is empty
	Headers     header.Map
}

// Cause is why a message was retried.
type Cause string

// The causes that the demo tells apart.
const (
	CauseError   Cause = "error"
	CauseTimeout Cause = "timeout"
	CausePanic   Cause = "panic"
)

// Counts are sums over all messages.
type Counts struct {
	// Published counts messages that a publisher sent, each once. Repeated counts those that it sent again.
	Published, Repeated int
	// Delivered counts handovers to a consumer of the main queue, Redelivered those of them that came back without
	// an outcome.
	Delivered, Redelivered int
	// Retried counts copies written to each tier with a retry spent, RetriedBy the same by cause.
	Retried   []int
	RetriedBy map[Cause]int
	// Deferred counts copies written to a tier without a retry spent, on a handler's wish. Waited counts further
	// rounds of a message whose time had not come.
	Deferred, Waited int
	// Returned counts messages that came back to a consumer from a tier.
	Returned int
	// Dead counts copies written to the dead-letter queue, by reason.
	Dead map[settle.Reason]int
	// Drained counts handovers to the consumer of the dead-letter queue.
	Drained int
	// Unknown counts events that fit no rule of these books; there should be none.
	Unknown int
}

// DeadTotal is the sum of Dead.
func (c Counts) DeadTotal() int {
	n := 0
	for _, v := range c.Dead {
		n += v
	}
	return n
}

// RetriedTotal is the sum of Retried.
func (c Counts) RetriedTotal() int {
	n := 0
	for _, v := range c.Retried {
		n += v
	}
	return n
}

// Note is a line for people about one event worth telling.
type Note struct {
	At   time.Time
	Text string
}

// place is where a message was seen last.
type place uint8

const (
	waiting place = iota // in the main queue
	handled              // handed to a consumer of the main queue
	held
	dead
	drained
)

type message struct {
	at              place
	retries, defers uint32
}

// Ledger keeps the books. It is safe for concurrent use.
type Ledger struct {
	queues Queues
	holds  map[string]int

	mu       sync.Mutex
	counts   Counts
	messages map[string]*message
	notes    []Note
}

// notesKept bounds Notes.
const notesKept = 8

// New opens the books of one topology.
func New(q Queues) *Ledger {
	l := &Ledger{queues: q, holds: map[string]int{}, messages: map[string]*message{}}
	for i, name := range q.Holds {
		l.holds[name] = i
	}
	l.counts = Counts{Retried: make([]int, len(q.Holds)), RetriedBy: map[Cause]int{}, Dead: map[settle.Reason]int{}}
	return l
}

// Queues are the names that the books were opened with.
func (l *Ledger) Queues() Queues { return l.queues }

// Record books an event.
func (l *Ledger) Record(e Event) {
	f := header.Parse(e.Headers)
	id := e.MessageID
	if id == "" {
		id = f.MessageID
	}
	tier, isHold := l.holds[e.Queue]
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case e.Queue == l.queues.Main && e.Published:
		l.published(id)
	case e.Queue == l.queues.Main:
		l.delivered(id, f, e.Redelivered)
	case isHold && e.Published:
		l.held(id, f, tier)
	case e.Queue == l.queues.DeadLetter && l.queues.DeadLetter != "" && e.Published:
		l.counts.Dead[f.Death.Reason]++
		l.message(id).at = dead
		l.note(id, "dead-lettered: "+string(f.Death.Reason)+detail(f.Death.Detail))
	case e.Queue == l.queues.DeadLetter && l.queues.DeadLetter != "":
		if !e.Redelivered {
			l.counts.Drained++
		}
		l.message(id).at = drained
	default:
		l.counts.Unknown++
	}
}

func (l *Ledger) message(id string) *message {
	m, ok := l.messages[id]
	if !ok {
		m = &message{}
		l.messages[id] = m
	}
	return m
}

func (l *Ledger) published(id string) {
	if _, known := l.messages[id]; known {
		l.counts.Repeated++
		return
	}
	l.counts.Published++
	l.message(id)
}

func (l *Ledger) delivered(id string, f header.Facts, redelivered bool) {
	m := l.message(id)
	if redelivered {
		l.counts.Redelivered++
	} else {
		l.counts.Delivered++
	}
	if m.at == held {
		l.counts.Returned++
	}
	m.at, m.retries, m.defers = handled, f.Retries, f.Defers
}

func (l *Ledger) held(id string, f header.Facts, tier int) {
	m := l.message(id)
	last := lastAttempt(f.History)
	switch {
	case f.Retries > m.retries:
		l.counts.Retried[tier]++
		l.counts.RetriedBy[causeOf(last.Reason)]++
		l.note(id, "retried over "+l.queues.Holds[tier]+detail(last.Reason))
	case f.Defers > m.defers:
		l.counts.Deferred++
		l.note(id, "deferred over "+l.queues.Holds[tier]+detail(last.Reason))
	default:
		l.counts.Waited++
	}
	m.at, m.retries, m.defers = held, f.Retries, f.Defers
}

func lastAttempt(history string) header.Attempt {
	all := header.ParseHistory(history)
	if len(all) == 0 {
		return header.Attempt{}
	}
	return all[len(all)-1]
}

// causeOf reads the reason that the runtime gives for a retry.
func causeOf(reason string) Cause {
	switch {
	case strings.HasPrefix(reason, "panic: "):
		return CausePanic
	case strings.HasPrefix(reason, "no outcome within "):
		return CauseTimeout
	default:
		return CauseError
	}
}

func detail(reason string) string {
	if reason == "" {
		return ""
	}
	return ": " + header.Clip(reason, 100)
}

func (l *Ledger) note(id, text string) {
	l.notes = append(l.notes, Note{time.Now(), id + " " + text})
	if len(l.notes) > notesKept {
		l.notes = l.notes[len(l.notes)-notesKept:]
	}
}

// Counts are the sums so far.
func (l *Ledger) Counts() Counts {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.counts
	c.Retried = append([]int(nil), c.Retried...)
	c.RetriedBy, c.Dead = map[Cause]int{}, map[settle.Reason]int{}
	for k, v := range l.counts.RetriedBy {
		c.RetriedBy[k] = v
	}
	for k, v := range l.counts.Dead {
		c.Dead[k] = v
	}
	return c
}

// Notes are the latest events worth telling, the oldest first.
func (l *Ledger) Notes() []Note {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]Note(nil), l.notes...)
}

// Balance is where every message that was published is now. It adds up by construction: a message is in exactly one
// place. When the broker's queues are empty and nothing is unacknowledged, Handled is the number of messages that were
// acknowledged for good, because a handler took them and nothing else became of them.
type Balance struct {
	Waiting, Handled, Held, Dead, Drained int
}

// Balance counts messages by where they were seen last.
func (l *Ledger) Balance() Balance {
	l.mu.Lock()
	defer l.mu.Unlock()
	var b Balance
	for _, m := range l.messages {
		switch m.at {
		case waiting:
			b.Waiting++
		case handled:
			b.Handled++
		case held:
			b.Held++
		case dead:
			b.Dead++
		case drained:
			b.Drained++
		}
	}
	return b
}
