package nats

import (
	"context"
	"sync/atomic"
	"time"
)

// clock tells the time of a stream's leader, which fires scheduled messages, from the process's own (B4). A request
// bounds the difference between the two: the leader read its clock after the request was sent and before its answer
// came.
type clock struct{ bounds atomic.Pointer[bounds] }

type bounds struct{ least, most time.Duration }

// measureEvery is how often the difference is measured, because clocks drift.
const measureEvery = time.Hour

// measure asks for the time, as often as samples says, and keeps the narrowest answer.
func (k *clock) measure(ctx context.Context, c *conn, stream string, samples int) (*streamInfo, error) {
	var best *bounds
	var info *streamInfo
	for range samples {
		sent := time.Now()
		got, err := c.stream(ctx, stream)
		if err != nil {
			return nil, err
		}
		came := time.Now()
		b := &bounds{least: got.Now.Sub(came), most: got.Now.Sub(sent)}
		if got.Now.IsZero() { // the server does not tell
			b = &bounds{}
		}
		if best == nil || b.most-b.least < best.most-best.least {
			best = b
		}
		info = got
	}
	k.bounds.Store(best)
	return info, nil
}

// after is a time on the leader's clock that is at least d from now.
func (k *clock) after(now time.Time, d time.Duration) time.Time {
	if b := k.bounds.Load(); b != nil {
		d += b.most
	}
	return now.Add(d)
}

// left is how long a time on the leader's clock is still ahead, at the most.
func (k *clock) left(now time.Time, due time.Time) time.Duration {
	if b := k.bounds.Load(); b != nil {
		now = now.Add(b.least)
	}
	return due.Sub(now)
}
