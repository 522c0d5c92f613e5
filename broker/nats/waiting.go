package nats

import (
	"sync"
	"time"

	"github.com/shove-dev/shove/broker/header"
)

// waiting remembers what the outcomes of messages that wait in place left behind (J2): the message itself cannot be
// written to, and the server counts deliveries only. It lives as long as the process and is shared by its
// subscriptions, so that a reconnect loses nothing. What it does not know, such as what another process decided, is
// taken from the server's count.
type waiting struct {
	mu  sync.Mutex
	all map[waitKey]waiter
}

type waitKey struct {
	stream, consumer string
	seq              uint64
}

type waiter struct {
	delivered uint64 // how often it had been delivered then
	due       time.Time
	fields    []header.Field
}

// maxWaiting bounds the memory. Beyond it what is overdue goes, which other consumers have got, then anything.
const (
	maxWaiting = 100_000
	overdue    = 10 * time.Minute
)

func (w *waiting) put(k waitKey, v waiter) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.all == nil {
		w.all = map[waitKey]waiter{}
	}
	if len(w.all) >= maxWaiting {
		now := time.Now()
		for k, old := range w.all {
			if now.Sub(old.due) > overdue {
				delete(w.all, k)
			}
		}
		for k := range w.all {
			if len(w.all) < maxWaiting {
				break
			}
			delete(w.all, k)
		}
	}
	w.all[k] = v
}

func (w *waiting) take(k waitKey) (waiter, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	v, ok := w.all[k]
	if ok {
		delete(w.all, k)
	}
	return v, ok
}

// early says how much is left of a wait that the server ended too soon: it keeps delays in memory, and those of a
// crashed one are over when the ack wait is.
func (v waiter) early(o origin, now time.Time) time.Duration {
	if o.delivered != v.delivered+1 { // somebody else had it since, and decides
		return 0
	}
	return v.due.Sub(now)
}

// resume gives a delivery the counts that it had before it waited.
func (e *entry) resume(v waiter, known bool) {
	retries := header.Parse(e.Headers).Retries
	others := e.origin.delivered - 1 // redeliveries that nobody here decided
	h := make(header.Map, len(e.Headers)+len(v.fields)+1)
	for name, value := range e.Headers {
		h[name] = value
	}
	if known {
		others = e.origin.delivered - min(e.origin.delivered, v.delivered+1)
		for _, f := range v.fields {
			h[f.Name] = f.Value
			if n, ok := header.Int(f.Value); ok && f.Name == header.RetryCount {
				retries = uint32(min(max(n, 0), 1<<31))
			}
		}
	}
	h[header.RetryCount] = int64(retries) + int64(min(others, 1<<31))
	e.Headers = h
}
