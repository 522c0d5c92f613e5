package runtime

import (
	"crypto/sha1"
	"encoding/binary"
	"time"

	"github.com/google/uuid"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/settle"
)

// Metadata is what is known of a message beside its body. It belongs to one call of a handler and is read-only; it is
// safe for concurrent use.
type Metadata struct {
	// Topology is the name that the handler is bound to.
	Topology string
	// Queue is the logical name of the queue that the message was consumed from.
	Queue string
	// RetryCount is how much of the retry budget is spent: 0 on the first call (C1).
	RetryCount uint32
	// DeferCount is how often the message was deferred (I3).
	DeferCount uint32
	// Redelivered is the broker's own flag; RetryCount is the better sign of a retry.
	Redelivered bool

	d     *broker.Delivery
	facts *header.Facts
	call  *callContext
}

// MessageID identifies the message over every hop (Q2, C8). A message whose publisher gave no x-message-id has one
// that its broker or its content yields, the same on redelivery.
func (m *Metadata) MessageID() string {
	id, _ := messageID(m.d, m.facts, m.Queue)
	return id
}

// DeliveryID identifies the delivery to the broker; on a dead letter it is that of the original (E6).
func (m *Metadata) DeliveryID() string {
	if m.facts.DeliveryID != "" {
		return m.facts.DeliveryID
	}
	return m.d.Native.DeliveryID()
}

// DeliveryCount is how often the broker delivered this message, this time included; known is false where the broker
// does not tell (I1). A copy written for a retry starts at 1 again (I3).
func (m *Metadata) DeliveryCount() (n uint32, known bool) {
	return m.d.DeliveryCount, m.d.DeliveryCount > 0
}

// Partition is the log partition that the message was read from; Kafka only.
func (m *Metadata) Partition() (int32, bool) { return m.d.Partition, m.d.Partition >= 0 }

// Offset is the message's position in its log; Kafka and NATS only.
func (m *Metadata) Offset() (int64, bool) { return m.d.Offset, m.d.Offset >= 0 }

// Timestamp is when the broker took the message, or on RabbitMQ what its publisher set.
func (m *Metadata) Timestamp() (time.Time, bool) { return m.d.Timestamp, !m.d.Timestamp.IsZero() }

// FirstSeen is when a consumer first received the message.
func (m *Metadata) FirstSeen() time.Time { return m.facts.FirstSeen }

// Key is the ordering key; empty: none.
func (m *Metadata) Key() string { return m.d.Key }

// ContentType is what the publisher said of the body; empty: nothing.
func (m *Metadata) ContentType() string { return m.d.ContentType }

// Body is the message as it came. Do not change it.
func (m *Metadata) Body() []byte { return m.d.Body }

// Header is one header as text.
func (m *Metadata) Header(name string) (string, bool) { return m.d.Headers.Text(name) }

// Headers are all headers that have a text form. The map is the caller's.
func (m *Metadata) Headers() map[string]string {
	all := make(map[string]string, len(m.d.Headers))
	for name := range m.d.Headers {
		if v, ok := m.d.Headers.Text(name); ok {
			all[name] = v
		}
	}
	return all
}

// onOverruled has f called when the loop replaces the outcome of this call, with the outcome that is applied instead. It
// must not block: it runs on the goroutine that watches all deadlines.
func (m *Metadata) onOverruled(f func(settle.Outcome)) {
	if m.call == nil {
		return
	}
	m.call.mu.Lock()
	defer m.call.mu.Unlock()
	if m.call.overrule == nil {
		m.call.overrule = &overruleHooks{}
	}
	m.call.overrule.tell = append(m.call.overrule.tell, f)
}

// overruled says whether the loop has replaced the outcome of this call. It is known only after onOverruled.
func (m *Metadata) overruled() bool {
	if m.call == nil {
		return false
	}
	m.call.mu.Lock()
	defer m.call.mu.Unlock()
	return m.call.overrule != nil && m.call.overrule.overruled
}

// History are the last attempts at this message, oldest first, at most 16 (I4).
func (m *Metadata) History() []header.Attempt { return header.ParseHistory(m.facts.History) }

// DeadMetadata is what is known of a dead letter (E3).
type DeadMetadata struct {
	*Metadata
	Death header.Death
	// DecodeError is set where the body could not be decoded (E7).
	DecodeError error
}

// deathOf reads how a message died: from our headers, else from what the broker itself recorded (its delivery limit, an
// expiry), else only that it is in the dead-letter queue.
func deathOf(d *broker.Delivery, m *Metadata) header.Death {
	if m.facts.Death.Reason != "" {
		return m.facts.Death
	}
	death := d.Native.Death()
	if death.Count == 0 {
		death.Count = max(1, m.facts.Death.Count)
	}
	return death
}

// idSpace is the UUIDv5 name space of derived message ids.
var idSpace = uuid.MustParse("7d1f3bd4-5c0e-5f0a-9f6e-0d6a3a1f9c55")

// messageID is the message's identity, and whether it had to be computed from the content (C8).
func messageID(d *broker.Delivery, f *header.Facts, queue string) (id string, derived bool) {
	if f.MessageID != "" {
		return f.MessageID, f.Derived
	}
	if id := d.Native.MessageID(); id != "" {
		return id, false
	}
	h := sha1.New()
	h.Write(idSpace[:])
	var ts [8]byte
	if !d.Timestamp.IsZero() {
		binary.BigEndian.PutUint64(ts[:], uint64(d.Timestamp.UnixMilli()))
	}
	h.Write(ts[:])
	h.Write([]byte(queue))
	h.Write([]byte{0})
	h.Write(d.Body)
	var u uuid.UUID
	copy(u[:], h.Sum(nil))
	u[6] = u[6]&0x0f | 0x50
	u[8] = u[8]&0x3f | 0x80
	return u.String(), true
}
