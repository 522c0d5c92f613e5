package kafka

import "math/bits"

// tracker knows what of one partition is done. Records are admitted in the order of the log; what the log leaves out
// (compaction, a transaction's markers) counts as done when a later record is admitted.
type tracker struct {
	// base is the lowest record that is not done: what is committed. -1: nothing is known yet.
	base int64
	// next is the record after the last one that was admitted.
	next int64
	// top is the end of what may be marked in done.
	top int64
	// seen is the end of what was ever delivered, by whatever consumer of the group.
	seen int64
	// inFlight counts what was delivered and is not settled.
	inFlight int
	// done is a ring: the bit of a record is at its offset modulo maxSpan. Bits outside of [base, top) are zero.
	done [maxSpan / 64]uint64
}

// newTracker begins where a commit says. A negative offset is no commit.
func newTracker(p position) *tracker {
	if p.next < 0 {
		return &tracker{base: -1, seen: p.seen}
	}
	t := &tracker{base: p.next, next: p.next, top: p.next, seen: max(p.seen, p.next)}
	for i, w := range p.done {
		for ; w != 0; w &= w - 1 {
			if o := p.next + int64(i)*64 + int64(bits.TrailingZeros64(w)); o < p.next+maxSpan {
				t.set(o)
			}
		}
	}
	return t
}

func (t *tracker) set(o int64) {
	t.done[o%maxSpan/64] |= 1 << (o % 64)
	t.top = max(t.top, o+1)
}

func (t *tracker) has(o int64) bool { return t.done[o%maxSpan/64]&(1<<(o%64)) != 0 }

// verdict is what becomes of a record that is about to be delivered.
type verdict uint8

const (
	deliver verdict = iota
	skip            // it is done already
	wait            // it is too far beyond the lowest record that is not done
)

// admit takes the next record of the log. A record that is nothing to deliver is done at once.
func (t *tracker) admit(o int64, nothing bool) verdict {
	if t.base < 0 {
		t.base, t.next, t.top = o, o, o
		t.seen = max(t.seen, o)
	}
	if o < t.next {
		return skip
	}
	if o-t.base >= maxSpan {
		if t.base != t.next {
			return wait
		}
		// Everything before is done, and the log leaves out what is between.
		clear(t.done[:])
		t.base, t.next, t.top = o, o, o
	}
	for ; t.next < o; t.next++ {
		t.set(t.next)
	}
	t.next = o + 1
	if nothing {
		t.set(o)
	}
	known := t.has(o)
	t.advance()
	if known {
		return skip
	}
	t.top = max(t.top, t.next)
	t.seen = max(t.seen, t.next)
	t.inFlight++
	return deliver
}

// finish marks a delivered record as done.
func (t *tracker) finish(o int64) {
	t.inFlight--
	t.set(o)
	if o == t.base {
		t.advance()
	}
}

// release takes back a delivered record that is not done.
func (t *tracker) release() { t.inFlight-- }

// again notes that a record which was released is delivered once more.
func (t *tracker) again() { t.inFlight++ }

// advance moves the base over what is done.
func (t *tracker) advance() {
	for t.base < t.next {
		i, shift := t.base%maxSpan/64, t.base%64
		run := int64(bits.TrailingZeros64(^(t.done[i] >> shift)))
		run = min(run, 64-shift, t.next-t.base)
		if run == 0 {
			break
		}
		mask := ^uint64(0)
		if run < 64 {
			mask = (1<<run - 1) << shift
		}
		t.done[i] &^= mask
		t.base += run
	}
	t.top = max(t.top, t.base)
}

// position is what to commit.
func (t *tracker) position() position {
	p := position{next: t.base, inFlight: int64(t.inFlight), seen: t.seen}
	n := int(t.top - t.base)
	if n <= 0 {
		return p
	}
	p.done = make([]uint64, (n+63)/64)
	shift := t.base % 64
	word := int(t.base % maxSpan / 64)
	for i := range p.done {
		w := t.done[(word+i)%len(t.done)] >> shift
		if shift > 0 {
			w |= t.done[(word+i+1)%len(t.done)] << (64 - shift)
		}
		if left := n - 64*i; left < 64 {
			w &= 1<<left - 1
		}
		p.done[i] = w
	}
	return p
}
