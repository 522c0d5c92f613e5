// Package header holds the names of the message headers that shove reads and writes, how they are parsed, and which
// headers a copy keeps. It is the one place for all of that; backends only convert between Map and their wire.
package header

import (
	"strings"
	"time"

	"github.com/shove-dev/shove/settle"
)

// Headers that shove writes on every broker (W).
const (
	MessageID     = "x-message-id"
	RetryCount    = "x-shove-retry-count"
	DeferCount    = "x-shove-defer-count"
	FirstSeen     = "x-shove-first-seen"
	NotBefore     = "x-shove-not-before"
	Due           = "x-shove-due"
	IDDerived     = "x-shove-id-derived"
	DeliveryID    = "x-shove-delivery-id"
	History       = "x-shove-history"
	DeathReason   = "x-shove-death-reason"
	DeathDetail   = "x-shove-death-detail"
	DeathCount    = "x-shove-death-count"
	OriginalQueue = "x-shove-original-queue"
	DiedAt        = "x-shove-died-at"
	// Enveloped marks a dead letter whose headers did not fit the frame and are in its body (C9).
	Enveloped = "x-shove-enveloped"

	// UserID keeps the AMQP user-id of a message that is sent on by somebody else.
	UserID = "x-shove-user-id"
	// Type is the application's message type; shove never interprets it.
	Type = "x-shove-type"
	// Trace is the application's trace id.
	Trace = "x-trace-id"
	// Key carries the ordering key on brokers without a native one.
	Key = "x-shove-key"
)

// Names that the Rust original writes; they are read, never written (W).
const (
	legacyRetryCount      = "x-retry-count"
	legacyLogRetryCount   = "Shove-Retry-Count"
	legacyLogMessageID    = "Shove-Message-Id"
	legacyNATSMessageID   = "Nats-Msg-Id"
	legacyDeathReason     = "x-death-reason"
	legacyDeathCount      = "x-death-count"
	legacyOriginalQueue   = "x-original-queue"
	legacyLogDeathReason  = "Shove-Death-Reason"
	legacyLogDeathCount   = "Shove-Death-Count"
	legacyLogOriginalName = "Shove-Original-Queue"
)

// Map is a message's headers. Values are what the broker's client yields: strings, byte strings, integers, and
// whatever else a user sent. It is read-only once a Delivery carries it.
type Map map[string]any

// userOwned are the x-shove-* names that belong to the application and survive a hop.
var userOwned = map[string]bool{UserID: true, Type: true, Key: true}

// neverCopied are foreign headers that would harm a copy (C9).
var neverCopied = map[string]bool{
	"cc": true, "bcc": true, "x-death": true, "x-delivery-count": true, "x-acquired-count": true,
	legacyRetryCount: true, "shove-retry-count": true, "shove-message-id": true, MessageID: true,
	legacyDeathReason: true, legacyDeathCount: true, legacyOriginalQueue: true,
	"shove-death-reason": true, "shove-death-count": true, "shove-original-queue": true,
}

// Keep says whether a copy keeps a header of the original as it is. What it does not keep is either harmful or
// written anew by Stamp.
func Keep(name string) bool {
	lower := strings.ToLower(name)
	switch {
	case neverCopied[lower]:
		return false
	case strings.HasPrefix(lower, "x-shove-"):
		return userOwned[lower]
	case strings.HasPrefix(lower, "x-first-death-"), strings.HasPrefix(lower, "x-last-death-"), strings.HasPrefix(lower, "nats-"):
		return false
	}
	return true
}

// Reserved says whether a publisher must refuse a header of this name (Q4). The application's own names (Type, Trace)
// are allowed.
func Reserved(name string) bool {
	lower := strings.ToLower(name)
	if lower == Type {
		return false
	}
	return !Keep(name) || strings.HasPrefix(lower, "x-shove-")
}

// Death is what is known of a message's end (E3).
type Death struct {
	Reason        settle.Reason
	Detail        string
	Count         uint32
	OriginalQueue string
	DiedAt        time.Time
}

// Facts is what a message's headers say about its past. The zero value is a message without any.
type Facts struct {
	Retries, Defers uint32
	MessageID       string
	// Derived says that MessageID was computed from the message, because its publisher gave none (C8).
	Derived    bool
	DeliveryID string // of the original, on a dead letter (E6)
	FirstSeen  time.Time
	NotBefore  time.Time
	History    string
	Death      Death
	// Malformed counts headers that could not be understood and were taken for their fallback (C5).
	Malformed int
}

// maxCount is the largest believable count; anything above it is malformed (C5).
const maxCount = 1 << 31

// Parse reads our headers, and where ours are missing those of the Rust original. It never fails: what it cannot
// understand it takes for absent and counts in Malformed.
func Parse(h Map) Facts {
	var f Facts
	if len(h) == 0 {
		return f
	}
	p := parser{h: h}
	f.Retries = p.count(RetryCount, legacyRetryCount, legacyLogRetryCount)
	f.Defers = p.count(DeferCount)
	f.MessageID = p.text(MessageID, legacyLogMessageID, legacyNATSMessageID)
	f.Derived = p.text(IDDerived) != ""
	f.DeliveryID = p.text(DeliveryID)
	f.FirstSeen = p.millis(FirstSeen)
	f.NotBefore = p.millis(NotBefore)
	f.History = p.text(History)
	f.Death = Death{
		Reason:        settle.Reason(p.text(DeathReason, legacyDeathReason, legacyLogDeathReason)),
		Detail:        p.text(DeathDetail),
		Count:         p.count(DeathCount, legacyDeathCount, legacyLogDeathCount),
		OriginalQueue: p.text(OriginalQueue, legacyOriginalQueue, legacyLogOriginalName),
		DiedAt:        p.millis(DiedAt),
	}
	f.Malformed = p.malformed
	return f
}
