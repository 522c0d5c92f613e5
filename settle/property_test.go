package settle

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// journey is what happens to a message whose handler gives the outcomes that next says.
type journey struct {
	calls  int
	seen   []uint32 // the retry count at each call
	delays []time.Duration
	end    Action
}

// follow plays a message through Decide until it is settled for good, at most limit calls.
func follow(p Policy, m Message, limit int, next func(call int) Outcome) journey {
	var j journey
	for range limit {
		j.calls++
		j.seen = append(j.seen, m.Retries)
		a := Decide(next(j.calls), m, p)
		switch a.Kind {
		case Hold, WaitInPlace, Copy:
			j.delays = append(j.delays, a.Delay)
			m.Retries, m.Defers = a.Retries, a.Defers
		default:
			j.end = a
			return j
		}
	}
	return j
}

func always(o Outcome) func(int) Outcome { return func(int) Outcome { return o } }

func TestJourneys(t *testing.T) {
	t.Run("C1_worked_example", func(t *testing.T) {
		j := follow(tiered(), Message{}, 100, always(Retry))
		want := []time.Duration{5 * s, 30 * s}
		for range 8 {
			want = append(want, 120*s)
		}
		if j.calls != 11 || j.end.Kind != DeadLetter || j.end.Reason != MaxRetriesExceeded {
			t.Errorf("%d calls, end %+v", j.calls, j.end)
		}
		if diff := cmp.Diff(want, j.delays); diff != "" {
			t.Error(diff)
		}
		if last := j.seen[len(j.seen)-1]; last != 10 {
			t.Errorf("the last call saw count %d", last)
		}
	})
	t.Run("C3_max_0", func(t *testing.T) {
		if j := follow(tiered(noRetries), Message{}, 100, always(Retry)); j.calls != 1 || j.end.Kind != DeadLetter {
			t.Errorf("%+v", j)
		}
	})
	t.Run("C4_over_the_budget", func(t *testing.T) {
		if j := follow(tiered(), Message{Retries: 77}, 100, always(Retry)); j.calls != 1 || j.end.Reason != MaxRetriesExceeded {
			t.Errorf("%+v", j)
		}
	})
	t.Run("D3_retry_defer_retry", func(t *testing.T) {
		p := Policy{Holds: []time.Duration{5 * s, 30 * s}, DeadLetter: true, MaxRetries: 10}
		j := follow(p, Message{}, 100, func(call int) Outcome { return []Outcome{Retry, Defer, Retry, Ack}[call-1] })
		if diff := cmp.Diff([]time.Duration{5 * s, 5 * s, 30 * s}, j.delays); diff != "" {
			t.Error(diff)
		}
		if diff := cmp.Diff([]uint32{0, 1, 1, 2}, j.seen); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("D1_defer_never_ends_by_itself", func(t *testing.T) {
		j := follow(tiered(), Message{}, 5000, always(Defer))
		if j.end.Kind != 0 || j.seen[4999] != 0 {
			t.Errorf("ended with %+v, count %d", j.end, j.seen[len(j.seen)-1])
		}
	})
	t.Run("D5_defers_then_dies", func(t *testing.T) {
		j := follow(tiered(func(p *Policy) { p.MaxDefers = 100 }), Message{}, 5000, always(Defer))
		if j.calls != 101 || j.end.Reason != DeferLimitExceeded {
			t.Errorf("%d calls, end %+v", j.calls, j.end)
		}
	})
}

// policies generates any policy, messages any message with believable counts.
func policies() *rapid.Generator[Policy] {
	return rapid.Custom(func(t *rapid.T) Policy {
		p := Policy{
			DeadLetter:   rapid.Bool().Draw(t, "dead letter"),
			MaxRetries:   rapid.Uint32Range(0, 30).Draw(t, "max retries"),
			Strategy:     Strategy(rapid.IntRange(0, 1).Draw(t, "strategy")),
			Sequenced:    rapid.Bool().Draw(t, "sequenced"),
			HoldDeferred: rapid.Bool().Draw(t, "hold deferred"),
			FailAll:      rapid.Bool().Draw(t, "fail all"),
			MaxDefers:    rapid.Uint32Range(0, 3).Draw(t, "max defers"),
			MaxDeferAge:  time.Duration(rapid.IntRange(0, 2).Draw(t, "max age")) * time.Hour,
			CrashLimit:   rapid.Uint32Range(0, 5).Draw(t, "crash limit"),
		}
		var at time.Duration
		for range rapid.IntRange(0, 16).Draw(t, "tiers") {
			at += time.Duration(rapid.IntRange(1, 100_000).Draw(t, "step")) * time.Millisecond
			p.Holds = append(p.Holds, at)
		}
		return p
	})
}

func messages() *rapid.Generator[Message] {
	return rapid.Custom(func(t *rapid.T) Message {
		return Message{
			Retries: rapid.Uint32().Draw(t, "retries"),
			Defers:  rapid.Uint32Range(0, 1<<31).Draw(t, "defers"),
			Crashes: rapid.Uint32Range(0, 30).Draw(t, "crashes"),
			Age:     time.Duration(rapid.Int64().Draw(t, "age")),
			Wait:    time.Duration(rapid.Int64().Draw(t, "wait")),
		}
	})
}

func outcomes() *rapid.Generator[Outcome] {
	return rapid.Custom(func(t *rapid.T) Outcome {
		return Outcome{
			Verdict: Verdict(rapid.Uint8Range(0, 10).Draw(t, "verdict")),
			Text:    rapid.SampledFrom([]string{"", "why"}).Draw(t, "text"),
			Cause:   rapid.SampledFrom([]Reason{Deserialize, Oversize, CrashLoop, SequenceFailed}).Draw(t, "cause"),
		}
	})
}

func TestProperties(t *testing.T) {
	t.Run("C1_always_retry_ends_after_max_plus_one_calls", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			p := policies().Draw(t, "policy")
			start := rapid.Uint32Range(0, p.MaxRetries).Draw(t, "count at start")
			j := follow(p, Message{Retries: start}, 1000, always(Retry))
			if want := int(p.MaxRetries-start) + 1; j.calls != want {
				t.Fatalf("%d calls, want %d", j.calls, want)
			}
			want := DeadLetter
			if !p.DeadLetter {
				want = Drop
			}
			if j.end.Kind != want || j.end.Reason != MaxRetriesExceeded {
				t.Fatalf("end %+v", j.end)
			}
		})
	})
	t.Run("A7_same_inputs_same_action", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			o, m, p := outcomes().Draw(t, "outcome"), messages().Draw(t, "message"), policies().Draw(t, "policy")
			holds := append([]time.Duration(nil), p.Holds...)
			first := Decide(o, m, p)
			if second := Decide(o, m, p); first != second {
				t.Fatalf("%+v, then %+v", first, second)
			}
			if diff := cmp.Diff(holds, p.Holds); diff != "" {
				t.Fatalf("the policy was changed: %s", diff)
			}
		})
	})
	t.Run("A7_every_action_can_be_carried_out", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			check(t, outcomes().Draw(t, "outcome"), messages().Draw(t, "message"), policies().Draw(t, "policy"))
		})
	})
	t.Run("C6_only_retry_spends_budget", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			o, m, p := outcomes().Draw(t, "outcome"), messages().Draw(t, "message"), policies().Draw(t, "policy")
			a := Decide(o, m, p)
			retried := o.Verdict == VerdictRetry || o.Verdict == VerdictUnset || o.Verdict > VerdictPending ||
				o.Verdict == VerdictDefer && p.Sequenced && !p.HoldDeferred
			if !retried && o.Verdict != VerdictAck && a.Retries != m.Retries {
				t.Fatalf("%s changed the count from %d to %d", o.Verdict, m.Retries, a.Retries)
			}
		})
	})
}

