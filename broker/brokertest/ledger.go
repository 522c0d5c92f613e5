package brokertest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
)

// Ledger is the account of messages over a run with faults: everything that was published is acknowledged, dead,
// discarded or still there, and whatever happened twice is explained by a fault. It is safe for concurrent use.
type Ledger struct {
	mu     sync.Mutex
	events int // numbers events in the order in which they were noted
	faults []int
	byID   map[string]*entry
}

// entry is what is known of one message.
type entry struct {
	published, unknown     bool
	acked, dead, discarded int
	left                   int
	first                  int // event of the first call, 0: none
	calls                  map[attempt]int
	twice                  []duplicate
}

// attempt is a message at one point of its way: without a fault there is one call for it.
type attempt struct{ retries, defers uint32 }

type duplicate struct {
	event int
	what  string
}

func (l *Ledger) of(id string) *entry {
	if l.byID == nil {
		l.byID = map[string]*entry{}
	}
	e := l.byID[id]
	if e == nil {
		e = &entry{calls: map[attempt]int{}}
		l.byID[id] = e
	}
	l.events++
	return e
}

// note changes an entry under the lock.
func (l *Ledger) note(id string, change func(*entry)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change(l.of(id))
}

// Published notes a message that the broker confirmed.
func (l *Ledger) Published(ids ...string) {
	for _, id := range ids {
		l.note(id, func(e *entry) { e.published = true })
	}
}

// Unknown notes a message that may have been stored.
func (l *Ledger) Unknown(ids ...string) {
	for _, id := range ids {
		l.note(id, func(e *entry) { e.unknown = true })
	}
}

// Fault notes that something was broken at this moment.
func (l *Ledger) Fault() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events++
	l.faults = append(l.faults, l.events)
}

// Called notes that a handler begins.
func (l *Ledger) Called(id string, retries, defers uint32) {
	l.note(id, func(e *entry) {
		if e.first == 0 {
			e.first = l.events
		}
		at := attempt{retries, defers}
		if e.calls[at]++; e.calls[at] > 1 {
			e.twice = append(e.twice, duplicate{l.events, fmt.Sprintf("handled %d times with retry count %d and defer count %d", e.calls[at], retries, defers)})
		}
	})
}

// Acked notes that a handler returned Ack.
func (l *Ledger) Acked(id string) { l.note(id, func(e *entry) { e.acked++; l.end(e) }) }

// Dead notes a message in the dead-letter queue.
func (l *Ledger) Dead(ids ...string) {
	for _, id := range ids {
		l.note(id, func(e *entry) { e.dead++; l.end(e) })
	}
}

// Discarded notes a message that was discarded, with a warning.
func (l *Ledger) Discarded(ids ...string) {
	for _, id := range ids {
		l.note(id, func(e *entry) { e.discarded++; l.end(e) })
	}
}

// Left notes a message that is still in the main queue or a hold queue.
func (l *Ledger) Left(ids ...string) {
	for _, id := range ids {
		l.note(id, func(e *entry) { e.left++; l.end(e) })
	}
}

// end notes as a duplicate that a message came to more than one end.
func (l *Ledger) end(e *entry) {
	if n := e.acked + e.dead + e.discarded + e.left; n > 1 {
		e.twice = append(e.twice, duplicate{l.events, fmt.Sprintf("ended %d times (acked %d, dead %d, discarded %d, left %d)", n, e.acked, e.dead, e.discarded, e.left)})
	}
}

// Check says what does not add up: lost messages, messages that nobody published, and duplicates that no fault
// between the first call and the second explains.
func (l *Ledger) Check() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var wrong []string
	for id, e := range l.byID {
		ends := e.acked + e.dead + e.discarded + e.left
		if e.published && ends == 0 {
			wrong = append(wrong, fmt.Sprintf("%s is lost: published, called %d times, and nowhere now", id, len(e.calls)))
		}
		if !e.published && !e.unknown {
			wrong = append(wrong, id+" was never published")
		}
		for _, d := range e.twice {
			if !l.faultBetween(e.first, d.event) {
				wrong = append(wrong, id+" "+d.what+", and no fault explains it")
			}
		}
	}
	if len(wrong) == 0 {
		return nil
	}
	slices.Sort(wrong)
	const shown = 10
	n := len(wrong)
	return errors.New(strings.Join(wrong[:min(n, shown)], "\n") + fmt.Sprintf("\n(%d problems in all)", n))
}

func (l *Ledger) faultBetween(first, second int) bool {
	for _, f := range l.faults {
		if f > first && f <= second {
			return true
		}
	}
	return false
}

// Duplicates counts what happened twice.
func (l *Ledger) Duplicates() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, e := range l.byID {
		n += len(e.twice)
	}
	return n
}
