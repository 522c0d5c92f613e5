package redis

import (
	"errors"
	"fmt"
	"net"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/broker"
)

// mapError puts an error of the client library under one of the seam's. What is unknown is ErrUnavailable: worth
// trying again.
func mapError(err error) error {
	if err == nil || broker.Classified(err) {
		return err
	}
	return fmt.Errorf("%w: %w", classify(err), err)
}

// replies are the beginnings of error replies and what they mean (https://redis.io/docs/latest/develop/reference).
var replies = []struct {
	prefix string
	means  error
}{
	{"NOAUTH", broker.ErrUnauthorized},
	{"WRONGPASS", broker.ErrUnauthorized},
	{"NOPERM", broker.ErrUnauthorized},
	{"ERR AUTH", broker.ErrUnauthorized}, // a password for a server that has none
	{"DENIED", broker.ErrUnauthorized},   // protected mode
	{"NOGROUP", broker.ErrNotFound},
	{"UNBLOCKED", broker.ErrNotFound},
	{"ERR no such key", broker.ErrNotFound},
	{"ERR The XGROUP subcommand requires the key to exist", broker.ErrNotFound},
	{"WRONGTYPE", broker.ErrConflict},
	{"OOM", broker.ErrRejected},
	{"MISCONF", broker.ErrRejected},
	{"NOREPLICAS", broker.ErrRejected},
	{"ERR unknown command", broker.ErrUnsupported},
	{"ERR Unknown Redis command", broker.ErrUnsupported},
	{"CROSSSLOT", broker.ErrUnsupported},
}

// classify names the seam's error for a reply of the server or a broken connection.
func classify(err error) error {
	text, ok := reply(err)
	if !ok {
		return broker.ErrUnavailable // the network, TLS, a context, a pool
	}
	for _, r := range replies {
		if strings.HasPrefix(text, r.prefix) {
			return r.means
		}
	}
	return broker.ErrUnavailable
}

// reply is the text of an error that the server sent: it did not do what it was asked to.
func reply(err error) (string, bool) {
	e, ok := errors.AsType[goredis.Error](err)
	if !ok || errors.Is(err, goredis.Nil) {
		return "", false
	}
	text := e.Error()
	// An error that a script met is passed on with the script's name and line behind it, by some versions with more
	// before it.
	for _, before := range []string{"ERR Error running script", "ERR -", "-"} {
		if rest, ok := strings.CutPrefix(text, before); ok {
			if i := strings.LastIndex(rest, ": -"); i >= 0 {
				rest = rest[i+3:]
			}
			text = rest
		}
	}
	return text, true
}

func begins(err error, prefixes ...string) bool {
	text, ok := reply(err)
	if !ok {
		return false
	}
	for _, p := range prefixes {
		if strings.HasPrefix(text, p) {
			return true
		}
	}
	return false
}

// groupGone says whether the stream or its group does not exist any more.
func groupGone(err error) bool {
	return begins(err, "NOGROUP", "UNBLOCKED", "ERR no such key", "ERR The XGROUP subcommand requires the key to exist")
}

// notSent says whether an error means that nothing was sent to the server.
func notSent(err error) bool {
	var op *net.OpError
	switch {
	case errors.As(err, &op) && op.Op == "dial":
		return true
	case errors.Is(err, goredis.ErrPoolTimeout), errors.Is(err, goredis.ErrPoolExhausted), errors.Is(err, goredis.ErrClosed), errors.Is(err, errDial):
		return true
	}
	return false
}

// unsure says whether it is unknown if the server did what it was asked to.
func unsure(err error) bool {
	if err == nil || errors.Is(err, goredis.Nil) {
		return false
	}
	_, replied := reply(err)
	return !replied && !notSent(err)
}

// conflict is the error for a key that holds something else than a stream or a sorted set.
func conflict(key, want, have string) error {
	return &broker.ConflictError{Object: fmt.Sprintf("key %q", key), Diff: broker.Diff{Property: "type", Want: want, Have: have}}
}

// replyMeans is the seam's error for the text of an error that a script met and went on.
func replyMeans(text string) error { return classify(replyError(text)) }

// replyError is an error that the server answered with, where the library did not read it.
type replyError string

func (e replyError) Error() string { return string(e) }
func (replyError) RedisError()     {}
