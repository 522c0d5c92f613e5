package redis

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"

	"github.com/shove-dev/shove/broker"
)

// respReader reads an answer of the server in RESP2 as it came, without making a value of each part of it: a batch of
// messages is one piece of memory, and each body a part of that.
type respReader struct {
	b []byte
	i int
}

// errResp says that an answer is not what its command answers with.
var errResp = fmt.Errorf("unexpected answer of the server: %w", broker.ErrUnavailable)

// line reads what is between a type's character and the end of its line, as a number.
func (r *respReader) line(kind byte) (int, error) {
	if r.i >= len(r.b) || r.b[r.i] != kind {
		return 0, errResp
	}
	end := bytes.IndexByte(r.b[r.i:], '\r')
	if end < 0 {
		return 0, errResp
	}
	n, err := atoi(r.b[r.i+1 : r.i+end])
	r.i += end + 2
	return n, err
}

// array reads the length of an array; -1 for none.
func (r *respReader) array() (int, error) { return r.line('*') }

func (r *respReader) integer() (int, error) { return r.line(':') }

// bulk reads a text; nil for none.
func (r *respReader) bulk() ([]byte, error) {
	n, err := r.line('$')
	if err != nil || n < 0 {
		return nil, err
	}
	if r.i+n+2 > len(r.b) {
		return nil, errResp
	}
	out := r.b[r.i : r.i+n : r.i+n]
	r.i += n + 2
	return out, nil
}

// fields reads a list of names and values, checks it, and returns it as it came; nil for none.
func (r *respReader) fields() (fieldList, error) {
	begin := r.i
	n, err := r.array()
	if err != nil || n < 0 {
		return nil, err
	}
	if n%2 != 0 {
		return nil, errResp
	}
	for range n {
		if _, err := r.bulk(); err != nil {
			return nil, err
		}
	}
	return fieldList(r.b[begin:r.i:r.i]), nil
}

// fieldList is the fields of an entry as they came: an array of names and values in turn.
type fieldList []byte

// each calls f for every field. The list was checked when it was read.
func (l fieldList) each(f func(name, value []byte)) {
	r := respReader{b: l}
	n, err := r.array()
	for i := 0; err == nil && i+1 < n; i += 2 {
		var name, value []byte
		if name, err = r.bulk(); err == nil {
			if value, err = r.bulk(); err == nil {
				f(name, value)
			}
		}
	}
}

func (l fieldList) count() int {
	r := respReader{b: l}
	n, _ := r.array()
	return n / 2
}

func atoi(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, errResp
	}
	neg := b[0] == '-'
	if neg {
		b = b[1:]
	}
	n := 0
	for _, c := range b {
		if c < '0' || c > '9' || n > 1<<50 {
			return 0, errResp
		}
		n = n*10 + int(c-'0')
	}
	if neg {
		n = -n
	}
	return n, nil
}

// parseID reads an entry's id, "milliseconds-number".
func parseID(id []byte) (ms, n uint64, ok bool) {
	a, b, found := bytes.Cut(id, []byte{'-'})
	if !found {
		return 0, 0, false
	}
	x, err := strconv.ParseUint(string(a), 10, 64)
	y, err2 := strconv.ParseUint(string(b), 10, 64)
	return x, y, errors.Join(err, err2) == nil
}