// fataler is what *rapid.T and *testing.T have in common.
type fataler interface{ Fatalf(string, ...any) }

// check holds an action to what every backend may rely on.
func check(t fataler, o Outcome, m Message, p Policy) {
	a := Decide(o, m, p)
	switch a.Kind {
	case Hold:
		if a.Tier < 0 || a.Tier >= len(p.Holds) || a.Delay != p.Holds[a.Tier] {
			t.Fatalf("tier %d with delay %s of %v", a.Tier, a.Delay, p.Holds)
		}
	case DeadLetter, Drop:
		if a.Reason == "" || (a.Kind == DeadLetter) != p.DeadLetter {
			t.Fatalf("%+v with policy %+v", a, p)
		}
	case Copy, WaitInPlace, Done, GiveBack, Leave:
	default:
		t.Fatalf("kind %s", a.Kind)
	}
	if (a.Kind == Hold || a.Kind == Copy) && (p.Strategy == InPlace || p.Sequenced) {
		t.Fatalf("a copy although none may be written: %+v", a)
	}
	if a.Delay < 0 || a.Retries < m.Retries && a.Kind != Done {
		t.Fatalf("%+v for %+v", a, m)
	}
	if a.FailKey && !(p.Sequenced && p.FailAll && (a.Kind == DeadLetter || a.Kind == Drop)) {
		t.Fatalf("fails a key: %+v with %+v", a, p)
	}
}

// FuzzDecide searches for inputs that make an action which no backend could carry out.
func FuzzDecide(f *testing.F) {
	f.Add(uint8(2), uint32(3), uint32(0), int64(0), int64(0), uint32(10), int64(5), int64(30), uint8(1))
	f.Add(uint8(4), uint32(0), uint32(9), int64(1)<<62, int64(-1), uint32(0), int64(0), int64(0), uint8(255))
	f.Fuzz(func(t *testing.T, verdict uint8, retries, defers uint32, age, wait int64, most uint32, first, second int64, bits uint8) {
		p := Policy{
			DeadLetter: bits&1 != 0, Strategy: Strategy(bits >> 1 & 1), Sequenced: bits&4 != 0, HoldDeferred: bits&8 != 0,
			FailAll: bits&16 != 0, MaxRetries: most, CrashLimit: uint32(bits >> 5),
		}
		for _, d := range []int64{first, second} {
			if d > 0 {
				p.Holds = append(p.Holds, time.Duration(d))
			}
		}
		m := Message{Retries: retries, Defers: defers, Age: time.Duration(age), Wait: time.Duration(wait)}
		check(t, Outcome{Verdict: Verdict(verdict), Cause: Oversize}, m, p)
	})
}

func TestDecideAllocatesNothing(t *testing.T) {
	p := tiered()
	o := Retry.Because("why")
	m := Message{Retries: 1}
	if n := testing.AllocsPerRun(100, func() { sink = Decide(o, m, p) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

var sink Action

func BenchmarkDecide(b *testing.B) {
	p := tiered()
	for name, o := range map[string]Outcome{"ack": Ack, "retry": Retry, "defer": Defer, "reject": Reject} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				sink = Decide(o, Message{Retries: 1}, p)
			}
		})
	}
}
