package runtime

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
	"unicode"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/runtime/codec"
	"github.com/shove-dev/shove/topology"
)

var (
	// ErrReservedHeader: the header's name belongs to shove or to a broker (Q4): every x-shove-* name but
	// x-shove-type, x-message-id, x-retry-count, x-death and what comes with them, CC, BCC and Nats-*.
	ErrReservedHeader = errors.New("reserved header")
	// ErrInvalidMessage: the message cannot be sent as it is; nothing was sent.
	ErrInvalidMessage = errors.New("invalid message")
)

// PublishOption adds to one message.
type PublishOption func(*draft)

// WithHeader sets a header. The value is text, bytes, a bool, a number or a time.Time; it keeps its type on brokers
// whose headers have types, and becomes text on others. A reserved name makes publishing fail with ErrReservedHeader.
func WithHeader(name string, value any) PublishOption {
	return func(d *draft) { d.setHeader(name, value) }
}

// WithHeaders sets several headers, as WithHeader does.
func WithHeaders(headers map[string]any) PublishOption {
	return func(d *draft) {
		for name, v := range headers {
			d.setHeader(name, v)
		}
	}
}

// WithKey gives the ordering and partitioning key (K2). On a topology whose key is a field of the body it wins over
// that field.
func WithKey(key string) PublishOption { return func(d *draft) { d.msg.Key = key } }

// WithRoutingKey is for topologies whose publishing side goes to an exchange. Defaults to the queue's name.
func WithRoutingKey(key string) PublishOption { return func(d *draft) { d.msg.RoutingKey = key } }

// WithType is the application's own name for the kind of message; it travels as x-shove-type.
func WithType(name string) PublishOption {
	return func(d *draft) { d.setHeader(header.Type, name) }
}

// WithTraceID sets x-trace-id. Defaults to the trace id of the context, see TraceID.
func WithTraceID(id string) PublishOption {
	return func(d *draft) { d.setHeader(header.Trace, id) }
}

// WithTimestamp is the time that the message gets as its publisher's. Defaults to the time of the call.
func WithTimestamp(t time.Time) PublishOption { return func(d *draft) { d.msg.Timestamp = t } }

// WithMessageID sets x-message-id, for a message that may have been published before: from an outbox, or after an
// unknown outcome. Consumers tell duplicates by it. Defaults to a new UUIDv7.
func WithMessageID(id string) PublishOption {
	return func(d *draft) {
		if id == "" || len(id) > maxHeaderName {
			d.bad(fmt.Errorf("%w: a message id has 1 to %d characters", ErrInvalidMessage, maxHeaderName))
			return
		}
		d.msg.ID = id
	}
}

// WithContentType overrides the codec's content type.
func WithContentType(contentType string) PublishOption {
	return func(d *draft) { d.msg.ContentType = contentType }
}

// maxHeaderName is what AMQP's short strings carry.
const maxHeaderName = 255

// draft is a message before it is sent.
type draft struct {
	msg    broker.Message
	encode func(codec.Codec) ([]byte, error)
	ready  bool
	err    error
}

func newDraft(ctx context.Context, cfg PublisherConfig, opts []PublishOption, encode func(codec.Codec) ([]byte, error)) draft {
	d := draft{encode: encode}
	d.msg.ContentType = cfg.Codec.ContentType()
	for _, o := range opts {
		o(&d)
	}
	if _, given := d.msg.Headers[header.Type]; cfg.Type != "" && !given {
		d.setHeader(header.Type, cfg.Type)
	}
	if _, given := d.msg.Headers[header.Trace]; !given {
		if id := TraceID(ctx); id != "" {
			d.setHeader(header.Trace, id)
		}
	}
	return d
}

func (d *draft) bad(err error) {
	if d.err == nil {
		d.err = err
	}
}

func (d *draft) setHeader(name string, value any) {
	if err := checkHeaderName(name); err != nil {
		d.bad(err)
		return
	}
	v, err := headerValue(value)
	if err != nil {
		d.bad(fmt.Errorf("%w: header %q: %w", ErrInvalidMessage, name, err))
		return
	}
	if d.msg.Headers == nil {
		d.msg.Headers = header.Map{}
	}
	d.msg.Headers[name] = v
}

