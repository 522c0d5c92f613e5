package header

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/shove-dev/shove/settle"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestParse(t *testing.T) {
	at := time.UnixMilli(1_700_000_000_123)
	tests := map[string]struct {
		headers Map
		want    Facts
	}{
		"C5_missing_is_zero":              {Map{"other": "x"}, Facts{}},
		"C5_nil":                          {nil, Facts{}},
		"C5_int64":                        {Map{RetryCount: int64(7)}, Facts{Retries: 7}},
		"C5_int32":                        {Map{RetryCount: int32(7)}, Facts{Retries: 7}},
		"C5_uint8":                        {Map{RetryCount: uint8(7)}, Facts{Retries: 7}},
		"C5_decimal_text":                 {Map{RetryCount: "7"}, Facts{Retries: 7}},
		"C5_decimal_bytes":                {Map{RetryCount: []byte(" 7 ")}, Facts{Retries: 7}},
		"C5_W_reads_x_retry_count":        {Map{"x-retry-count": uint32(4)}, Facts{Retries: 4}},
		"C5_W_reads_shove_retry_count":    {Map{"Shove-Retry-Count": "4"}, Facts{Retries: 4}},
		"C5_ours_wins":                    {Map{RetryCount: int64(1), "x-retry-count": int64(9), "Shove-Retry-Count": "8"}, Facts{Retries: 1}},
		"C5_ours_wins_even_when_zero":     {Map{RetryCount: int64(0), "x-retry-count": int64(9)}, Facts{}},
		"C5_negative":                     {Map{RetryCount: int64(-1)}, Facts{Malformed: 1}},
		"C5_not_a_number":                 {Map{RetryCount: "many"}, Facts{Malformed: 1}},
		"C5_empty_text":                   {Map{RetryCount: ""}, Facts{Malformed: 1}},
		"C5_fraction":                     {Map{RetryCount: "1.5"}, Facts{Malformed: 1}},
		"C5_float":                        {Map{RetryCount: 1.5}, Facts{Malformed: 1}},
		"C5_bool":                         {Map{RetryCount: true}, Facts{Malformed: 1}},
		"C5_table":                        {Map{RetryCount: map[string]any{}}, Facts{Malformed: 1}},
		"C5_huge_text":                    {Map{RetryCount: strings.Repeat("9", 1000)}, Facts{Malformed: 1}},
		"C5_huge_uint64":                  {Map{RetryCount: ^uint64(0)}, Facts{Malformed: 1}},
		"C5_absurd":                       {Map{RetryCount: int64(1) << 40}, Facts{Malformed: 1}},
		"C5_malformed_ours_hides_theirs":  {Map{RetryCount: "x", "x-retry-count": int64(9)}, Facts{Malformed: 1}},
		"defer_count":                     {Map{DeferCount: int64(3)}, Facts{Defers: 3}},
		"C8_message_id":                   {Map{MessageID: "m"}, Facts{MessageID: "m"}},
		"C8_derived":                      {Map{MessageID: "m", IDDerived: "true"}, Facts{MessageID: "m", Derived: true}},
		"W_reads_shove_message_id":        {Map{"Shove-Message-Id": "m"}, Facts{MessageID: "m"}},
		"W_reads_nats_msg_id":             {Map{"Nats-Msg-Id": "m"}, Facts{MessageID: "m"}},
		"W_own_message_id_wins":           {Map{MessageID: "m", "Nats-Msg-Id": "n", "Shove-Message-Id": "o"}, Facts{MessageID: "m"}},
		"message_id_of_a_strange_type":    {Map{MessageID: 1.5}, Facts{Malformed: 1}},
		"D5_first_seen":                   {Map{FirstSeen: at.UnixMilli()}, Facts{FirstSeen: at}},
		"D1_not_before":                   {Map{NotBefore: fmt.Sprint(at.UnixMilli())}, Facts{NotBefore: at}},
		"D1_not_before_absurd":            {Map{NotBefore: int64(1) << 62}, Facts{Malformed: 1}},
		"D1_not_before_negative":          {Map{NotBefore: int64(-1)}, Facts{Malformed: 1}},
		"I4_history":                      {Map{History: "[]"}, Facts{History: "[]"}},
		"E3_W_death":                      {Map{DeathReason: "rejected", DeathDetail: "why", DeathCount: int64(2), OriginalQueue: "q", DiedAt: at.UnixMilli()}, Facts{Death: Death{Reason: settle.Rejected, Detail: "why", Count: 2, OriginalQueue: "q", DiedAt: at}}},
		"E3_W_death_of_the_original":      {Map{"x-death-reason": "rejected", "x-death-count": "2", "x-original-queue": "q"}, Facts{Death: Death{Reason: settle.Rejected, Count: 2, OriginalQueue: "q"}}},
		"E3_W_death_of_the_original_logs": {Map{"Shove-Death-Reason": "rejected", "Shove-Death-Count": "2", "Shove-Original-Queue": "q"}, Facts{Death: Death{Reason: settle.Rejected, Count: 2, OriginalQueue: "q"}}},
		"E6_delivery_id":                  {Map{DeliveryID: "d"}, Facts{DeliveryID: "d"}},
		"each_malformed_one_counts":       {Map{RetryCount: "x", DeferCount: -1, NotBefore: "y"}, Facts{Malformed: 3}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, Parse(tc.headers)); diff != "" {
				t.Errorf("Parse(%v) (-want +got):\n%s", tc.headers, diff)
			}
		})
	}
}

