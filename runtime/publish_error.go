package runtime

import (
	"errors"
	"fmt"
	"strings"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/runtime/metrics"
)

// PublishFailure is one message that is not confirmed.
type PublishFailure struct {
	// Index is its place in the batch; 0 for Publish.
	Index int
	// MessageID is what it was sent with; empty where it was never sent.
	MessageID string
	// Err says why: it wraps one of the errors of the package broker, codec.ErrEncode, ErrReservedHeader or
	// ErrInvalidMessage.
	Err error
}

// PublishError says for every message of a batch what became of it (Q3). Every index is in exactly one of the lists.
type PublishError struct {
	Topology string
	// Confirmed are the indexes of the messages that the broker stored.
	Confirmed []int
	// Failed are known not to be stored, after every attempt they were worth.
	Failed []PublishFailure
	// Unknown may be stored, or not. They were not sent again.
	Unknown []PublishFailure
}

func (e *PublishError) Error() string {
	const shown = 3
	var b strings.Builder
	fmt.Fprintf(&b, "publish: %q: %d confirmed, %d failed, %d unknown", e.Topology, len(e.Confirmed), len(e.Failed), len(e.Unknown))
	n := 0
	for _, list := range [][]PublishFailure{e.Failed, e.Unknown} {
		for _, f := range list {
			if n++; n > shown {
				continue
			}
			fmt.Fprintf(&b, "; message %d: %v", f.Index, f.Err)
		}
	}
	if n > shown {
		fmt.Fprintf(&b, "; and %d more", n-shown)
	}
	return b.String()
}

// Unwrap yields every cause.
func (e *PublishError) Unwrap() []error {
	errs := make([]error, 0, len(e.Failed)+len(e.Unknown))
	for _, list := range [][]PublishFailure{e.Failed, e.Unknown} {
		for _, f := range list {
			errs = append(errs, f.Err)
		}
	}
	return errs
}

// sendState is how far a message of a batch is.
type sendState uint8

const (
	toSend    sendState = iota // not sent yet, or sent and known not to be stored, and worth another attempt
	confirmed                  // stored
	failed                     // not stored, and another attempt would not help
	unknown                    // maybe stored
)

func (s sendState) outcome() metrics.PublishOutcome {
	switch s {
	case confirmed:
		return metrics.PublishSuccess
	case unknown:
		return metrics.PublishUnknown
	default:
		return metrics.PublishFailed
	}
}

// batch maps what happens in each attempt back to the caller's indexes.
type batch struct {
	drafts []draft
	state  []sendState
	errs   []error
}

// each calls f for every message that still has to be sent.
func (b *batch) each(f func(i int)) {
	for i, s := range b.state {
		if s == toSend {
			f(i)
		}
	}
}

func (b *batch) repeatable() bool {
	for _, s := range b.state {
		if s == toSend {
			return true
		}
	}
	return false
}

// refuse marks a message that cannot be sent at all.
func (b *batch) refuse(i int, err error) { b.state[i], b.errs[i] = failed, err }

// fail marks a message that is not stored.
func (b *batch) fail(i int, err error) {
	b.errs[i] = err
	if !repeatable(err) {
		b.state[i] = failed
	}
}

// take files the answer of a backend to the messages with the given indexes.
func (b *batch) take(index []int, err error) {
	if err == nil {
		for _, i := range index {
			b.state[i], b.errs[i] = confirmed, nil
		}
		return
	}
	listed, ok := errors.AsType[*broker.PublishError](err)
	if !ok { // one error for all of them
		for _, i := range index {
			b.file(i, err)
		}
		return
	}
	for _, i := range index {
		b.state[i], b.errs[i] = confirmed, nil
	}
	for _, item := range listed.Items {
		if item.Index >= 0 && item.Index < len(index) {
			b.file(index[item.Index], item.Err)
		}
	}
}

// file marks a message that was given to a backend and is not confirmed.
func (b *batch) file(i int, err error) {
	switch {
	case notStored(err):
		b.state[i] = toSend
		b.fail(i, err)
	case err == nil:
		b.state[i], b.errs[i] = unknown, broker.ErrUnknown
	case errors.Is(err, broker.ErrUnknown):
		b.state[i], b.errs[i] = unknown, err
	default:
		b.state[i], b.errs[i] = unknown, fmt.Errorf("%w: %w", broker.ErrUnknown, err)
	}
}

// result is nil where everything is confirmed.
func (b *batch) result(topology string) error {
	e := &PublishError{Topology: topology}
	for i, s := range b.state {
		f := PublishFailure{Index: i, MessageID: b.drafts[i].msg.ID, Err: b.errs[i]}
		switch s {
		case confirmed:
			e.Confirmed = append(e.Confirmed, i)
		case unknown:
			e.Unknown = append(e.Unknown, f)
		default:
			e.Failed = append(e.Failed, f)
		}
	}
	if len(e.Failed)+len(e.Unknown) == 0 {
		return nil
	}
	return e
}
