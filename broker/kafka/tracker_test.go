package kafka

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// admitAll delivers the records [from, to).
func admitAll(t *testing.T, tr *tracker, from, to int64) {
	t.Helper()
	for o := from; o < to; o++ {
		if v := tr.admit(o, false); v != deliver {
			t.Fatalf("record %d: verdict %d, want to deliver it", o, v)
		}
	}
}

// franz-go#1055: 3, 4, 5 and 7 are done, 6 is not.
func TestCase06_CommitStopsAtTheGap(t *testing.T) {
	tr := newTracker(position{next: 3})
	admitAll(t, tr, 3, 8)
	for _, o := range []int64{7, 3, 5, 4} {
		tr.finish(o)
	}
	p := tr.position()
	if p.next != 6 || p.inFlight != 1 || p.seen != 8 {
		t.Errorf("committed %d with %d in flight, seen to %d; want 6, 1 and 8", p.next, p.inFlight, p.seen)
	}
	next := newTracker(parsePosition(p.next, p.encode()))
	if v := next.admit(6, false); v != deliver {
		t.Errorf("the next owner: 6 gets verdict %d", v)
	}
	if v := next.admit(7, false); v != skip {
		t.Errorf("the next owner: 7 gets verdict %d although it is done", v)
	}
	next.finish(6)
	if next.base != 8 {
		t.Errorf("then the next owner commits %d, want 8", next.base)
	}
}

func TestTracker(t *testing.T) {
	for name, tc := range map[string]struct {
		do   func(t *testing.T, tr *tracker)
		want position
	}{
		"nothing yet":           {func(*testing.T, *tracker) {}, position{next: 10, seen: 10}},
		"one in flight":         {func(t *testing.T, tr *tracker) { admitAll(t, tr, 10, 11) }, position{next: 10, inFlight: 1, seen: 11}},
		"handed back":           {func(t *testing.T, tr *tracker) { admitAll(t, tr, 10, 11); tr.release() }, position{next: 10, seen: 11}},
		"a gap counts as done":  {func(t *testing.T, tr *tracker) { admitAll(t, tr, 20, 21); tr.finish(20) }, position{next: 21, seen: 21}},
		"a marker is done":      {func(_ *testing.T, tr *tracker) { tr.admit(10, true) }, position{next: 11, seen: 10}},
		"a huge gap":            {func(t *testing.T, tr *tracker) { admitAll(t, tr, 1<<40, 1<<40+1) }, position{next: 1 << 40, inFlight: 1, seen: 1<<40 + 1}},
		"done beyond the first": {func(t *testing.T, tr *tracker) { admitAll(t, tr, 10, 13); tr.finish(12) }, position{next: 10, inFlight: 2, seen: 13, done: []uint64{4}}},
	} {
		t.Run(name, func(t *testing.T) {
			tr := newTracker(position{next: 10})
			tc.do(t, tr)
			got := tr.position()
			if len(got.done) > 0 && got.done[0] == 0 {
				got.done = nil
			}
			if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(position{})); diff != "" {
				t.Errorf("position (-want +got):\n%s", diff)
			}
		})
	}
}

// The span is bounded, so that what is done always fits the metadata of a commit.
func TestTrackerBoundsTheSpan(t *testing.T) {
	tr := newTracker(position{next: 5})
	admitAll(t, tr, 5, 5+maxSpan)
	for o := int64(6); o < 5+maxSpan; o += 2 {
		tr.finish(o)
	}
	if v := tr.admit(5+maxSpan, false); v != wait {
		t.Errorf("one beyond the span: verdict %d, want to wait", v)
	}
	if n := len(tr.position().encode()); n > 4096 {
		t.Errorf("metadata of %d bytes: a broker takes 4096", n)
	}
	tr.finish(5)
	if v := tr.admit(5+maxSpan, false); v != deliver {
		t.Errorf("after the lowest one is done: verdict %d, want to deliver", v)
	}
}

