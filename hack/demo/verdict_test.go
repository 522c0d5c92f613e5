package main

import (
	"testing"
	"time"

	"github.com/shove-dev/shove/hack/demo/ledger"
	"github.com/shove-dev/shove/settle"
)

func ptr(n int) *int { return &n }

// good is the end of a run in which everything was seen: 20 messages, 16 acknowledged, 4 dead; 12 copies to tiers.
func good() (state, ledger.Balance) {
	s := state{
		ready: time.Now(), names: ledger.Queues{Main: "q", Holds: []string{"q-hold-1s", "q-hold-3s"}, DeadLetter: "q-dlq"},
		counts: ledger.Counts{
			Published: 20, Delivered: 32, Retried: []int{6, 4}, RetriedBy: map[ledger.Cause]int{ledger.CauseError: 8, ledger.CauseTimeout: 1, ledger.CausePanic: 1},
			Deferred: 2, Returned: 12, Dead: map[settle.Reason]int{settle.Rejected: 3, settle.MaxRetriesExceeded: 1}, Drained: 4,
		},
		queues: map[string]queueState{},
	}
	for _, name := range objectNames {
		s.objects = append(s.objects, objectState{Name: name, Ready: true})
	}
	for _, name := range s.all() {
		q := queueState{Name: name, Ready: ptr(0), Unacked: ptr(0)}
		switch name {
		case "q":
			q.Stats.Ack = 32
		case "q-hold-1s":
			q.Stats.Publish = 8
		case "q-hold-3s":
			q.Stats.Publish = 4
		case "q-dlq":
			q.Stats.Publish, q.Stats.Ack = 4, 4
		}
		s.queues[name] = q
	}
	return s, ledger.Balance{Handled: 16, Drained: 4}
}

func TestVerdict(t *testing.T) {
	s, b := good()
	for _, c := range verdict(s, b, remaining(s)) {
		if !c.ok {
			t.Errorf("a good run lacks %q (%s)", c.what, c.how)
		}
	}
	set := func(s *state, name string, change func(*queueState)) {
		q := s.queues[name]
		change(&q)
		s.queues[name] = q
	}
	for name, spoil := range map[string]func(*state, *ledger.Balance){
		"an object is not ready":         func(s *state, _ *ledger.Balance) { s.objects[1].Ready = false },
		"an object is missing":           func(s *state, _ *ledger.Balance) { s.objects = s.objects[:2] },
		"a tier was not used":            func(s *state, _ *ledger.Balance) { s.counts.Retried[1] = 0 },
		"no panic":                       func(s *state, _ *ledger.Balance) { s.counts.RetriedBy[ledger.CausePanic] = 0 },
		"no timeout":                     func(s *state, _ *ledger.Balance) { s.counts.RetriedBy[ledger.CauseTimeout] = 0 },
		"nothing came back":              func(s *state, _ *ledger.Balance) { s.counts.Returned = 0 },
		"nothing deferred":               func(s *state, _ *ledger.Balance) { s.counts.Deferred = 0 },
		"nothing rejected":               func(s *state, _ *ledger.Balance) { delete(s.counts.Dead, settle.Rejected) },
		"nothing used up its retries":    func(s *state, _ *ledger.Balance) { delete(s.counts.Dead, settle.MaxRetriesExceeded) },
		"a dead letter is left":          func(s *state, b *ledger.Balance) { s.counts.Drained--; b.Drained--; b.Dead++ },
		"something is ready":             func(s *state, _ *ledger.Balance) { set(s, "q-hold-3s", func(q *queueState) { q.Ready = ptr(1) }) },
		"something is unacknowledged":    func(s *state, _ *ledger.Balance) { set(s, "q", func(q *queueState) { q.Unacked = ptr(1) }) },
		"a depth is unknown":             func(s *state, _ *ledger.Balance) { set(s, "q", func(q *queueState) { q.Unacked = nil }) },
		"a delivery is not acknowledged": func(s *state, _ *ledger.Balance) { set(s, "q", func(q *queueState) { q.Stats.Ack-- }) },
		"a message is lost":              func(s *state, b *ledger.Balance) { b.Handled--; b.Held++ },
		"a message was published unseen": func(s *state, _ *ledger.Balance) { s.counts.Published++ },
		"an ack too many": func(s *state, _ *ledger.Balance) {
			set(s, "q", func(q *queueState) { q.Stats.Ack++ })
		},
		"an event is strange": func(s *state, _ *ledger.Balance) { s.counts.Unknown++ },
	} {
		t.Run(name, func(t *testing.T) {
			s, b := good()
			spoil(&s, &b)
			if passed(verdict(s, b, remaining(s))) {
				t.Error("it passes all the same")
			}
		})
	}
}

func TestVerdictAllowsForDuplicates(t *testing.T) {
	s, b := good()
	q := s.queues["q"]
	q.Stats.Ack++
	s.queues["q"] = q
	s.counts.Redelivered = 1
	if !passed(verdict(s, b, remaining(s))) {
		t.Error("a message that was delivered and acknowledged twice fails the run")
	}
}

func TestClipCountsWhatIsSeen(t *testing.T) {
	for in, want := range map[string]string{"abcdef": "abc", bold + "abc" + plain: bold + "abc" + plain, bold + "abcd": bold + "abc", "äöüß": "äöü", "ab": "ab"} {
		if got := clip(in, 3); got != want {
			t.Errorf("clip(%q) = %q, want %q", in, got, want)
		}
	}
	if got := clip("abc", 0); got != "abc" {
		t.Errorf("without a width: %q", got)
	}
}

func TestDuration(t *testing.T) {
	for in, want := range map[string]time.Duration{"": 0, "60s": time.Minute, "5m": 5 * time.Minute} {
		if got, err := duration(in); err != nil || got != want {
			t.Errorf("duration(%q) = %v, %v; want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"60", "0s", "-1m", "soon"} {
		if d, err := duration(in); err == nil {
			t.Errorf("duration(%q) = %v, want an error", in, d)
		}
	}
}
