package header

import (
	"strconv"
	"strings"
	"time"
)

type parser struct {
	h         Map
	malformed int
}

// first finds the first of names that is present. The first name is ours and wins (C5).
func (p *parser) first(names []string) (any, bool) {
	for _, n := range names {
		if v, ok := p.h[n]; ok && v != nil {
			return v, true
		}
	}
	return nil, false
}

func (p *parser) count(names ...string) uint32 {
	v, ok := p.first(names)
	if !ok {
		return 0
	}
	n, ok := Int(v)
	if !ok || n < 0 || n > maxCount {
		p.malformed++
		return 0
	}
	return uint32(n)
}

func (p *parser) text(names ...string) string {
	v, ok := p.first(names)
	if !ok {
		return ""
	}
	s, ok := Text(v)
	if !ok {
		p.malformed++
	}
	return s
}

func (p *parser) millis(name string) time.Time {
	v, ok := p.h[name]
	if !ok {
		return time.Time{}
	}
	n, ok := Int(v)
	if !ok || n <= 0 || n > maxMillis {
		p.malformed++
		return time.Time{}
	}
	return time.UnixMilli(n)
}

// maxMillis is the end of the year 9999, beyond which time.Time no longer marshals.
const maxMillis = 253402300799999

// Int reads a header value as an integer: any integer type, or decimal text.
func Int(v any) (int64, bool) {
	switch n := v.(type) {
	case int64:
		return n, true
	case int32:
		return int64(n), true
	case int16:
		return int64(n), true
	case int8:
		return int64(n), true
	case int:
		return int64(n), true
	case uint8:
		return int64(n), true
	case uint16:
		return int64(n), true
	case uint32:
		return int64(n), true
	case uint64:
		return int64(n), n <= 1<<63-1
	}
	s, ok := Text(v)
	if !ok {
		return 0, false
	}
	i, err := strconv.ParseInt(strings.TrimSpace(s), 10, 64)
	return i, err == nil
}

// Text reads a header value as text: a string or a byte string.
func Text(v any) (string, bool) {
	switch s := v.(type) {
	case string:
		return s, true
	case []byte:
		return string(s), true
	}
	return "", false
}

// Text returns a header as text; ok is false where it is absent or neither text nor an integer.
func (h Map) Text(name string) (string, bool) {
	v, ok := h[name]
	if !ok {
		return "", false
	}
	if s, ok := Text(v); ok {
		return s, true
	}
	if n, ok := Int(v); ok {
		return strconv.FormatInt(n, 10), true
	}
	return "", false
}