// A tracker agrees with a plain model, over hand-overs to other owners.
func TestTrackerModel(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		tr := newTracker(position{next: -1})
		done, flying, inLog := map[int64]bool{}, []int64{}, []int64{}
		next := int64(r.IntN(1000))
		for range 2000 {
			switch n := r.IntN(10); {
			case n < 5:
				if r.IntN(20) == 0 {
					next += int64(r.IntN(200)) // compaction
				}
				if v := tr.admit(next, false); v == deliver {
					flying = append(flying, next)
				} else if v == skip && !done[next] {
					t.Fatalf("record %d is skipped and not done", next)
				}
				inLog = append(inLog, next)
				next++
			case n < 9 && len(flying) > 0:
				i := r.IntN(len(flying))
				tr.finish(flying[i])
				done[flying[i]] = true
				flying = append(flying[:i], flying[i+1:]...)
			case n == 9 && r.IntN(20) == 0 && tr.base >= 0: // another owner
				p := tr.position()
				tr = newTracker(parsePosition(p.next, p.encode()))
				flying = flying[:0]
				for _, o := range inLog {
					if o < p.next {
						if !done[o] {
							t.Fatalf("committed %d and record %d is not done", p.next, o)
						}
						continue
					}
					v := tr.admit(o, false)
					if (v == skip) != done[o] {
						t.Fatalf("record %d: verdict %d, done %v", o, v, done[o])
					}
					if v == deliver {
						flying = append(flying, o)
					}
				}
			}
			for _, o := range inLog {
				if o < tr.base && !done[o] {
					t.Fatalf("committed %d and record %d is not done", tr.base, o)
				}
			}
			if tr.inFlight != len(flying) {
				t.Fatalf("%d in flight, want %d", tr.inFlight, len(flying))
			}
		}
	}
}

func FuzzParsePosition(f *testing.F) {
	f.Add(int64(5), "shove1 2 7 BQ")
	f.Add(int64(0), "shove1 0 0")
	f.Add(int64(9), "member-1")
	f.Add(int64(1), "shove1 1 1 "+strings.Repeat("/", 4000))
	f.Fuzz(func(t *testing.T, offset int64, metadata string) {
		if offset < 0 || offset > 1<<60 {
			return
		}
		p := parsePosition(offset, metadata)
		if p.next != offset || p.inFlight < 0 || p.seen < offset && p.seen >= 0 && offset < 1<<61 && metadata == "" {
			t.Fatalf("%+v", p)
		}
		ready, inFlight := p.backlog(0, offset+100)
		if ready < 0 || inFlight < 0 || ready+inFlight > 100 {
			t.Fatalf("%d ready and %d in flight of 100", ready, inFlight)
		}
		newTracker(p).position()
	})
}

func TestPositionBacklog(t *testing.T) {
	for name, tc := range map[string]struct {
		pos             position
		start, end      int64
		ready, inFlight int64
	}{
		"all done":               {position{next: 10, seen: 10}, 0, 10, 0, 0},
		"beyond the end":         {position{next: 12, seen: 12}, 0, 10, 0, 0},
		"some left":              {position{next: 4, seen: 4}, 0, 10, 6, 0},
		"some in flight":         {position{next: 4, inFlight: 2, seen: 6}, 0, 10, 4, 2},
		"some done beyond":       {position{next: 4, inFlight: 1, seen: 7, done: []uint64{6}}, 0, 10, 3, 1},
		"cut off by retention":   {position{next: 4, inFlight: 1, seen: 7, done: []uint64{6}}, 6, 10, 2, 1},
		"all cut off":            {position{next: 4, inFlight: 3, seen: 7}, 10, 10, 0, 0},
		"more in flight than is": {position{next: 4, inFlight: 9, seen: 13}, 0, 6, 0, 2},
	} {
		t.Run(name, func(t *testing.T) {
			ready, inFlight := tc.pos.backlog(tc.start, tc.end)
			if ready != tc.ready || inFlight != tc.inFlight {
				t.Errorf("%d ready and %d in flight, want %d and %d", ready, inFlight, tc.ready, tc.inFlight)
			}
		})
	}
}
