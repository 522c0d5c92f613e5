package kafka

import (
	"encoding/base64"
	"math/bits"
	"strconv"
	"strings"
)

// position is how far a group got in a partition: what an offset commit says. The committed offset is the lowest record
// that is not done; what is known beyond it is in the commit's metadata, so that the next owner of the partition does not
// handle again what is done, and so that anyone can tell what is ready from what is in flight.
type position struct {
	// next is the committed offset: everything below is done.
	next int64
	// inFlight counts the records that were delivered to a handler and are not settled, as of the commit.
	inFlight int64
	// seen is the end of what was ever delivered; at least next.
	seen int64
	// done has a bit for each record from next on: bit i of word j is the record next+64j+i.
	done []uint64
}

const (
	// positionVersion begins the metadata of our commits.
	positionVersion = "shove1"
	// maxSpan bounds how far a partition is read beyond its lowest record that is not done, so that what is done always
	// fits the metadata, of which a broker by default takes 4096 bytes (offset.metadata.max.bytes).
	maxSpan = 1 << 14
)

// encode makes the metadata of a commit: "shove1 <in flight> <seen-next> <bits of done, base64>".
func (p position) encode() string {
	words := p.done
	for len(words) > 0 && words[len(words)-1] == 0 {
		words = words[:len(words)-1]
	}
	b := make([]byte, 0, 32+len(words)*11)
	b = append(b, positionVersion...)
	b = append(b, ' ')
	b = strconv.AppendInt(b, p.inFlight, 10)
	b = append(b, ' ')
	b = strconv.AppendInt(b, max(p.seen-p.next, 0), 10)
	if len(words) == 0 {
		return string(b)
	}
	raw := make([]byte, 0, len(words)*8)
	for _, w := range words {
		for range 8 {
			raw = append(raw, byte(w))
			w >>= 8
		}
	}
	for len(raw) > 0 && raw[len(raw)-1] == 0 {
		raw = raw[:len(raw)-1]
	}
	b = append(b, ' ')
	return string(base64.RawStdEncoding.AppendEncode(b, raw))
}

// parsePosition reads a commit. Metadata that is not ours, or cannot be read, says nothing beyond the offset.
func parsePosition(offset int64, metadata string) position {
	p := position{next: offset, seen: offset}
	f := strings.Split(metadata, " ")
	if len(f) < 3 || f[0] != positionVersion {
		return p
	}
	inFlight, err1 := strconv.ParseInt(f[1], 10, 64)
	seen, err2 := strconv.ParseInt(f[2], 10, 64)
	if err1 != nil || err2 != nil || inFlight < 0 || seen < 0 {
		return p
	}
	if len(f) > 3 {
		raw, err := base64.RawStdEncoding.DecodeString(f[3])
		if err != nil || len(raw) > maxSpan/8 {
			return p
		}
		p.done = make([]uint64, (len(raw)+7)/8)
		for i, c := range raw {
			p.done[i/8] |= uint64(c) << (i % 8 * 8)
		}
	}
	p.inFlight, p.seen = inFlight, offset+seen
	return p
}

// doneBeyond counts the done records from an offset on, which is at least next.
func (p position) doneBeyond(from int64) (n int64) {
	for i, w := range p.done {
		if first := p.next + int64(i)*64; first < from {
			if from-first >= 64 {
				continue
			}
			w &^= 1<<(from-first) - 1
		}
		n += int64(bits.OnesCount64(w))
	}
	return n
}

// backlog is what is left of a partition that has the records [start, end): what a handler could get, and what is with
// one. It counts offsets: those that compaction or a transaction's markers took away count as records until they are
// passed.
func (p position) backlog(start, end int64) (ready, inFlight int64) {
	from := max(p.next, start)
	if end <= from {
		return 0, 0
	}
	left := max(end-from-p.doneBeyond(from), 0)
	inFlight = min(p.inFlight, left)
	return left - inFlight, inFlight
}
