package kafka

import (
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// clock is what is known of the brokers' clock. A held record is due by it, and Kafka tells it in one place only: the
// time at which it appended a record. A record that is fetched as soon as it is there shows how far the clocks are
// apart, short of the time it took to get here: by so much held messages are late, and never early.
//
// Until the first such record the clocks are taken to agree.
type clock struct {
	mu sync.Mutex
	// best is the largest difference of the window that is running, last that of the one before.
	best, last  time.Duration
	known, kept bool
	since       time.Time
}

// clockWindow is how long a measurement counts: clocks are adjusted.
const clockWindow = 5 * time.Minute

// received notes that a record with the broker's time arrived that was not there a moment before.
func (c *clock) received(stamp, now time.Time) {
	ahead := stamp.Sub(now)
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Sub(c.since) > clockWindow {
		c.last, c.kept = c.best, c.known
		c.known, c.since = false, now
	}
	if !c.known || ahead > c.best {
		c.best, c.known = ahead, true
	}
}

// now is the brokers' time, or somewhat earlier.
func (c *clock) now(local time.Time) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.known && c.kept:
		return local.Add(max(c.best, c.last))
	case c.known:
		return local.Add(c.best)
	case c.kept:
		return local.Add(c.last)
	}
	return local
}

// byBroker says whether a record carries the time at which the broker appended it.
func byBroker(r *kgo.Record) bool { return r.Attrs.TimestampType() == 1 }

// dueAt is when a record of a hold topic is due. The broker's time is cut to milliseconds.
func dueAt(r *kgo.Record, delay time.Duration) time.Time {
	return r.Timestamp.Add(delay + time.Millisecond)
}
