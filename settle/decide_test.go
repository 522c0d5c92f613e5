package settle

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const s = time.Second

// tiered is the policy of the worked example: 5, 30 and 120 s, ten retries, a dead-letter queue.
func tiered(change ...func(*Policy)) Policy {
	p := Policy{Holds: []time.Duration{5 * s, 30 * s, 120 * s}, DeadLetter: true, MaxRetries: 10}
	for _, c := range change {
		c(&p)
	}
	return p
}

func noHolds(p *Policy)      { p.Holds = nil }
func noDeadLetter(p *Policy) { p.DeadLetter = false }
func inPlaceOnly(p *Policy)  { p.Strategy = InPlace }
func sequenced(p *Policy)    { p.Sequenced = true }
func failAll(p *Policy)      { p.Sequenced, p.FailAll = true, true }
func holdDeferred(p *Policy) { p.Sequenced, p.HoldDeferred = true, true }
func noRetries(p *Policy)    { p.MaxRetries = 0 }

func TestDecide(t *testing.T) {
	later := time.Date(2031, 1, 2, 3, 4, 5, 0, time.UTC)
	tests := map[string]struct {
		outcome Outcome
		message Message
		policy  Policy
		want    Action
	}{
		"A2_ack":                        {Ack, Message{Retries: 3}, tiered(), Action{Kind: Done}},
		"A2_ack_without_anything":       {Ack, Message{}, Policy{}, Action{Kind: Done}},
		"A3_reject":                     {Reject, Message{}, tiered(), Action{Kind: DeadLetter, Reason: Rejected}},
		"A3_reject_whatever_the_count":  {Reject.Because("bad"), Message{Retries: 99, Defers: 4}, tiered(), Action{Kind: DeadLetter, Retries: 99, Defers: 4, Reason: Rejected, Text: "bad"}},
		"A3_reject_without_dead_letter": {Reject, Message{Retries: 2}, tiered(noDeadLetter), Action{Kind: Drop, Retries: 2, Reason: Rejected}},
		"A4_B3_count_0":                 {Retry, Message{}, tiered(), Action{Kind: Hold, Tier: 0, Delay: 5 * s, Retries: 1}},
		"A4_B3_count_1":                 {Retry, Message{Retries: 1}, tiered(), Action{Kind: Hold, Tier: 1, Delay: 30 * s, Retries: 2}},
		"A4_B3_count_2":                 {Retry, Message{Retries: 2}, tiered(), Action{Kind: Hold, Tier: 2, Delay: 120 * s, Retries: 3}},
		"A4_B3_clamps_to_the_last_tier": {Retry, Message{Retries: 9}, tiered(), Action{Kind: Hold, Tier: 2, Delay: 120 * s, Retries: 10}},
		"A4_keeps_the_defer_count":      {Retry, Message{Retries: 1, Defers: 7}, tiered(), Action{Kind: Hold, Tier: 1, Delay: 30 * s, Retries: 2, Defers: 7}},
		"A5_at_the_budget":              {Retry.Because("why"), Message{Retries: 10}, tiered(), Action{Kind: DeadLetter, Retries: 10, Reason: MaxRetriesExceeded, Text: "why"}},
		"A5_over_the_budget":            {Retry, Message{Retries: 4_000_000_000}, tiered(), Action{Kind: DeadLetter, Retries: 4_000_000_000, Reason: MaxRetriesExceeded}},
		"A5_without_dead_letter":        {Retry, Message{Retries: 10}, tiered(noDeadLetter), Action{Kind: Drop, Retries: 10, Reason: MaxRetriesExceeded}},
		"A6_D1_defer":                   {Defer, Message{Retries: 2}, tiered(), Action{Kind: Hold, Tier: 0, Delay: 5 * s, Retries: 2, Defers: 1}},
		"A6_D1_defer_at_the_budget":     {Defer, Message{Retries: 10, Defers: 5}, tiered(), Action{Kind: Hold, Tier: 0, Delay: 5 * s, Retries: 10, Defers: 6}},
		"A6_D1_defer_over_the_budget":   {Defer, Message{Retries: 12}, tiered(), Action{Kind: Hold, Tier: 0, Delay: 5 * s, Retries: 12, Defers: 1}},
		"C3_max_0_retry_dead_letters":   {Retry, Message{}, tiered(noRetries), Action{Kind: DeadLetter, Reason: MaxRetriesExceeded}},
		"C3_max_0_defer_still_defers":   {Defer, Message{}, tiered(noRetries), Action{Kind: Hold, Delay: 5 * s, Defers: 1}},
		"C2_last_call_acks":             {Ack, Message{Retries: 10}, tiered(), Action{Kind: Done}},
		"C2_last_call_rejects":          {Reject, Message{Retries: 10}, tiered(), Action{Kind: DeadLetter, Retries: 10, Reason: Rejected}},
		"C2_last_call_defers":           {Defer, Message{Retries: 10}, tiered(), Action{Kind: Hold, Delay: 5 * s, Retries: 10, Defers: 1}},
		"C7_retry_without_hold":         {Retry, Message{Retries: 3}, tiered(noHolds), Action{Kind: Copy, Retries: 4, Warning: RetryWithoutHold}},
		"C7_in_place_waits_instead":     {Retry, Message{Retries: 3}, tiered(noHolds, inPlaceOnly), Action{Kind: WaitInPlace, Retries: 4, Warning: RetryWithoutHold}},
		"C7_sequenced_waits_instead":    {Retry, Message{Retries: 3}, tiered(noHolds, sequenced), Action{Kind: WaitInPlace, Retries: 4, Warning: RetryWithoutHold}},
		"C7_ends_in_the_dead_letters":   {Retry, Message{Retries: 10}, tiered(noHolds), Action{Kind: DeadLetter, Retries: 10, Reason: MaxRetriesExceeded}},
		"D2_defer_without_hold":         {Defer, Message{Retries: 1}, tiered(noHolds), Action{Kind: Copy, Delay: s, Retries: 1, Defers: 1, Warning: DeferWithoutHold}},
		"D2_in_place":                   {Defer, Message{Retries: 1}, tiered(noHolds, inPlaceOnly), Action{Kind: WaitInPlace, Delay: s, Retries: 1, Defers: 1, Warning: DeferWithoutHold}},
		"D4_defer_on_sequenced_retries": {Defer, Message{Retries: 1}, tiered(sequenced), Action{Kind: WaitInPlace, Delay: 30 * s, Retries: 2, Warning: DeferOnSequenced}},
		"D4_defer_on_sequenced_ends":    {Defer, Message{Retries: 10}, tiered(sequenced), Action{Kind: DeadLetter, Retries: 10, Reason: MaxRetriesExceeded, Warning: DeferOnSequenced}},
		"D4_defer_on_sequenced_holds":   {Defer, Message{Retries: 1}, tiered(holdDeferred), Action{Kind: WaitInPlace, Delay: 5 * s, Retries: 1, Defers: 1}},
		"J2_in_place_writes_no_copy":    {Retry, Message{Retries: 1}, tiered(inPlaceOnly), Action{Kind: WaitInPlace, Delay: 30 * s, Retries: 2}},
		"J2_in_place_defer":             {Defer, Message{Retries: 1}, tiered(inPlaceOnly), Action{Kind: WaitInPlace, Delay: 5 * s, Retries: 1, Defers: 1}},
		"J2_in_place_reject_still_dies": {Reject, Message{}, tiered(inPlaceOnly), Action{Kind: DeadLetter, Reason: Rejected}},
		"K3_skip_dead_letters_one":      {Reject, Message{}, tiered(sequenced), Action{Kind: DeadLetter, Reason: Rejected}},
		"K3_skip_exhausted":             {Retry, Message{Retries: 10}, tiered(sequenced), Action{Kind: DeadLetter, Retries: 10, Reason: MaxRetriesExceeded}},
		"K4_fail_all_rejected":          {Reject, Message{}, tiered(failAll), Action{Kind: DeadLetter, Reason: Rejected, FailKey: true}},
		"K4_fail_all_exhausted":         {Retry, Message{Retries: 10}, tiered(failAll), Action{Kind: DeadLetter, Retries: 10, Reason: MaxRetriesExceeded, FailKey: true}},
		"K4_fail_all_undecodable":       {Poison(Deserialize, "x"), Message{}, tiered(failAll), Action{Kind: DeadLetter, Reason: Deserialize, Text: "x", FailKey: true}},
		"K4_fail_all_oversize":          {Poison(Oversize, "x"), Message{}, tiered(failAll), Action{Kind: DeadLetter, Reason: Oversize, Text: "x", FailKey: true}},
		"K4_a_follower_fails_no_more":   {Poison(SequenceFailed, ""), Message{}, tiered(failAll), Action{Kind: DeadLetter, Reason: SequenceFailed}},
		"K4_a_retry_fails_nothing":      {Retry, Message{}, tiered(failAll), Action{Kind: WaitInPlace, Delay: 5 * s, Retries: 1}},
		"G1_undecodable":                {Poison(Deserialize, "x"), Message{Retries: 2}, tiered(), Action{Kind: DeadLetter, Retries: 2, Reason: Deserialize, Text: "x"}},
		"F1_undecodable_is_dropped":     {Poison(Deserialize, "x"), Message{}, tiered(noDeadLetter), Action{Kind: Drop, Reason: Deserialize, Text: "x"}},
		"N1_release":                    {Release, Message{Retries: 2, Defers: 3}, tiered(), Action{Kind: GiveBack, Retries: 2, Defers: 3}},
		"unset_is_retry_with_a_warning": {Outcome{}, Message{}, tiered(), Action{Kind: Hold, Delay: 5 * s, Retries: 1, Warning: OutcomeUnset}},
		"unknown_verdict_is_retry":      {Outcome{Verdict: 200}, Message{}, tiered(), Action{Kind: Hold, Delay: 5 * s, Retries: 1}},

		"D1_not_before_below_the_tiers":  {Defer.Until(later), Message{Wait: s}, tiered(), Action{Kind: Hold, Tier: 0, Delay: 5 * s, Defers: 1, NotBefore: later}},
		"D1_not_before_between":          {Defer.Until(later), Message{Wait: 31 * s}, tiered(), Action{Kind: Hold, Tier: 1, Delay: 30 * s, Defers: 1, NotBefore: later}},
		"D1_not_before_exactly_a_tier":   {Defer.Until(later), Message{Wait: 120 * s}, tiered(), Action{Kind: Hold, Tier: 2, Delay: 120 * s, Defers: 1, NotBefore: later}},
		"D1_not_before_just_below_it":    {Defer.Until(later), Message{Wait: 120*s - 1}, tiered(), Action{Kind: Hold, Tier: 1, Delay: 30 * s, Defers: 1, NotBefore: later}},
		"D1_not_before_far_away":         {Defer.Until(later), Message{Wait: 1000 * time.Hour}, tiered(), Action{Kind: Hold, Tier: 2, Delay: 120 * s, Defers: 1, NotBefore: later}},
		"D1_not_before_in_the_past":      {Defer.Until(later), Message{Wait: -s}, tiered(), Action{Kind: Hold, Tier: 0, Delay: 5 * s, Defers: 1, NotBefore: later}},
		"D1_early_again_counts_no_defer": {Early(later), Message{Wait: 40 * s, Defers: 1, Retries: 2}, tiered(), Action{Kind: Hold, Tier: 1, Delay: 30 * s, Retries: 2, Defers: 1, NotBefore: later}},

		"D5_below_the_limit":        {Defer, Message{Defers: 2}, tiered(func(p *Policy) { p.MaxDefers = 3 }), Action{Kind: Hold, Delay: 5 * s, Defers: 3}},
		"D5_at_the_limit":           {Defer.Because("not yet"), Message{Defers: 3}, tiered(func(p *Policy) { p.MaxDefers = 3 }), Action{Kind: DeadLetter, Defers: 3, Reason: DeferLimitExceeded, Text: "not yet"}},
		"D5_below_the_age":          {Defer, Message{Age: time.Hour - 1}, tiered(func(p *Policy) { p.MaxDeferAge = time.Hour }), Action{Kind: Hold, Delay: 5 * s, Defers: 1}},
		"D5_at_the_age":             {Defer, Message{Age: time.Hour}, tiered(func(p *Policy) { p.MaxDeferAge = time.Hour }), Action{Kind: DeadLetter, Reason: DeferLimitExceeded}},
		"D5_early_at_the_age":       {Early(later), Message{Age: time.Hour, Wait: s}, tiered(func(p *Policy) { p.MaxDeferAge = time.Hour }), Action{Kind: DeadLetter, Reason: DeferLimitExceeded}},
		"D5_early_at_the_number":    {Early(later), Message{Defers: 3, Wait: s}, tiered(func(p *Policy) { p.MaxDefers = 3 }), Action{Kind: Hold, Delay: 5 * s, Defers: 3, NotBefore: later}},
		"D5_retry_is_not_bounded":   {Retry, Message{Defers: 9, Age: 2 * time.Hour}, tiered(func(p *Policy) { p.MaxDefers, p.MaxDeferAge = 3, time.Hour }), Action{Kind: Hold, Delay: 5 * s, Retries: 1, Defers: 9}},
		"D5_without_dead_letter":    {Defer, Message{Defers: 3}, tiered(noDeadLetter, func(p *Policy) { p.MaxDefers = 3 }), Action{Kind: Drop, Defers: 3, Reason: DeferLimitExceeded}},
		"D5_off_by_default":         {Defer, Message{Defers: 4_000_000, Age: 10000 * time.Hour}, tiered(), Action{Kind: Hold, Delay: 5 * s, Defers: 4_000_001}},
		"D5_bounds_on_ordered_hold": {Defer, Message{Defers: 3}, tiered(holdDeferred, func(p *Policy) { p.MaxDefers = 3 }), Action{Kind: DeadLetter, Defers: 3, Reason: DeferLimitExceeded}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, Decide(tc.outcome, tc.message, tc.policy)); diff != "" {
				t.Errorf("Decide(%s, %+v, %+v) (-want +got):\n%s", tc.outcome.Verdict, tc.message, tc.policy, diff)
			}
		})
	}
}

