package redis

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
)

// Fields of an entry that are no headers (W).
const (
	payloadField     = "payload"
	contentTypeField = "content-type"
)

const (
	// maxFields bounds the fields of an entry that is copied: a script can pass on about 8000 values at once.
	maxFields = 3500
	// maxBulk is what a server takes as one value, unless proto-max-bulk-len says otherwise.
	maxBulk = 512 << 20
	// sharedMost is the largest answer that its messages share the memory of: one slow message keeps all of it.
	sharedMost = 256 << 10
)

// text is the form in which a header travels: everything is text here.
func text(v any) (string, error) {
	switch v := v.(type) {
	case string:
		return v, nil
	case []byte:
		return string(v), nil
	case int64:
		return strconv.FormatInt(v, 10), nil
	case bool:
		return strconv.FormatBool(v), nil
	case float64:
		return strconv.FormatFloat(v, 'g', -1, 64), nil
	case float32:
		return strconv.FormatFloat(float64(v), 'g', -1, 32), nil
	case uint64:
		return strconv.FormatUint(v, 10), nil
	case uint:
		return strconv.FormatUint(uint64(v), 10), nil
	case time.Time:
		return v.UTC().Format(time.RFC3339Nano), nil
	}
	if n, ok := header.Int(v); ok {
		return strconv.FormatInt(n, 10), nil
	}
	return "", fmt.Errorf("a value of type %T has no form in Redis: %w", v, broker.ErrUnsupported)
}

// messageFields are the fields of a message that is published.
func messageFields(dst []any, m *broker.Message) ([]any, error) {
	dst = append(dst, payloadField, m.Body)
	size := len(m.Body)
	if m.ContentType != "" {
		dst = append(dst, contentTypeField, m.ContentType)
	}
	for name, v := range m.Headers {
		t, err := text(v)
		if err != nil {
			return nil, fmt.Errorf("header %q: %w", name, err)
		}
		dst = append(dst, name, t)
		size += len(name) + len(t)
	}
	if m.ID != "" {
		dst = append(dst, header.MessageID, m.ID)
	}
	if m.Key != "" {
		dst = append(dst, header.Key, m.Key)
	}
	if size > maxBulk {
		return nil, fmt.Errorf("a message of %d bytes: Redis takes %d: %w", size, maxBulk, broker.ErrTooLarge)
	}
	if len(m.Headers) > maxFields {
		return nil, fmt.Errorf("%d headers: at most %d can be copied: %w", len(m.Headers), maxFields, broker.ErrTooLarge)
	}
	return dst, nil
}

// fill makes the caller's view of an entry from its fields. The first payload is the body; what else is called so is a
// header of that name.
func (e *entry) fill(id []byte, fields fieldList) {
	e.id, e.fields = string(id), fields
	e.ms, e.n, _ = parseID(id)
	e.Partition, e.Offset, e.Native = -1, -1, e
	if e.ms > minTimestamp {
		e.Timestamp = time.UnixMilli(int64(e.ms))
	}
	body := false
	fields.each(func(name, value []byte) {
		switch {
		case string(name) == payloadField && !body:
			e.Body, body = value, true
		case string(name) == contentTypeField && e.ContentType == "":
			e.ContentType = string(value)
		default:
			if e.Headers == nil {
				e.Headers = make(header.Map, fields.count()-1)
			}
			v := string(value)
			e.Headers[known(name)] = v
			if string(name) == header.Key {
				e.Key = v
			}
		}
	})
}

// names are those of headers that most messages have: they need no memory of their own.
var names = func() map[string]string {
	m := map[string]string{}
	for _, n := range []string{header.MessageID, header.RetryCount, header.DeferCount, header.FirstSeen, header.NotBefore, header.Due, header.IDDerived,
		header.DeliveryID, header.History, header.DeathReason, header.DeathDetail, header.DeathCount, header.OriginalQueue, header.DiedAt, header.Type,
		header.Trace, header.Key, "traceparent", "tracestate"} {
		m[n] = n
	}
	return m
}()

func known(name []byte) string {
	if n, ok := names[string(name)]; ok {
		return n
	}
	return string(name)
}

// minTimestamp is the year 2000: an id below it was chosen by somebody, and is no time.
const minTimestamp = 946684800000

// appendCopy appends the copy that an action asks for, packed: the original's own fields, without those that would harm
// it, and those that are written anew (C9). The due time of a held one is put to the server's clock, which is ahead of
// ours by so much. It returns how many fields there are.
func appendCopy(dst []byte, e *entry, in *broker.Settlement, ahead time.Duration) (packed []byte, fields int) {
	// The length of the array comes first and is known last.
	at := len(dst)
	dst = append(dst, 0xdc, 0, 0)
	add := func(name, value []byte) {
		dst = appendPacked(dst, name)
		dst = appendPacked(dst, value)
		fields++
	}
	if in.Envelope != nil {
		add([]byte(payloadField), in.Envelope)
		add([]byte(contentTypeField), []byte("application/json"))
	} else {
		body := false
		e.fields.each(func(name, value []byte) {
			switch {
			case string(name) == payloadField && !body:
				body = true
			case string(name) == contentTypeField, header.Keep(known(name)):
			default:
				return
			}
			add(name, value)
		})
		if !body {
			add([]byte(payloadField), nil)
		}
	}
	var number [20]byte
	for _, f := range in.Stamp {
		switch v := f.Value.(type) {
		case string:
			dst = appendPacked(dst, f.Name)
			dst = appendPacked(dst, v)
			fields++
		case int64:
			if f.Name == header.Due {
				v += ahead.Milliseconds()
			}
			dst = appendPacked(dst, f.Name)
			dst = appendPacked(dst, strconv.AppendInt(number[:0], v, 10))
			fields++
		}
	}
	binary.BigEndian.PutUint16(dst[at+1:], uint16(min(2*fields, 1<<16-1)))
	return dst, fields
}

// appendPacked appends a text in MessagePack, which scripts read with cmsgpack.
func appendPacked[T string | []byte](dst []byte, s T) []byte {
	switch n := len(s); {
	case n < 32:
		dst = append(dst, 0xa0|byte(n))
	case n < 1<<16:
		dst = append(dst, 0xda, byte(n>>8), byte(n))
	default:
		dst = append(dst, 0xdb)
		dst = binary.BigEndian.AppendUint32(dst, uint32(n))
	}
	return append(dst, s...)
}

// prefix is what a held message has before its packed fields: which stream and entry it was, so that no two members of
// the set are alike and those that are due together leave in the order in which they came. It has 17 bytes, which
// due.lua skips.
func (e *entry) prefix(dst []byte) []byte {
	dst = append(dst, byte(e.stream))
	dst = binary.BigEndian.AppendUint64(dst, e.ms)
	return binary.BigEndian.AppendUint64(dst, e.n)
}

// detach gives an entry memory of its own.
func (l fieldList) detach(answer int) fieldList {
	if answer <= sharedMost {
		return l
	}
	return slices.Clip(bytes.Clone(l))
}
