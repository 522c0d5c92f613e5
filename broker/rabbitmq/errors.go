package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
)

// mapError puts an error of the client library under one of the seam's. What is unknown is ErrUnavailable: worth
// trying again.
func mapError(err error) error {
	if err == nil || broker.Classified(err) {
		return err
	}
	if c := parseConflict(err); c != nil {
		return c
	}
	return fmt.Errorf("%w: %w", classify(err), scrubbed(err))
}

// classify names the seam's error for a reply of the server or a broken connection.
func classify(err error) error {
	e, ok := errors.AsType[*amqp.Error](err)
	if !ok {
		return broker.ErrUnavailable // the network, TLS, a context
	}
	switch e.Code {
	case amqp.AccessRefused:
		return broker.ErrUnauthorized
	case amqp.NotFound:
		return broker.ErrNotFound
	case amqp.PreconditionFailed, amqp.NotImplemented:
		return broker.ErrUnsupported
	case amqp.NotAllowed:
		return notAllowed(e.Reason)
	default:
		return broker.ErrUnavailable
	}
}

// notAllowed reads a 530, which the server sends for a vhost that is missing, that is closed to the user, or that has
// all the connections it may have.
func notAllowed(reason string) error {
	switch {
	case strings.Contains(reason, "limit"):
		return broker.ErrUnavailable
	case strings.Contains(reason, "not found"):
		return broker.ErrNotFound
	case strings.Contains(reason, "refused"):
		return broker.ErrUnauthorized
	default:
		return broker.ErrUnavailable
	}
}

// scrubbed is the error with a text for people in place of the library's.
func scrubbed(err error) error {
	if e, ok := err.(*amqp.Error); ok { //nolint:errorlint // a wrapped one has context that must stay
		return &replyError{e}
	}
	return err
}

// replyError shows a reply of the server as the server says it.
type replyError struct{ reply *amqp.Error }

func (e *replyError) Error() string {
	// "PRECONDITION_FAILED - …" says what the number says.
	return fmt.Sprintf("%s (%d)", e.reply.Reason, e.reply.Code)
}

func (e *replyError) Unwrap() error { return e.reply }

// inequivalent matches the reply to a declaration of something that exists with another argument. Names may hold
// quotes, so that the parts before the values are taken greedily.
var inequivalent = regexp.MustCompile(`(?s)inequivalent arg '([^']*)' for (queue|exchange) '(.*)' in vhost '(.*)': received (.*) but current is (.*)$`)

// lockedQueue matches the reply to a declaration of a queue that is exclusive to another connection.
var lockedQueue = regexp.MustCompile(`(?s)locked queue '(.*)' in vhost '`)

// typedValue matches a value that only one side has.
var typedValue = regexp.MustCompile(`(?s)^the value '(.*)' of type '([^']*)'$`)

// parseConflict reads a 406 "inequivalent arg", or a 405 for a queue that is exclusive to another connection. Nil:
// it is something else.
func parseConflict(err error) *broker.ConflictError {
	e, ok := errors.AsType[*amqp.Error](err)
	if !ok {
		return nil
	}
	if e.Code == amqp.ResourceLocked {
		name := "of another connection"
		if m := lockedQueue.FindStringSubmatch(e.Reason); m != nil {
			name = fmt.Sprintf("%q", m[1])
		}
		return &broker.ConflictError{Object: "queue " + name, Diff: broker.Diff{Property: "exclusive", Want: "false", Have: "true"}}
	}
	if e.Code != amqp.PreconditionFailed {
		return nil
	}
	m := inequivalent.FindStringSubmatch(e.Reason)
	if m == nil {
		return nil
	}
	want, have := readValue(m[5]), readValue(m[6])
	if want == have {
		want += " (as a value of another type)"
	}
	return &broker.ConflictError{
		Object: fmt.Sprintf("%s %q", m[2], m[3]),
		Diff:   broker.Diff{Property: m[1], Want: want, Have: have},
	}
}

// readValue reads 'x', none, or "the value 'x' of type 'y'". An exchange's type comes in doubled quotes.
func readValue(text string) string {
	text = strings.TrimSpace(text)
	if m := typedValue.FindStringSubmatch(text); m != nil {
		return quoteEmpty(m[1])
	}
	for len(text) >= 2 && text[0] == '\'' && text[len(text)-1] == '\'' {
		text = text[1 : len(text)-1]
	}
	return quoteEmpty(text)
}

// quoteEmpty keeps an empty value, such as the default exchange's name, visible in a sentence.
func quoteEmpty(s string) string {
	if s == "" {
		return `""`
	}
	return s
}

// interrupted says whether a wait ended because of its context, not because of the broker.
func interrupted(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
