package topology

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// derive derives or fails the test.
func derive(t testing.TB, s Spec) Topology {
	t.Helper()
	top, err := Derive(s)
	if err != nil {
		t.Fatalf("Derive(%+v): %v", s, err)
	}
	return top
}

func TestDerive(t *testing.T) {
	t.Run("B1_names_of_an_unordered_topology", func(t *testing.T) {
		got := derive(t, Spec{
			Queue:      "shop.orders",
			Holds:      []time.Duration{250 * time.Millisecond, time.Second, 1500 * time.Millisecond, 2 * time.Minute},
			DeadLetter: true,
		})
		want := Topology{
			Queue:  "shop.orders",
			Source: "shop.orders",
			Holds: []Hold{
				{"shop.orders-hold-250ms", 250 * time.Millisecond},
				{"shop.orders-hold-1s", time.Second},
				{"shop.orders-hold-1500ms", 1500 * time.Millisecond},
				{"shop.orders-hold-120s", 2 * time.Minute},
			},
			DeadLetter: "shop.orders-dlq",
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("B1_dead_letter_name_given_verbatim", func(t *testing.T) {
		got := derive(t, Spec{Queue: "orders", DeadLetter: true, DeadLetterQueue: "My_dead.orders"})
		if got.DeadLetter != "My_dead.orders" {
			t.Errorf("dead-letter queue = %q", got.DeadLetter)
		}
	})
	t.Run("B1_names_of_an_ordered_topology", func(t *testing.T) {
		got := derive(t, Spec{
			Queue: "q", Holds: []time.Duration{5 * time.Second}, DeadLetter: true,
			Sequenced: &SequencedSpec{OnFailure: FailAll, OnDefer: DeferHold, Shards: 2, Key: "id", MaxPendingPerKey: 7},
		})
		want := &Sequenced{
			OnFailure: FailAll, OnDefer: DeferHold, Key: "id", MaxPendingPerKey: 7, Exchange: "q-seq-hash",
			Shards: []Shard{
				{Queue: "q-seq-0", State: "q-seq-0-state", Holds: []Hold{{"q-seq-0-hold-5s", 5 * time.Second}}},
				{Queue: "q-seq-1", State: "q-seq-1-state", Holds: []Hold{{"q-seq-1-hold-5s", 5 * time.Second}}},
			},
		}
		if diff := cmp.Diff(want, got.Sequenced); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("defaults_of_an_ordered_topology", func(t *testing.T) {
		got := derive(t, Spec{Queue: "q", Sequenced: &SequencedSpec{AllowMessageLoss: true}}).Sequenced
		want := &Sequenced{OnFailure: Skip, OnDefer: DeferRetry, MaxPendingPerKey: 1000, Exchange: "q-seq-hash", Shards: got.Shards}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
		if len(got.Shards) != 8 {
			t.Errorf("%d shards, want 8", len(got.Shards))
		}
	})
	t.Run("B2_tiers_keep_their_order", func(t *testing.T) {
		want := []time.Duration{time.Second, 5 * time.Second, 30 * time.Second}
		if diff := cmp.Diff(want, derive(t, Spec{Queue: "q", Holds: want}).Delays()); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("source_of_a_fan_out", func(t *testing.T) {
		if got := derive(t, Spec{Queue: "q", Source: "log"}); got.Source != "log" || got.Queue != "q" {
			t.Errorf("source %q, queue %q", got.Source, got.Queue)
		}
	})
}

func TestDeriveRefuses(t *testing.T) {
	long := strings.Repeat("x", MaxQueueLength+1)
	var many []time.Duration
	for i := range MaxHolds + 1 {
		many = append(many, time.Duration(i+1)*time.Second)
	}
	held := []time.Duration{time.Second}
	tests := map[string]struct {
		spec   Spec
		fields []string
	}{
		"B1_no_name":                {Spec{}, []string{"queue"}},
		"B1_space":                  {Spec{Queue: "a b"}, []string{"queue"}},
		"B1_slash":                  {Spec{Queue: "a/b"}, []string{"queue"}},
		"B1_leading_dot":            {Spec{Queue: ".a"}, []string{"queue"}},
		"B1_trailing_dash":          {Spec{Queue: "a-"}, []string{"queue"}},
		"B1_tilde":                  {Spec{Queue: "a~b"}, []string{"queue"}},
		"B1_braces":                 {Spec{Queue: "{a}"}, []string{"queue"}},
		"B1_newline":                {Spec{Queue: "a\n"}, []string{"queue"}},
		"B1_too_long":               {Spec{Queue: long}, []string{"queue"}},
		"B1_source":                 {Spec{Queue: "q", Source: "a b"}, []string{"source"}},
		"B1_dead_letter_name":       {Spec{Queue: "q", DeadLetter: true, DeadLetterQueue: "a b"}, []string{"deadLetter.queue"}},
		"B1_dead_letter_not_asked":  {Spec{Queue: "q", DeadLetterQueue: "dead"}, []string{"deadLetter"}},
		"B1_dead_letter_is_main":    {Spec{Queue: "q", DeadLetter: true, DeadLetterQueue: "q"}, []string{"deadLetter.queue"}},
		"B1_dead_letter_is_a_hold":  {Spec{Queue: "q", Holds: held, DeadLetter: true, DeadLetterQueue: "q-hold-1s"}, []string{"deadLetter.queue"}},
		"B2_descending":             {Spec{Queue: "q", Holds: []time.Duration{2 * time.Second, time.Second}}, []string{"holdQueues[1].delay"}},
		"B2_duplicate":              {Spec{Queue: "q", Holds: []time.Duration{time.Second, time.Second}}, []string{"holdQueues[1].delay"}},
		"B2_zero":                   {Spec{Queue: "q", Holds: []time.Duration{0}}, []string{"holdQueues[0].delay"}},
		"B2_negative":               {Spec{Queue: "q", Holds: []time.Duration{-time.Second}}, []string{"holdQueues[0].delay"}},
		"B2_fraction_of_a_ms":       {Spec{Queue: "q", Holds: []time.Duration{time.Microsecond}}, []string{"holdQueues[0].delay"}},
		"B2_seventeen_tiers":        {Spec{Queue: "q", Holds: many}, []string{"holdQueues"}},
		"every_problem_is_reported": {Spec{Queue: "", Holds: []time.Duration{0, -1}}, []string{"queue", "holdQueues[0].delay", "holdQueues[1].delay"}},
		"sequenced_without_hold":    {Spec{Queue: "q", DeadLetter: true, Sequenced: &SequencedSpec{}}, []string{"sequenced"}},
		"sequenced_without_dlq":     {Spec{Queue: "q", Holds: held, Sequenced: &SequencedSpec{}}, []string{"sequenced"}},
		"sequenced_on_failure":      {Spec{Queue: "q", Holds: held, DeadLetter: true, Sequenced: &SequencedSpec{OnFailure: "Stop"}}, []string{"sequenced.onFailure"}},
		"sequenced_on_defer":        {Spec{Queue: "q", Holds: held, DeadLetter: true, Sequenced: &SequencedSpec{OnDefer: "Stop"}}, []string{"sequenced.onDefer"}},
		"sequenced_shards_negative": {Spec{Queue: "q", Holds: held, DeadLetter: true, Sequenced: &SequencedSpec{Shards: -1}}, []string{"sequenced.shards"}},
		"sequenced_shards_huge":     {Spec{Queue: "q", Holds: held, DeadLetter: true, Sequenced: &SequencedSpec{Shards: 1 << 30}}, []string{"sequenced.shards"}},
		"sequenced_pending":         {Spec{Queue: "q", Holds: held, DeadLetter: true, Sequenced: &SequencedSpec{MaxPendingPerKey: -1}}, []string{"sequenced.maxPendingPerKey"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := Derive(tc.spec)
			if diff := cmp.Diff(tc.fields, fields(err)); diff != "" {
				t.Errorf("refused fields (-want +got):\n%s\nerror: %v", diff, err)
			}
			if diff := cmp.Diff(Topology{}, got); diff != "" {
				t.Errorf("a refused spec gave a topology: %s", diff)
			}
		})
	}
}

// fields lists the fields of a joined error of Derive.
func fields(err error) []string {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return nil
	}
	var names []string
	for _, e := range joined.Unwrap() {
		var f *FieldError
		if errors.As(e, &f) {
			names = append(names, f.Field)
		} else {
			names = append(names, fmt.Sprintf("not a FieldError: %v", e))
		}
	}
	return names
}

func TestQueuesListsTargetsBeforeHolds(t *testing.T) {
	top := derive(t, Spec{Queue: "q", Holds: []time.Duration{time.Second}, DeadLetter: true, Sequenced: &SequencedSpec{Shards: 1}})
	want := []Queue{
		{Name: "q-dlq", Role: RoleDeadLetter},
		{Name: "q", Role: RoleMain},
		{Name: "q-seq-0", Role: RoleShard},
		{Name: "q-seq-0-state", Role: RoleState},
		{Name: "q-seq-0-hold-1s", Role: RoleHold, Delay: time.Second},
		{Name: "q-hold-1s", Role: RoleHold, Delay: time.Second},
	}
	if diff := cmp.Diff(want, top.Queues()); diff != "" {
		t.Error(diff)
	}
}

func TestWarnings(t *testing.T) {
	held := []time.Duration{time.Second}
	tests := map[string]struct {
		spec Spec
		want []Warning
	}{
		"B6_holds_only":       {Spec{Queue: "q", Holds: held}, []Warning{WarnHoldWithoutDeadLetter}},
		"B6_dead_letter_only": {Spec{Queue: "q", DeadLetter: true}, []Warning{WarnDeadLetterWithoutHold}},
		"B6_both":             {Spec{Queue: "q", Holds: held, DeadLetter: true}, nil},
		"B6_neither_is_meant": {Spec{Queue: "q"}, nil},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got := derive(t, tc.spec).Warnings()
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
			for _, w := range got {
				if w.Text() == string(w) {
					t.Errorf("%q has no sentence", w)
				}
			}
		})
	}
	if WarnHoldWithoutDeadLetter.Text() == WarnDeadLetterWithoutHold.Text() {
		t.Error("the two warnings say the same")
	}
}
