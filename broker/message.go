package broker

import (
	"time"

	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/settle"
)

// Message is one message to publish.
type Message struct {
	// ID becomes x-message-id. The caller makes it (UUIDv7); it is unique within a Publish call.
	ID string
	// Key is the ordering or partitioning key; empty: none.
	Key string
	// RoutingKey is used where the topology's publishing side goes to an exchange; empty: the queue's name.
	RoutingKey  string
	Headers     header.Map
	ContentType string
	Body        []byte
	// Timestamp is the publisher's clock; zero: none is sent.
	Timestamp time.Time
}

// Delivery is one message that a subscription received. It is read-only for everyone but the backend.
type Delivery struct {
	Body        []byte
	Headers     header.Map
	ContentType string
	// Key is the ordering key; empty: none.
	Key string
	// Redelivered is the broker's own flag.
	Redelivered bool
	// DeliveryCount is how often the broker delivered this message, this time included: the first delivery is 1,
	// and 0 means that the broker does not tell.
	DeliveryCount uint32
	// Crashes is how often it was delivered and came back without an outcome, as far as the broker tells (C10).
	Crashes uint32
	// Partition and Offset are the position in a log; -1: none.
	Partition int32
	Offset    int64
	// Timestamp is when the broker took the message (RabbitMQ: what the publisher set); zero: unknown.
	Timestamp time.Time
	// Native is the backend's own.
	Native Native
}

// Native is what only the backend knows of a delivery, computed when asked.
type Native interface {
	// DeliveryID identifies this delivery to the broker and to people.
	DeliveryID() string
	// MessageID is an identity that the broker or its protocol gives the message and that is the same on
	// redelivery, where its publisher sent no x-message-id; empty: none (C8).
	MessageID() string
	// Death is what the broker itself recorded of a message that it dead-lettered; zero: nothing.
	Death() header.Death
}

// Settlement is one delivery and what is to become of it.
type Settlement struct {
	Delivery *Delivery
	Action   settle.Action
	// Stamp are the headers of the copy, to be set over those that header.Keep keeps of the original. Set for
	// actions that copy, and for WaitInPlace where the backend carries it out: there they are what the message's next
	// delivery should have, as far as the backend can remember it.
	Stamp []header.Field
	// Envelope, when set, replaces the copy's body and all of the original's headers: the last resort for a
	// message whose headers do not fit (C9). It is JSON, and Stamp marks the copy.
	Envelope []byte
}
