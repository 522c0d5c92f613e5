package rabbitmq

import (
	"fmt"
	"math"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
)

const (
	// frameOverhead is what a frame has around its payload: type, channel, size, end.
	frameOverhead = 8
	// maxShortString is the longest of AMQP's short strings: names, routing keys, header names, most properties.
	maxShortString = 255
	// contentHeader is what a content header frame has before the properties: class, weight, body size, flags.
	contentHeader = 2 + 2 + 8 + 2
	// maxDepth bounds how deep tables and arrays in headers may nest.
	maxDepth = 64
)

// fits says whether a message's properties can be sent. A name that is too long, or a header frame that is larger
// than the server takes, would close the whole connection (C9), so that it must never be tried.
func fits(p *amqp.Publishing, frameMax int) error {
	size := contentHeader
	for _, s := range [...]struct{ name, value string }{
		{"content type", p.ContentType}, {"content encoding", p.ContentEncoding}, {"correlation id", p.CorrelationId},
		{"reply-to", p.ReplyTo}, {"expiration", p.Expiration}, {"message id", p.MessageId}, {"type", p.Type},
		{"user id", p.UserId}, {"app id", p.AppId},
	} {
		if s.value == "" {
			continue
		}
		if len(s.value) > maxShortString {
			return fmt.Errorf("%s of %d bytes: AMQP allows %d: %w", s.name, len(s.value), maxShortString, broker.ErrTooLarge)
		}
		size += 1 + len(s.value)
	}
	size += 1 + 1 + 8 // delivery mode, priority, timestamp
	if len(p.Headers) > 0 {
		n, err := tableSize(p.Headers, 0)
		if err != nil {
			return err
		}
		size += n
	}
	if frameMax > 0 && size > frameMax-frameOverhead {
		return fmt.Errorf("headers and properties of %d bytes: the server takes %d: %w", size, frameMax-frameOverhead, broker.ErrTooLarge)
	}
	return nil
}

func tableSize(t map[string]any, depth int) (int, error) {
	if depth > maxDepth {
		return 0, fmt.Errorf("headers are nested deeper than %d levels: %w", maxDepth, broker.ErrTooLarge)
	}
	size := 4
	for name, v := range t {
		if len(name) > maxShortString {
			return 0, fmt.Errorf("header name of %d bytes: AMQP allows %d: %w", len(name), maxShortString, broker.ErrTooLarge)
		}
		n, err := fieldSize(v, depth)
		if err != nil {
			return 0, fmt.Errorf("header %q: %w", name, err)
		}
		size += 1 + len(name) + n
	}
	return size, nil
}

// fieldSize is the encoded size of a value as toField leaves it, type octet included.
func fieldSize(v any, depth int) (int, error) {
	switch v := v.(type) {
	case nil:
		return 1, nil
	case bool, byte, int8:
		return 2, nil
	case int16, uint16:
		return 3, nil
	case int32, uint32, float32:
		return 5, nil
	case amqp.Decimal:
		return 6, nil
	case int64, float64, time.Time:
		return 9, nil
	case string:
		return 5 + len(v), nil
	case []byte:
		return 5 + len(v), nil
	case amqp.Table:
		n, err := tableSize(v, depth+1)
		return 1 + n, err
	case []any:
		if depth > maxDepth {
			return 0, fmt.Errorf("nested deeper than %d levels: %w", maxDepth, broker.ErrTooLarge)
		}
		size := 5
		for _, e := range v {
			n, err := fieldSize(e, depth+1)
			if err != nil {
				return 0, err
			}
			size += n
		}
		return size, nil
	default:
		return 0, fmt.Errorf("a value of type %T has no form in AMQP: %w", v, broker.ErrUnsupported)
	}
}

// toField gives a value that Go code may put into a header the type that AMQP has for it. The client library would
// cut an int to 32 bits.
func toField(v any) any {
	switch v := v.(type) {
	case int:
		return int64(v)
	case uint:
		return fromUint(uint64(v))
	case uint64:
		return fromUint(v)
	case map[string]any:
		t := make(amqp.Table, len(v))
		for k, e := range v {
			t[k] = toField(e)
		}
		return t
	case []any:
		for i, e := range v { // most arrays need no change: copy only those that do
			if needsField(e) {
				out := append([]any(nil), v...)
				for j := i; j < len(out); j++ {
					out[j] = toField(out[j])
				}
				return out
			}
		}
		return v
	case []string:
		out := make([]any, len(v))
		for i, e := range v {
			out[i] = e
		}
		return out
	default:
		return v
	}
}

func needsField(v any) bool {
	switch v.(type) {
	case int, uint, uint64, map[string]any, []any, []string:
		return true
	}
	return false
}

// fromUint keeps a number that int64 cannot hold as its decimal text.
func fromUint(n uint64) any {
	if n > math.MaxInt64 {
		return fmt.Sprint(n)
	}
	return int64(n)
}
