package header

import (
	"encoding/json"
	"time"
	"unicode/utf8"
)

// Attempt is one entry of a message's history (I4).
type Attempt struct {
	At      time.Time `json:"at"`
	Pod     string    `json:"pod,omitempty"`
	Outcome string    `json:"outcome"`
	Reason  string    `json:"reason,omitempty"`
}

// Bounds of the history header (I4).
const (
	maxAttempts      = 16
	maxHistory       = 2 << 10
	maxAttemptReason = 256
)

// AppendAttempt adds an entry to a history header and trims it from the oldest end to 16 entries and 2 KiB. A
// history that cannot be read is started anew: it is trimmed or lost, never the reason for a refusal.
func AppendAttempt(history string, a Attempt) string {
	a.At = a.At.UTC().Truncate(time.Millisecond)
	a.Reason = Clip(a.Reason, maxAttemptReason)
	a.Pod = Clip(a.Pod, maxAttemptReason)
	a.Outcome = Clip(a.Outcome, maxAttemptReason)
	all := append(ParseHistory(history), a)
	if len(all) > maxAttempts {
		all = all[len(all)-maxAttempts:]
	}
	for {
		b, err := json.Marshal(all)
		if err != nil {
			return ""
		}
		switch {
		case len(b) <= maxHistory:
			return string(b)
		case len(all) > 1:
			all = all[1:]
		default: // escaping made a single entry too long
			if all[0].Reason == "" && all[0].Pod == "" {
				return ""
			}
			all[0].Reason, all[0].Pod = "", ""
		}
	}
}

// ParseHistory reads a history header, oldest attempt first. It returns nil for one that cannot be read.
func ParseHistory(history string) []Attempt {
	if history == "" {
		return nil
	}
	var all []Attempt
	if json.Unmarshal([]byte(history), &all) != nil {
		return nil
	}
	return all
}

// Clip cuts text to at most n bytes, at the end of a character.
func Clip(text string, n int) string {
	if len(text) <= n {
		return text
	}
	for n > 0 && !utf8.RuneStart(text[n]) {
		n--
	}
	return text[:n]
}
