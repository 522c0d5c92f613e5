package runtime

import "github.com/shove-dev/shove/settle"

// Outcome is what a handler says about a message. Return one of Ack, Retry, Reject and Defer, or a richer copy of
// one: Retry.Because("stock service down"), Defer.Until(t).
type Outcome = settle.Outcome

// The four outcomes (A1).
var (
	// Ack: done, remove the message.
	Ack = settle.Ack
	// Retry: failed for now; try again after its tier's delay, within the retry budget.
	Retry = settle.Retry
	// Reject: it will never work; dead-letter it now.
	Reject = settle.Reject
	// Defer: nothing is wrong, only too early; try again later, spending no budget.
	Defer = settle.Defer
)

// FromError turns an error into an outcome: nil is Ack, an error made by an outcome's Err method is that outcome, and
// any other is Retry.
func FromError(err error) Outcome { return settle.FromError(err) }