func TestKeepAndReserved(t *testing.T) {
	tests := map[string]struct {
		names          []string
		keep, reserved bool
	}{
		"C9_user_headers":                {[]string{"tenant", "X-Custom", "traceparent", "x-deathly", "dead", "Content-Language", "natsy"}, true, false},
		"C9_Q4_user_owned":               {[]string{"x-shove-user-id", "x-shove-key"}, true, true},
		"Q4_type_and_trace_are_the_apps": {[]string{"x-shove-type", "X-Shove-Type", "x-trace-id"}, true, false},
		"C9_Q4_native": {[]string{"CC", "BCC", "cc", "x-death", "X-Death", "x-first-death-reason", "x-last-death-queue",
			"x-delivery-count", "x-acquired-count", "Nats-Msg-Id", "Nats-Expected-Stream", "nats-schedule"}, false, true},
		"C9_Q4_ours": {[]string{"x-shove-retry-count", "X-Shove-Retry-Count", "x-shove-anything", "x-message-id"}, false, true},
		"C5_C9_Q4_theirs": {[]string{"x-retry-count", "Shove-Retry-Count", "Shove-Message-Id", "x-death-reason", "x-death-count",
			"x-original-queue", "Shove-Death-Reason", "Shove-Death-Count", "Shove-Original-Queue"}, false, true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			for _, n := range tc.names {
				if Keep(n) != tc.keep || Reserved(n) != tc.reserved {
					t.Errorf("%q: keep %v, reserved %v; want %v, %v", n, Keep(n), Reserved(n), tc.keep, tc.reserved)
				}
			}
		})
	}
}