func TestAdmit(t *testing.T) {
	later := time.Date(2031, 1, 2, 3, 4, 5, 0, time.UTC)
	limited := Policy{CrashLimit: 20}
	tests := map[string]struct {
		message Message
		policy  Policy
		verdict Verdict
		cause   Reason
	}{
		"C4_over_the_budget_gets_a_call":  {Message{Retries: 400}, Policy{MaxRetries: 10}, VerdictUnset, ""},
		"C10_below_the_limit":             {Message{Crashes: 19}, limited, VerdictUnset, ""},
		"C10_at_the_limit":                {Message{Crashes: 20}, limited, VerdictPoison, CrashLoop},
		"C10_switched_off":                {Message{Crashes: 4_000_000}, Policy{}, VerdictUnset, ""},
		"D1_early":                        {Message{Wait: 1}, limited, VerdictEarly, ""},
		"D1_due":                          {Message{Wait: 0}, limited, VerdictUnset, ""},
		"C10_goes_before_being_too_early": {Message{Wait: 1, Crashes: 20}, limited, VerdictPoison, CrashLoop},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			o, ok := Admit(tc.message, later, tc.policy)
			if ok != (tc.verdict == VerdictUnset) || o.Verdict != tc.verdict || o.Cause != tc.cause {
				t.Errorf("Admit = %+v, %v; want %s %q", o, ok, tc.verdict, tc.cause)
			}
			if o.Verdict == VerdictEarly && !o.NotBefore.Equal(later) {
				t.Errorf("not-before time lost: %v", o.NotBefore)
			}
		})
	}
	t.Run("C10_suspects_run_alone", func(t *testing.T) {
		for crashes, want := range []bool{false, false, true, true} {
			if got := limited.Suspect(Message{Crashes: uint32(crashes)}); got != want {
				t.Errorf("Suspect after %d crashes = %v", crashes, got)
			}
		}
		if (Policy{}).Suspect(Message{Crashes: 9}) {
			t.Error("a suspect although the limit is off")
		}
	})
}

