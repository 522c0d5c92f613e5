package nats

import (
	"encoding/json"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	natsgo "github.com/nats-io/nats.go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/settle"
)

// copyOf is the copy that an action asks for: the original's headers without those that would harm it, and those that
// are written anew (C9). What is left of an earlier schedule would purge another held message.
func (s *subscription) copyOf(e *entry, in *broker.Settlement, now time.Time) (outgoing, error) {
	t := &s.plan.topology
	main := physical(*t, t.Queue)
	m := outgoing{subject: main, stream: main, header: copyHeaders(e.msg.Header, in), data: e.msg.Data}
	if in.Envelope != nil {
		m.data = in.Envelope
	}
	// One copy per original: if the original is redelivered because its acknowledgement was lost, the second copy is
	// a duplicate of the first for as long as the stream remembers. The time tells a stream from an earlier one of
	// the same name.
	place := strconv.FormatUint(e.origin.seq, 36)
	m.header[headerMsgID] = []string{e.from.stream + "." + place + "." + strconv.FormatInt(e.origin.stamp, 36)}
	extra := 0
	switch in.Action.Kind {
	case settle.DeadLetter:
		m.subject = physical(*t, t.DeadLetter)
		m.stream = m.subject
	case settle.Hold:
		if e.from.stream != main {
			place = "s" + place // of another stream, whose numbers are others
		}
		due := s.clock.after(now, in.Action.Delay)
		ms := due.Add(time.Millisecond - 1).UnixMilli() // rounded up
		m.header[header.Due] = []string{strconv.FormatInt(ms, 10)}
		name := s.plan.holds[in.Action.Tier].name
		if !s.scheduling {
			m.subject = parked(name) + place
			break
		}
		m.subject = scheduled(name) + place
		m.header[headerSchedule] = []string{"@at " + due.UTC().Format(time.RFC3339Nano)}
		m.header[headerTarget] = []string{main}
		// When it is due the server takes these away and adds others. A message that does not fit then stays held.
		extra = len(headerScheduler) + len(m.subject) + len(headerNext) + len("purge") + 8
	}
	return m, fits(m.header, len(m.data), extra, s.conn.MaxPayload())
}

func copyHeaders(original natsgo.Header, in *broker.Settlement) natsgo.Header {
	h := make(natsgo.Header, len(original)+len(in.Stamp)+4)
	if in.Envelope == nil {
		for name, values := range original {
			if header.Keep(name) {
				h[name] = values
			}
		}
	} else {
		h[contentType] = []string{"application/json"}
	}
	values := make([]string, len(in.Stamp)) // one allocation for all of them
	for i, f := range in.Stamp {
		values[i] = oneLine(text(f.Value))
		h[f.Name] = values[i : i+1 : i+1]
	}
	return h
}

// text is a header value as NATS carries it.
func text(v any) string {
	switch v := v.(type) {
	case nil:
		return ""
	case string:
		return v
	case []byte:
		return string(v)
	case int64:
		return strconv.FormatInt(v, 10)
	case time.Time:
		return v.Format(time.RFC3339Nano)
	case map[string]any, []any, []string:
		if b, err := json.Marshal(v); err == nil {
			return string(b)
		}
	}
	return fmt.Sprint(v)
}

// oneLine makes a text of ours, such as an error's, fit one header line.
func oneLine(s string) string {
	if strings.ContainsAny(s, "\r\n") {
		s = strings.Map(func(r rune) rune {
			if r == '\r' || r == '\n' {
				return ' '
			}
			return r
		}, s)
	}
	return strings.TrimSpace(s)
}

// headerBytes is what headers take in a stream.
func headerBytes(h natsgo.Header) int {
	n := len("NATS/1.0\r\n\r\n")
	for name, values := range h {
		for _, v := range values {
			n += len(name) + len(": \r\n") + len(v)
		}
	}
	return n
}

// fits says whether a message can be stored, and delivered once the server has added to its headers.
func fits(h natsgo.Header, body, extra int, maxPayload int64) error {
	n := headerBytes(h) + extra
	if n > maxHeaders {
		return fmt.Errorf("headers of %d bytes: a stream takes %d: %w", n, maxHeaders, broker.ErrTooLarge)
	}
	if total := int64(n) + int64(body); maxPayload > 0 && total > maxPayload {
		return fmt.Errorf("%d bytes with headers: the server's max_payload is %d: %w", total, maxPayload, broker.ErrTooLarge)
	}
	return nil
}

// plainHeaders are a parked message's headers without NATS's own.
func plainHeaders(h natsgo.Header) natsgo.Header {
	out := maps.Clone(h)
	maps.DeleteFunc(out, func(name string, _ []string) bool { return strings.HasPrefix(name, natsPrefix) })
	return out
}