func TestStamp(t *testing.T) {
	now := time.UnixMilli(1_700_000_000_123)
	first := now.Add(-time.Hour)
	facts := Facts{Retries: 2, MessageID: "m", FirstSeen: first, History: "[h]", Death: Death{Count: 1}}
	tests := map[string]struct {
		facts  Facts
		action settle.Action
		want   []Field
	}{
		"B4_C5_hold": {facts, settle.Action{Kind: settle.Hold, Retries: 3, Delay: 5 * time.Second}, []Field{
			{MessageID, "m"}, {RetryCount, int64(3)}, {FirstSeen, first.UnixMilli()}, {Due, now.Add(5 * time.Second).UnixMilli()}, {History, "[h]"}, {DeathCount, int64(1)},
		}},
		"D1_deferred_until": {Facts{MessageID: "m", Derived: true}, settle.Action{Kind: settle.Hold, Defers: 2, Delay: time.Second, NotBefore: first}, []Field{
			{MessageID, "m"}, {IDDerived, "true"}, {RetryCount, int64(0)}, {DeferCount, int64(2)}, {NotBefore, first.UnixMilli()}, {Due, now.Add(time.Second).UnixMilli()},
		}},
		"C7_copy": {Facts{}, settle.Action{Kind: settle.Copy, Retries: 1}, []Field{{RetryCount, int64(1)}}},
		"E3_E6_dead_letter": {facts, settle.Action{Kind: settle.DeadLetter, Retries: 2, Reason: settle.Rejected, Text: "why"}, []Field{
			{MessageID, "m"}, {RetryCount, int64(2)}, {FirstSeen, first.UnixMilli()}, {History, "[h]"},
			{DeathReason, "rejected"}, {OriginalQueue, "q"}, {DiedAt, now.UnixMilli()}, {DeathDetail, "why"}, {DeliveryID, "d"}, {DeathCount, int64(2)},
		}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, Stamp(nil, tc.facts, tc.action, "q", "d", now)); diff != "" {
				t.Error(diff)
			}
		})
	}
	t.Run("C9_detail_is_bounded", func(t *testing.T) {
		a := settle.Action{Kind: settle.DeadLetter, Text: strings.Repeat("ä", 5000)}
		for _, f := range Stamp(nil, Facts{}, a, "q", "d", now) {
			if s, ok := f.Value.(string); ok && (len(s) > 2<<10 || !utf8.ValidString(s)) {
				t.Errorf("%s has %d bytes, valid: %v", f.Name, len(s), utf8.ValidString(s))
			}
		}
	})
	t.Run("C9_drop_leaves_the_others", func(t *testing.T) {
		fields := []Field{{History, "h"}, {MessageID, "m"}}
		if diff := cmp.Diff([]Field{{MessageID, "m"}}, Drop(fields, History)); diff != "" {
			t.Error(diff)
		}
		if fields[0].Name != History {
			t.Error("Drop changed its argument")
		}
	})
	t.Run("C5_what_is_stamped_is_parsed", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			a := settle.Action{
				Kind:    rapid.SampledFrom([]settle.Kind{settle.Hold, settle.Copy, settle.DeadLetter}).Draw(t, "kind"),
				Retries: rapid.Uint32Range(0, 1<<31).Draw(t, "retries"),
				Defers:  rapid.Uint32Range(0, 1<<31).Draw(t, "defers"),
				Reason:  settle.Rejected,
			}
			f := Facts{MessageID: rapid.StringN(0, 40, -1).Draw(t, "id"), Death: Death{Count: rapid.Uint32Range(0, 1000).Draw(t, "deaths")}}
			for _, asText := range []bool{false, true} {
				h := Map{}
				for _, field := range Stamp(nil, f, a, "q", "d", now) {
					h[field.Name] = field.Value
					if asText {
						h[field.Name] = []byte(fmt.Sprint(field.Value))
					}
				}
				got := Parse(h)
				if got.Retries != a.Retries || got.Defers != a.Defers || got.MessageID != f.MessageID || got.Malformed != 0 {
					t.Fatalf("%+v from %v", got, h)
				}
				wantDeaths := f.Death.Count
				if a.Kind == settle.DeadLetter {
					wantDeaths++
				}
				if got.Death.Count != wantDeaths {
					t.Fatalf("deaths %d, want %d", got.Death.Count, wantDeaths)
				}
			}
		})
	})
}

