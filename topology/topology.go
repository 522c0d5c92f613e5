// Package topology names what a queue with delayed retries is made of: the main queue, one hold queue per retry
// tier, the dead-letter queue and, for ordered topologies, its shards. It is the only place where such names are
// made and the only place where their shape is validated. It does no I/O.
package topology

import "time"

// OnFailure says what a failed message of an ordered topology means for later messages with the same key.
type OnFailure string

const (
	// Skip dead-letters the failed message and goes on with the next one of its key (K3).
	Skip OnFailure = "Skip"
	// FailAll dead-letters the failed message and every later message of its key (K4).
	FailAll OnFailure = "FailAll"
)

// OnDefer says what Defer means on an ordered topology (D4).
type OnDefer string

const (
	// DeferRetry turns Defer into Retry, with a warning. The default.
	DeferRetry OnDefer = "Retry"
	// DeferHold lets the message wait without spending its retry budget; its key waits with it.
	DeferHold OnDefer = "Hold"
)

// Defaults and bounds of a topology (T, B2).
const (
	DefaultShards           = 8
	DefaultMaxPendingPerKey = 1000
	MaxHolds                = 16
	MaxShards               = 256
	// MaxQueueLength bounds a queue's name so that every name derived from it stays within the 255 bytes that
	// AMQP 0-9-1 and the 249 characters that Kafka allow.
	MaxQueueLength = 200
)

// Spec is what a person writes. Derive turns it into a Topology.
type Spec struct {
	// Queue is the logical name of the main queue.
	Queue string
	// Source is another topic or stream to read instead of the queue itself (fan-out on logs). Empty: the queue.
	Source string
	// Holds are the delays of the retry tiers, strictly ascending, whole milliseconds. Empty: retries are immediate.
	Holds []time.Duration
	// DeadLetter asks for a dead-letter queue; DeadLetterQueue names it, empty meaning "{queue}-dlq".
	DeadLetter      bool
	DeadLetterQueue string
	// Sequenced asks for strict order per key; nil means unordered.
	Sequenced *SequencedSpec
	// External says that somebody else declared the queue: it is verified, never declared, and never written to.
	External bool
}

// SequencedSpec asks for strict order per key (K).
type SequencedSpec struct {
	// OnFailure defaults to Skip.
	OnFailure OnFailure
	// OnDefer defaults to DeferRetry.
	OnDefer OnDefer
	// Shards defaults to DefaultShards.
	Shards int
	// Key names the field of the message body that holds the ordering key; empty: the publisher gives it.
	Key string
	// MaxPendingPerKey defaults to DefaultMaxPendingPerKey.
	MaxPendingPerKey int
	// AllowMessageLoss lifts the demand for a dead-letter queue and a hold queue (K8).
	AllowMessageLoss bool
}

// Topology is a validated Spec with every name in it. Make it with Derive; treat it as immutable.
type Topology struct {
	Queue      string
	Source     string // the queue itself unless the Spec named another
	Holds      []Hold
	DeadLetter string // empty: no dead-letter queue
	Sequenced  *Sequenced
	External   bool
}

// Hold is one retry tier.
type Hold struct {
	Queue string
	Delay time.Duration
}

// Sequenced is the resolved form of SequencedSpec.
type Sequenced struct {
	OnFailure        OnFailure
	OnDefer          OnDefer
	Key              string
	MaxPendingPerKey int
	// Exchange is the hash exchange that spreads keys over the shards, on brokers that need one.
	Exchange string
	Shards   []Shard
}

// Shard is one ordered part of a sequenced topology.
type Shard struct {
	Queue string
	State string // where counts and due times of waiting messages are kept
	Holds []Hold
}

// Role says what a queue is for.
type Role string

const (
	RoleMain       Role = "Main"
	RoleHold       Role = "Hold"
	RoleDeadLetter Role = "DeadLetter"
	RoleShard      Role = "Shard"
	RoleState      Role = "State"
	// RoleRetired is a hold queue that left the spec and still has messages or publishers.
	RoleRetired Role = "Retired"
)

// Queue is one logical queue of a topology.
type Queue struct {
	Name  string
	Role  Role
	Delay time.Duration // hold queues only
}

// Queues lists every queue that the topology owns or uses, the targets of hold queues before the hold queues
// themselves: that is the order to declare them in. Delete in reverse.
func (t Topology) Queues() []Queue {
	qs := make([]Queue, 0, 2+len(t.Holds))
	if t.DeadLetter != "" {
		qs = append(qs, Queue{Name: t.DeadLetter, Role: RoleDeadLetter})
	}
	qs = append(qs, Queue{Name: t.Queue, Role: RoleMain})
	if t.Sequenced != nil {
		for _, s := range t.Sequenced.Shards {
			qs = append(qs, Queue{Name: s.Queue, Role: RoleShard}, Queue{Name: s.State, Role: RoleState})
			for _, h := range s.Holds {
				qs = append(qs, Queue{Name: h.Queue, Role: RoleHold, Delay: h.Delay})
			}
		}
	}
	for _, h := range t.Holds {
		qs = append(qs, Queue{Name: h.Queue, Role: RoleHold, Delay: h.Delay})
	}
	return qs
}

// Delays lists the tiers' delays in order.
func (t Topology) Delays() []time.Duration {
	ds := make([]time.Duration, len(t.Holds))
	for i, h := range t.Holds {
		ds[i] = h.Delay
	}
	return ds
}

// Warning is something allowed that is rarely meant (B6).
type Warning string

const (
	// WarnHoldWithoutDeadLetter: messages that exhaust their retries will be discarded.
	WarnHoldWithoutDeadLetter Warning = "HoldWithoutDeadLetter"
	// WarnDeadLetterWithoutHold: retries come back at once, without a delay.
	WarnDeadLetterWithoutHold Warning = "DeadLetterWithoutHold"
)

// Text is the warning in a sentence that says what to do.
func (w Warning) Text() string {
	switch w {
	case WarnHoldWithoutDeadLetter:
		return "hold queues without a dead-letter queue: messages that use up their retries are discarded; add deadLetter to keep them"
	case WarnDeadLetterWithoutHold:
		return "a dead-letter queue without hold queues: a retried message comes back at once, without a delay; add holdQueues to space retries out"
	}
	return string(w)
}

// Warnings lists what is allowed but rarely meant (B6).
func (t Topology) Warnings() []Warning {
	switch {
	case len(t.Holds) > 0 && t.DeadLetter == "":
		return []Warning{WarnHoldWithoutDeadLetter}
	case len(t.Holds) == 0 && t.DeadLetter != "":
		return []Warning{WarnDeadLetterWithoutHold}
	}
	return nil
}
