package rabbitmq

import (
	"strconv"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/settle"
)

// entry is one delivery that a subscription holds: what the caller sees, what the library gave, and its place among
// the unsettled ones. Entries are allocated in slabs.
type entry struct {
	broker.Delivery
	raw   amqp.Delivery
	sub   *subscription
	state state
	// Neighbours in the list of unsettled deliveries, which is in the order of the tags.
	prev, next *entry
}

// state of a delivery, guarded by its subscription's mu.
type state uint8

const (
	unsettled state = iota
	settling        // a call of Settle is at it
	settled
)

// Headers that quorum queues add. They are only there for messages that came back.
const (
	deliveryCount = "x-delivery-count"
	acquiredCount = "x-acquired-count" // from 4.3
	deathHeader   = "x-death"
)

// fill makes the caller's view of a delivery.
func (e *entry) fill(counts counting) {
	d := &e.raw
	e.Delivery = broker.Delivery{
		Body:        d.Body,
		Headers:     header.Map(d.Headers),
		ContentType: d.ContentType,
		Redelivered: d.Redelivered,
		Partition:   -1,
		Timestamp:   d.Timestamp,
		Offset:      -1,
		Native:      e,
	}
	if len(d.Headers) > 0 {
		e.Key, _ = e.Headers.Text(header.Key)
	}
	e.DeliveryCount, e.Crashes = counts.of(d)
}

// counting says how a queue counts deliveries.
type counting struct {
	quorum     bool
	deadLetter bool
}

// of reads how often a message was delivered, and how often it came back without an outcome.
//
// A message that is not redelivered may carry a count all the same, written by its publisher: it is worth nothing.
// From 4.3 on a returned message (nack) raises x-acquired-count alone, and x-delivery-count counts rejects, closed
// channels and lost connections; before, every return raises x-delivery-count. A message that the broker moved to a
// dead-letter queue brings the count of the queue it came from, on 4.3 all of it.
func (c counting) of(d *amqp.Delivery) (deliveries, crashes uint32) {
	if !c.quorum {
		return 0, 0
	}
	if !d.Redelivered {
		return 1, 0
	}
	if c.deadLetter && d.Headers[deathHeader] != nil {
		return 0, 0
	}
	returned, known := count(d.Headers, deliveryCount)
	if acquired, ok := count(d.Headers, acquiredCount); ok {
		return acquired + 1, returned
	}
	if !known {
		return 0, 0
	}
	return returned + 1, returned
}

func count(h amqp.Table, name string) (uint32, bool) {
	v, ok := h[name]
	if !ok {
		return 0, false
	}
	n, ok := header.Int(v)
	if !ok || n < 0 || n >= 1<<31 {
		return 0, false
	}
	return uint32(n), true
}

// DeliveryID is the consumer's tag and the delivery's, as the management UI shows the consumer.
func (e *entry) DeliveryID() string {
	return e.raw.ConsumerTag + "/" + strconv.FormatUint(e.raw.DeliveryTag, 10)
}

// MessageID is the message-id property (C8).
func (e *entry) MessageID() string { return e.raw.MessageId }

// Death is what the broker recorded of a message that it dead-lettered.
func (e *entry) Death() header.Death { return parseDeath(e.raw.Headers) }

// parseDeath reads the newest entry of x-death. It takes what it does not understand for absent.
func parseDeath(h amqp.Table) header.Death {
	deaths, ok := h[deathHeader].([]any)
	if !ok || len(deaths) == 0 {
		return header.Death{}
	}
	newest, _ := deaths[0].(amqp.Table)
	// 4.x names the newest one; an older x-death is kept in that order by the server anyway.
	queue, _ := h["x-last-death-queue"].(string)
	reason, _ := h["x-last-death-reason"].(string)
	for _, d := range deaths {
		t, ok := d.(amqp.Table)
		if ok && queue != "" && t["queue"] == queue && t["reason"] == reason {
			newest = t
			break
		}
	}
	if newest == nil {
		return header.Death{}
	}
	var out header.Death
	out.OriginalQueue, _ = header.Text(newest["queue"])
	word, _ := header.Text(newest["reason"])
	out.Reason = deathReason(word)
	if n, ok := header.Int(newest["count"]); ok && n > 0 && n < 1<<31 {
		out.Count = uint32(n)
	}
	out.DiedAt, _ = newest["time"].(time.Time)
	return out
}

// deathReason puts RabbitMQ's word for a death into ours (E3); "maxlen" has none and stays.
func deathReason(word string) settle.Reason {
	switch word {
	case "expired":
		return settle.Expired
	case "delivery_limit":
		return settle.CrashLoop
	case "rejected":
		return settle.Rejected
	default:
		return settle.Reason(word)
	}
}