func TestHistory(t *testing.T) {
	at := time.Date(2031, 1, 2, 3, 4, 5, 6_700_000, time.UTC)
	t.Run("I4_keeps_what_happened", func(t *testing.T) {
		h := AppendAttempt("", Attempt{At: at, Pod: "p", Outcome: "retry", Reason: "db down"})
		h = AppendAttempt(h, Attempt{At: at, Pod: "p", Outcome: "reject"})
		want := []Attempt{{At: at.Truncate(time.Millisecond), Pod: "p", Outcome: "retry", Reason: "db down"}, {At: at.Truncate(time.Millisecond), Pod: "p", Outcome: "reject"}}
		if diff := cmp.Diff(want, ParseHistory(h)); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("I4_at_most_16_newest_stay", func(t *testing.T) {
		h := ""
		for i := range 40 {
			h = AppendAttempt(h, Attempt{At: at, Outcome: fmt.Sprint(i)})
		}
		all := ParseHistory(h)
		if len(all) != 16 || all[0].Outcome != "24" || all[15].Outcome != "39" {
			t.Errorf("%d entries, from %q to %q", len(all), all[0].Outcome, all[len(all)-1].Outcome)
		}
	})
	t.Run("I4_unreadable_starts_anew", func(t *testing.T) {
		for _, bad := range []string{"x", `{"a":1}`, "[1]", "\xff", strings.Repeat("[", 100_000)} {
			if got := ParseHistory(AppendAttempt(bad, Attempt{At: at, Outcome: "ack"})); len(got) != 1 {
				t.Errorf("%.10q became %d entries", bad, len(got))
			}
		}
	})
	t.Run("I4_at_most_2_KiB_whatever_is_in_it", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			h := ""
			for range rapid.IntRange(1, 20).Draw(t, "entries") {
				text := rapid.SampledFrom([]string{"a", "\x00", "<&>", "ä", "\xff", `"`}).Draw(t, "text")
				h = AppendAttempt(h, Attempt{At: at, Pod: strings.Repeat(text, 300), Reason: strings.Repeat(text, 300), Outcome: "retry"})
				all := ParseHistory(h)
				if len(h) > 2<<10 || len(all) == 0 || all[len(all)-1].Outcome != "retry" {
					t.Fatalf("%d bytes, %d entries", len(h), len(all))
				}
			}
		})
	})
	t.Run("I4_a_huge_outcome_ends", func(t *testing.T) {
		if h := AppendAttempt("", Attempt{At: at, Outcome: strings.Repeat("o", 5000)}); len(h) > 2<<10 {
			t.Errorf("%d bytes", len(h))
		}
	})
	t.Run("I4_a_year_that_cannot_be_written", func(t *testing.T) {
		if h := AppendAttempt("", Attempt{At: time.Unix(1<<60, 0), Outcome: "ack"}); len(h) > 2<<10 {
			t.Errorf("%d bytes", len(h))
		}
	})
}

func TestText(t *testing.T) {
	h := Map{"s": "x", "b": []byte("y"), "i": int64(-3), "u": uint16(4), "f": 1.5}
	for name, want := range map[string]string{"s": "x", "b": "y", "i": "-3", "u": "4", "f": "", "none": ""} {
		got, ok := h.Text(name)
		if got != want || ok != (want != "") {
			t.Errorf("Text(%q) = %q, %v", name, got, ok)
		}
	}
	for text, want := range map[string]string{"": "", "abc": "abc", "abcdef": "abcd", "abcä": "abc", "日本": "日"} {
		if got := Clip(text, 4); got != want {
			t.Errorf("Clip(%q, 4) = %q", text, got)
		}
	}
}

// FuzzParse feeds headers that a broker could carry: Parse never panics, and believes no absurd count.
func FuzzParse(f *testing.F) {
	f.Add("x-shove-retry-count", "3", []byte("4"), int64(5), 0.5, uint8(0))
	f.Add("Shove-Retry-Count", "-1", []byte{0xff}, int64(-1)<<63, 1e300, uint8(3))
	f.Add("x-shove-not-before", "99999999999999999999", []byte(nil), int64(1)<<62, -1.0, uint8(2))
	f.Fuzz(func(t *testing.T, name, text string, raw []byte, n int64, fl float64, kind uint8) {
		values := []any{text, raw, n, fl, nil, []any{text}, map[string]any{name: n}, uint64(n), int8(n), time.Unix(n, 0)}
		v := values[int(kind)%len(values)]
		h := Map{name: v, RetryCount: v, NotBefore: v, History: v, DeathReason: v, DeathCount: text}
		got := Parse(h)
		if got.Retries > maxCount || got.Defers > maxCount || got.Death.Count > maxCount {
			t.Fatalf("%+v", got)
		}
		if _, err := json.Marshal(got.NotBefore); err != nil {
			t.Fatal(err)
		}
		Keep(name)
		Reserved(name)
	})
}

// FuzzAppendAttempt feeds histories that somebody else wrote.
func FuzzAppendAttempt(f *testing.F) {
	f.Add(`[{"at":"2031-01-02T03:04:05Z","outcome":"retry"}]`, "pod", "why", int64(0))
	f.Add("[null,null]", "\xff", "\x00", int64(1)<<62)
	f.Fuzz(func(t *testing.T, history, pod, reason string, at int64) {
		h := AppendAttempt(history, Attempt{At: time.Unix(at, 0), Pod: pod, Reason: reason, Outcome: "retry"})
		if len(h) > maxHistory {
			t.Fatalf("%d bytes", len(h))
		}
	})
}
