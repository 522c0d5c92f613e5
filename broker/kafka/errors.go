package kafka

import (
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/shove-dev/shove/broker"
)

// mapError puts an error of the client library under one of the seam's. What is unknown is ErrUnavailable: worth
// trying again.
func mapError(err error) error {
	if err == nil || broker.Classified(err) {
		return err
	}
	return fmt.Errorf("%w: %w", classify(err), scrubbed(err))
}

// classify names the seam's error for an answer of a broker or a broken connection.
func classify(err error) error {
	if errors.Is(err, kgo.ErrClientClosed) {
		return broker.ErrClosed
	}
	e, ok := errors.AsType[*kerr.Error](err)
	if !ok {
		return broker.ErrUnavailable // the network, TLS, a context
	}
	switch e {
	case kerr.SaslAuthenticationFailed, kerr.TopicAuthorizationFailed, kerr.GroupAuthorizationFailed, kerr.ClusterAuthorizationFailed,
		kerr.TransactionalIDAuthorizationFailed, kerr.DelegationTokenAuthorizationFailed:
		return broker.ErrUnauthorized
	case kerr.UnknownTopicOrPartition, kerr.UnknownTopicID, kerr.GroupIDNotFound:
		return broker.ErrNotFound
	case kerr.UnsupportedVersion, kerr.UnsupportedSaslMechanism, kerr.IllegalSaslState, kerr.InvalidConfig, kerr.InvalidTopicException,
		kerr.InvalidPartitions, kerr.PolicyViolation, kerr.InvalidRequest, kerr.SecurityDisabled:
		return broker.ErrUnsupported
	case kerr.MessageTooLarge, kerr.RecordListTooLarge:
		return broker.ErrTooLarge
	case kerr.InvalidReplicationFactor: // brokers may be down at present
		return broker.ErrRejected
	default:
		return broker.ErrUnavailable
	}
}

// scrubbed is the error with a text for people in place of the library's.
func scrubbed(err error) error {
	if e, ok := err.(*kerr.Error); ok { //nolint:errorlint // a wrapped one has context that must stay
		return &replyError{e, ""}
	}
	return err
}

// replyError is an error code of a broker, with what it said about it.
type replyError struct {
	code *kerr.Error
	text string
}

func (e *replyError) Error() string {
	text := e.text
	if text == "" {
		text = e.code.Description
	}
	return fmt.Sprintf("%s (%s)", text, e.code.Message)
}

func (e *replyError) Unwrap() error { return e.code }

// answer is the error for a code of a broker, with the text that came with it; nil for success.
func answer(code int16, text *string) error {
	if code == 0 {
		return nil
	}
	err := kerr.ErrorForCode(code)
	if e, ok := errors.AsType[*kerr.Error](err); ok && text != nil && *text != "" {
		err = &replyError{e, *text}
	}
	return mapError(err)
}

// right is what an ACL has to allow: an operation on a resource.
type right struct {
	operation string // as in kafka-acls: Read, Write, Create, Describe, Alter, Delete, DescribeConfigs, AlterConfigs
	resource  string // topic, group, cluster, transactional id
	name      string
}

// on names the right that was missing, where an error says that one was.
func (r right) on(err error) error {
	if err == nil {
		return nil
	}
	err = mapError(err)
	if !errors.Is(err, broker.ErrUnauthorized) || errors.Is(err, kerr.SaslAuthenticationFailed) {
		return err
	}
	return fmt.Errorf("%w: an ACL has to allow this user the operation %s on %s %q", err, r.operation, r.resource, r.name)
}