func TestFromError(t *testing.T) {
	boom := errors.New("boom")
	later := time.Now().Add(time.Hour)
	tests := map[string]struct {
		err  error
		want Outcome
	}{
		"A1_nil_acks":           {nil, Ack},
		"A1_plain_error_is":     {boom, Retry.Because("boom")},
		"A1_reject":             {Reject.Err(boom), Reject.Because("boom")},
		"A1_reject_wrapped":     {fmt.Errorf("outer: %w", Reject.Err(boom)), Reject.Because("boom")},
		"A1_own_reason_wins":    {Defer.Because("closed").Err(boom), Defer.Because("closed")},
		"A1_defer_until":        {Defer.Until(later).Err(nil), Defer.Until(later)},
		"A1_ack_as_an_error":    {Ack.Err(boom), Ack.Because("boom")},
		"A1_joined_with_others": {errors.Join(boom, Reject.Err(nil)), Reject},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, FromError(tc.err)); diff != "" {
				t.Error(diff)
			}
		})
	}
	if !errors.Is(Retry.Err(boom), boom) {
		t.Error("the cause is not in the chain")
	}
	if got := Reject.Err(nil).Error(); got != "reject" {
		t.Errorf("text = %q", got)
	}
}

func TestTexts(t *testing.T) {
	for k := Done; k <= GiveBack; k++ {
		if k.String() == "none" {
			t.Errorf("kind %d has no name", k)
		}
	}
	for v := VerdictAck; v <= VerdictRelease; v++ {
		if v.String() == "unset" {
			t.Errorf("verdict %d has no name", v)
		}
	}
	for w := RetryWithoutHold; w <= OutcomeUnset; w++ {
		if w.String() == "" {
			t.Errorf("warning %d has no text", w)
		}
	}
	if Kind(0).String() != "none" || Verdict(99).String() != "unset" || NoWarning.String() != "" {
		t.Error("an unknown value has a name")
	}
	for k := range GiveBack + 1 {
		if want := k == Hold || k == Copy || k == DeadLetter; k.Copies() != want {
			t.Errorf("%s copies: %v", k, k.Copies())
		}
	}
}
