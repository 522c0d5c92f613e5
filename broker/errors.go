package broker

import (
	"errors"
	"fmt"
	"strings"
)

var (
	// ErrUnavailable: the broker cannot be reached or is not ready; try again later.
	ErrUnavailable = errors.New("broker unavailable")
	// ErrUnauthorized: the broker refused the credentials or the right to do this; a person must act.
	ErrUnauthorized = errors.New("not authorized")
	// ErrNotFound: a queue, topic, stream or vhost does not exist.
	ErrNotFound = errors.New("not found")
	// ErrConflict: something exists with other fixed properties. It comes as a *ConflictError.
	ErrConflict = errors.New("conflict")
	// ErrUnsupported: this broker, or this version of it, cannot do this; a person must act.
	ErrUnsupported = errors.New("not supported")
	// ErrLost: the delivery's connection is gone and the broker redelivers it; or the subscription is.
	ErrLost = errors.New("subscription lost")
	// ErrClosed: the subscription, publisher or client was closed by the caller.
	ErrClosed = errors.New("closed")
	// ErrUnknown: it is not known whether the broker stored the message.
	ErrUnknown = errors.New("outcome unknown")
	// ErrRejected: the broker took the message and said that it did not store it (a negative confirm, a full queue).
	ErrRejected = errors.New("rejected by the broker")
	// ErrUnroutable: no queue takes the message; it is not stored.
	ErrUnroutable = errors.New("unroutable")
	// ErrTooLarge: the message or its headers do not fit what the broker carries; it was not sent (C9).
	ErrTooLarge = errors.New("too large")
)

// Classified says whether err is one of this package's errors already, so that a backend leaves it as it is.
func Classified(err error) bool {
	for _, known := range []error{
		ErrUnavailable, ErrUnauthorized, ErrNotFound, ErrConflict, ErrUnsupported,
		ErrLost, ErrClosed, ErrUnknown, ErrRejected, ErrUnroutable, ErrTooLarge,
	} {
		if errors.Is(err, known) {
			return true
		}
	}
	return false
}

// ConflictError says exactly what differs.
type ConflictError struct {
	Object string // such as `queue "orders"`
	Diff   Diff
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("%s exists with another %s: it has %s, the manifest asks for %s", e.Object, e.Diff.Property, e.Diff.Have, e.Diff.Want)
}

// Is makes errors.Is(err, ErrConflict) true.
func (e *ConflictError) Is(target error) bool { return target == ErrConflict }

// SettleItem is one delivery that was not settled.
type SettleItem struct {
	Index int // in the slice given to Settle
	Err   error
}

// SettleError lists what Settle could not do. Everything that is not listed is done.
type SettleError struct{ Items []SettleItem }

func (e *SettleError) Error() string {
	return list("settle", len(e.Items), func(i int) (int, error) { return e.Items[i].Index, e.Items[i].Err })
}

// PublishItem is one message that was not confirmed. Err wraps ErrUnknown where it may be stored all the same, else
// ErrRejected, ErrUnroutable, ErrTooLarge or ErrUnavailable: it is not stored.
type PublishItem struct {
	Index int // in the slice given to Publish
	Err   error
}

// PublishError lists what Publish could not do. Everything that is not listed is confirmed (Q3).
type PublishError struct{ Items []PublishItem }

func (e *PublishError) Error() string {
	return list("publish", len(e.Items), func(i int) (int, error) { return e.Items[i].Index, e.Items[i].Err })
}

// list writes at most three causes: an error of a batch of thousands must stay readable.
func list(op string, n int, item func(int) (int, error)) string {
	const shown = 3
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %d failed", op, n)
	for i := range min(n, shown) {
		index, err := item(i)
		fmt.Fprintf(&b, "; message %d: %v", index, err)
	}
	if n > shown {
		fmt.Fprintf(&b, "; and %d more", n-shown)
	}
	return b.String()
}