func checkHeaderName(name string) error {
	switch {
	case name == "" || len(name) > maxHeaderName:
		return fmt.Errorf("%w: a header's name has 1 to %d bytes, %q… has %d", ErrInvalidMessage, maxHeaderName, header.Clip(name, 20), len(name))
	case strings.ContainsFunc(name, func(r rune) bool { return unicode.IsControl(r) || r == ':' }):
		return fmt.Errorf("%w: header %q: a name has neither control characters nor colons", ErrInvalidMessage, name)
	case header.Reserved(name):
		return fmt.Errorf("%w: %q: use a name of your own", ErrReservedHeader, name)
	}
	return nil
}

// headerValue is a value in one of the types that every backend carries.
func headerValue(value any) (any, error) {
	switch v := value.(type) {
	case string, []byte, bool, int64, float64, time.Time:
		return v, nil
	case float32:
		return float64(v), nil
	case int:
		return int64(v), nil
	case uint:
		if v > math.MaxInt64 {
			return nil, errors.New("the number is larger than an int64")
		}
		return int64(v), nil
	}
	if n, ok := header.Int(value); ok {
		return n, nil
	}
	return nil, fmt.Errorf("a %T cannot be a header: use text, bytes, a bool, a number or a time.Time", value)
}

// prepare makes the draft ready to be sent; what it found once it keeps for the next attempt.
func (d *draft) prepare(cfg PublisherConfig, t topology.Topology, limit int64) error {
	if d.err != nil || d.ready {
		return d.err
	}
	d.err = d.fill(cfg, t, limit)
	d.ready = d.err == nil
	return d.err
}

func (d *draft) fill(cfg PublisherConfig, t topology.Topology, limit int64) (err error) {
	if d.msg.Body, err = d.encode(cfg.Codec); err != nil {
		return err
	}
	if size := int64(len(d.msg.Body)); size > limit {
		return fmt.Errorf("%w: the body has %d bytes, the topology takes %d", broker.ErrTooLarge, size, limit)
	}
	if d.msg.Key == "" && t.Sequenced != nil {
		if t.Sequenced.Key == "" {
			return fmt.Errorf("%w: the topology is sequenced: give the message a key with WithKey", ErrInvalidMessage)
		}
		if d.msg.Key, err = keyField(d.msg.Body, t.Sequenced.Key); err != nil {
			return err
		}
	}
	if d.msg.ID == "" {
		if d.msg.ID, err = newMessageID(); err != nil {
			return err
		}
	}
	if d.msg.Timestamp.IsZero() {
		d.msg.Timestamp = time.Now()
	}
	return nil
}

// keyField reads the ordering key from a field of a JSON body; a dot goes one object deeper (K2).
func keyField(body []byte, path string) (string, error) {
	value := json.RawMessage(body)
	for name := range strings.SplitSeq(path, ".") {
		var object map[string]json.RawMessage
		if json.Unmarshal(value, &object) != nil {
			return "", fmt.Errorf("%w: the ordering key is the field %q of the body, which is not a JSON object with it: use WithKey", ErrInvalidMessage, path)
		}
		value = object[name]
	}
	var text string
	if json.Unmarshal(value, &text) == nil && text != "" {
		return text, nil
	}
	var number json.Number
	if json.Unmarshal(value, &number) == nil && number != "" {
		return number.String(), nil
	}
	return "", fmt.Errorf("%w: the ordering key is the field %q of the body, which is missing or neither text nor a number", ErrInvalidMessage, path)
}

type traceKey struct{}

// WithTrace returns a context that carries a trace id: messages published with it get it as x-trace-id.
func WithTrace(ctx context.Context, id string) context.Context {
	return context.WithValue(ctx, traceKey{}, id)
}

// TraceID is the trace id of a context; empty: none. In an audited handler it is the message's.
func TraceID(ctx context.Context) string {
	id, _ := ctx.Value(traceKey{}).(string)
	return id
}
