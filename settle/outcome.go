// Package settle decides what becomes of a message after its handler ran, or instead of running it. It is one pure
// function over plain values, without I/O, clock or randomness, and the only place where that policy lives (A7):
// backends obey the Action and never reinterpret it.
package settle

import (
	"errors"
	"time"
)

// Verdict is the kind of an Outcome.
type Verdict uint8

const (
	// VerdictUnset is the zero value: no verdict was given. It is decided as Retry, with a warning, because losing
	// a message to a forgotten return value is worse than handling it twice.
	VerdictUnset Verdict = iota
	VerdictAck
	VerdictRetry
	VerdictReject
	VerdictDefer
	// VerdictEarly: the message arrived before its not-before time; the handler was not called (D1).
	VerdictEarly
	// VerdictPoison: the message cannot be handled at all; the handler was not called (G, C10, K4).
	VerdictPoison
	// VerdictRelease: the consumer gives the message back without an outcome, because it shuts down (N1).
	VerdictRelease
	// VerdictPending: the handler ran into its deadline, and on this broker that is no outcome: the message stays
	// pending until its lease is over (H8).
	VerdictPending
)

func (v Verdict) String() string {
	switch v {
	case VerdictAck:
		return "ack"
	case VerdictRetry:
		return "retry"
	case VerdictReject:
		return "reject"
	case VerdictDefer:
		return "defer"
	case VerdictEarly:
		return "early"
	case VerdictPoison:
		return "poison"
	case VerdictRelease:
		return "release"
	case VerdictPending:
		return "pending"
	default:
		return "unset"
	}
}

// Outcome is what a handler says about a message. The plain four are the values Ack, Retry, Reject and Defer;
// Because and Until return richer copies.
type Outcome struct {
	Verdict Verdict
	// Text is a free reason for people. It travels in x-shove-death-detail and x-shove-history.
	Text string
	// NotBefore is the earliest time a deferred message may be handled again. Zero: after the first tier's delay.
	NotBefore time.Time
	// Cause is set with VerdictPoison.
	Cause Reason
}

// The four outcomes of a handler (A1). They are values, not to be changed.
var (
	// Ack: done, remove the message.
	Ack = Outcome{Verdict: VerdictAck}
	// Retry: failed for now; hold it for its tier's delay and try again, within the retry budget.
	Retry = Outcome{Verdict: VerdictRetry}
	// Reject: it will never work; dead-letter it now.
	Reject = Outcome{Verdict: VerdictReject}
	// Defer: nothing is wrong, only too early; hold it for the first tier's delay, spending no budget.
	Defer = Outcome{Verdict: VerdictDefer}
)

// Because returns the outcome with a reason for people.
func (o Outcome) Because(text string) Outcome { o.Text = text; return o }

// Until returns the outcome with a not-before time. It has a meaning on Defer only (D1).
func (o Outcome) Until(t time.Time) Outcome { o.NotBefore = t; return o }

// Poison is the outcome of a message that must not reach the handler.
func Poison(cause Reason, text string) Outcome {
	return Outcome{Verdict: VerdictPoison, Cause: cause, Text: text}
}

// Early is the outcome of a message that arrived before its not-before time.
func Early(notBefore time.Time) Outcome {
	return Outcome{Verdict: VerdictEarly, NotBefore: notBefore}
}

// Pending is the outcome of a message that stays pending after its deadline (H8).
var Pending = Outcome{Verdict: VerdictPending}

// Release is the outcome of a message that is given back at shutdown.
var Release = Outcome{Verdict: VerdictRelease}

// Error carries an Outcome through an error return (A1). Make it with the outcome's Err method.
type Error struct {
	Outcome Outcome
	Err     error
}

func (e *Error) Error() string {
	if e.Err == nil {
		return e.Outcome.Verdict.String()
	}
	return e.Outcome.Verdict.String() + ": " + e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }

// Err wraps an error so that FromError yields this outcome, with the error's text as the reason where the outcome
// has none.
func (o Outcome) Err(err error) error {
	if o.Text == "" && err != nil {
		o.Text = err.Error()
	}
	return &Error{Outcome: o, Err: err}
}

// FromError turns a handler's error into an Outcome: nil is Ack, an *Error anywhere in the chain is its outcome, and
// any other error is Retry with its text as the reason.
func FromError(err error) Outcome {
	if err == nil {
		return Ack
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Outcome
	}
	return Retry.Because(err.Error())
}
