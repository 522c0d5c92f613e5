package header

import (
	"time"

	"github.com/shove-dev/shove/settle"
)

// Field is one header that a copy gets. Value is a string or an int64; brokers whose headers are text write the
// integer in decimal (C5).
type Field struct {
	Name  string
	Value any
}

// Stamp appends to dst the headers that the copy written for an action carries beside the original's own ones
// (those that Keep keeps): identity, counts, times, history and, for a dead letter, its death. Queue is the logical
// name of the queue the message was consumed from.
func Stamp(dst []Field, f Facts, a settle.Action, queue, deliveryID string, now time.Time) []Field {
	if f.MessageID != "" {
		dst = append(dst, Field{MessageID, f.MessageID})
	}
	if f.Derived {
		dst = append(dst, Field{IDDerived, "true"})
	}
	dst = append(dst, Field{RetryCount, int64(a.Retries)})
	if a.Defers > 0 {
		dst = append(dst, Field{DeferCount, int64(a.Defers)})
	}
	if !f.FirstSeen.IsZero() {
		dst = append(dst, Field{FirstSeen, f.FirstSeen.UnixMilli()})
	}
	if !a.NotBefore.IsZero() {
		dst = append(dst, Field{NotBefore, a.NotBefore.UnixMilli()})
	}
	if a.Kind == settle.Hold {
		dst = append(dst, Field{Due, now.Add(a.Delay).UnixMilli()})
	}
	if f.History != "" {
		dst = append(dst, Field{History, f.History})
	}
	deaths := f.Death.Count
	if a.Kind == settle.DeadLetter {
		deaths++
		dst = append(dst, Field{DeathReason, string(a.Reason)}, Field{OriginalQueue, queue}, Field{DiedAt, now.UnixMilli()})
		if a.Text != "" {
			dst = append(dst, Field{DeathDetail, Clip(a.Text, maxDetail)})
		}
		if deliveryID != "" {
			dst = append(dst, Field{DeliveryID, deliveryID})
		}
	}
	if deaths > 0 {
		dst = append(dst, Field{DeathCount, int64(deaths)})
	}
	return dst
}

// maxDetail bounds the free text of a death in bytes.
const maxDetail = 2 << 10

// Drop removes the fields of one name, for a copy that does not fit its frame (C9).
func Drop(fields []Field, name string) []Field {
	kept := make([]Field, 0, len(fields))
	for _, f := range fields {
		if f.Name != name {
			kept = append(kept, f)
		}
	}
	return kept
}
