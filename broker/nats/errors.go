package nats

import (
	"context"
	"errors"
	"fmt"
	"strings"

	natsgo "github.com/nats-io/nats.go"

	"github.com/shove-dev/shove/broker"
)

// Error codes of the JetStream API (err_code).
const (
	codeConsumerNotFound  = 10014
	codeMaxConsumers      = 10026
	codeNotEnabled        = 10076
	codeNotEnabledAccount = 10039
	codeReplicasAlone     = 10074
	codeStreamInUse       = 10058
	codeStreamNotFound    = 10059
	codeSubjectsOverlap   = 10065
	codeStreamTooLarge    = 10054
	codeHeaderTooLarge    = 10097
	codeInsufficient      = 10023
	codeClusterNotReady   = 10008
	codeNoPeers           = 10005
	codeConsumerExists    = 10148
	codeConsumerExistsOld = 10105
)

// apiError is what the JetStream API, or a stream that does not store a message, answers.
type apiError struct {
	Status int    `json:"code"`
	Code   int    `json:"err_code"`
	Text   string `json:"description"`
}

func (e *apiError) Error() string { return fmt.Sprintf("%s (%d)", e.Text, e.Code) }

// Is puts the answer under one of the seam's errors.
func (e *apiError) Is(target error) bool { return target == e.seam() }

func (e *apiError) seam() error {
	switch e.Code {
	case codeConsumerNotFound, codeStreamNotFound:
		return broker.ErrNotFound
	case codeStreamTooLarge, codeHeaderTooLarge:
		return broker.ErrTooLarge
	case codeNotEnabled, codeNotEnabledAccount, codeReplicasAlone:
		return broker.ErrUnsupported
	case codeInsufficient, codeClusterNotReady, codeNoPeers:
		return broker.ErrUnavailable
	}
	switch {
	case e.Status == 404:
		return broker.ErrNotFound
	case e.Status == 429, e.Status >= 500:
		return broker.ErrUnavailable
	default:
		return broker.ErrUnsupported
	}
}

// hasCode says whether err is an answer of the JetStream API with one of these codes.
func hasCode(err error, codes ...int) bool {
	e, ok := errors.AsType[*apiError](err)
	if !ok {
		return false
	}
	for _, c := range codes {
		if e.Code == c {
			return true
		}
	}
	return false
}

// mapError puts an error of the client library under one of the seam's. What is unknown is ErrUnavailable: worth
// trying again.
func mapError(err error) error {
	if err == nil || broker.Classified(err) {
		return err
	}
	return fmt.Errorf("%w: %w", classify(err), err)
}

func classify(err error) error {
	for _, denied := range []error{
		natsgo.ErrAuthorization, natsgo.ErrAuthExpired, natsgo.ErrAuthRevoked, natsgo.ErrAccountAuthExpired,
		natsgo.ErrPermissionViolation, natsgo.ErrNkeysNotSupported,
	} {
		if errors.Is(err, denied) {
			return broker.ErrUnauthorized
		}
	}
	if errors.Is(err, natsgo.ErrMaxPayload) {
		return broker.ErrTooLarge
	}
	if errors.Is(err, natsgo.ErrBadSubject) || errors.Is(err, natsgo.ErrBadHeaderMsg) {
		return broker.ErrUnsupported
	}
	return broker.ErrUnavailable
}

// deniedSubject reads the subject out of `… Permissions Violation for Publish to "subject"`.
func deniedSubject(text string) string {
	_, rest, ok := strings.Cut(text, `"`)
	if !ok {
		return ""
	}
	subject, _, _ := strings.Cut(rest, `"`)
	return subject
}

// interrupted says whether a wait ended because of its context, not because of the broker.
func interrupted(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
