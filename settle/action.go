package settle

import "time"

// Kind is what a backend has to do with a message.
type Kind uint8

const (
	// Done: acknowledge; nothing else is written.
	Done Kind = iota + 1
	// Hold: write a copy to the hold queue of Tier, have it confirmed, acknowledge the original.
	Hold
	// WaitInPlace: keep the message for Delay and hand the same message to the handler again; no copy is written.
	WaitInPlace
	// Copy: write a copy to the main queue, have it confirmed, acknowledge the original. The runtime waits Delay before
	// it hands the action to a backend.
	Copy
	// Requeue: let the broker redeliver the original with its counts unchanged.
	Requeue
	// DeadLetter: write a copy to the dead-letter queue, have it confirmed, acknowledge the original.
	DeadLetter
	// Drop: acknowledge a message that has nowhere to go. The caller warns and counts.
	Drop
	// GiveBack: hand the message back at shutdown, uncounted where the broker can.
	GiveBack
	// Leave: stop renewing the message's lease and forget it; nothing is written, and the broker redelivers it when the
	// lease is over (H8). Only on brokers whose Capabilities say TimeoutLeavesPending.
	Leave
)

func (k Kind) String() string {
	switch k {
	case Done:
		return "done"
	case Hold:
		return "hold"
	case WaitInPlace:
		return "wait-in-place"
	case Copy:
		return "copy"
	case Requeue:
		return "requeue"
	case DeadLetter:
		return "dead-letter"
	case Drop:
		return "drop"
	case GiveBack:
		return "give-back"
	case Leave:
		return "leave"
	default:
		return "none"
	}
}

// Copies says whether the action writes a copy that must be confirmed before the original is acknowledged (A9).
func (k Kind) Copies() bool { return k == Hold || k == Copy || k == DeadLetter }

// Reason says why a message died (E3). The values are wire names and metric labels.
type Reason string

const (
	Rejected           Reason = "rejected"
	MaxRetriesExceeded Reason = "max_retries_exceeded"
	Expired            Reason = "expired"
	Deserialize        Reason = "deserialize"
	Oversize           Reason = "oversize"
	CrashLoop          Reason = "crash_loop"
	DeferLimitExceeded Reason = "defer_limit_exceeded"
	SequenceFailed     Reason = "sequence_failed"
)

// Warning is something the caller should log (rate-limited) together with carrying out the action.
type Warning uint8

const (
	NoWarning Warning = iota
	// RetryWithoutHold: a retry had no hold queue to go to and comes back without a delay (C7).
	RetryWithoutHold
	// DeferWithoutHold: a deferral had no hold queue to go to (D2).
	DeferWithoutHold
	// DeferOnSequenced: Defer was turned into Retry on an ordered topology (D4).
	DeferOnSequenced
	// DeadHandlerFailed: a dead letter was removed although its handler never came to an end (E5).
	DeadHandlerFailed
	// OutcomeUnset: the handler returned the zero Outcome; it was taken for Retry.
	OutcomeUnset
)

func (w Warning) String() string {
	switch w {
	case RetryWithoutHold:
		return "retried without a hold queue: the message comes back at once; add holdQueues to the topology"
	case DeferWithoutHold:
		return "deferred without a hold queue: the message comes back after one second; add holdQueues to the topology"
	case DeferOnSequenced:
		return "deferred on a sequenced topology: taken for a retry; set sequenced.onDefer: Hold to let the key wait"
	case DeadHandlerFailed:
		return "the dead handler failed every time: the dead letter is removed all the same"
	case OutcomeUnset:
		return "the handler returned no outcome: taken for a retry; return Ack, Retry, Reject or Defer"
	default:
		return ""
	}
}

// Action is a decision, resolved: a backend obeys it and never reinterprets it.
type Action struct {
	Kind Kind
	// Tier is the index of the hold queue (Hold).
	Tier int
	// Delay is the tier's delay (Hold), or how long to wait before going on (WaitInPlace, Copy).
	Delay time.Duration
	// Retries and Defers are the counts that the copy carries, or that the next call of the handler sees.
	Retries uint32
	Defers  uint32
	// NotBefore travels with a deferred copy; zero: none.
	NotBefore time.Time
	// Reason and Text say why a message dies (DeadLetter, Drop).
	Reason Reason
	Text   string
	// FailKey says that every later message of the same key dies too (K4).
	FailKey bool
	Warning Warning
}
