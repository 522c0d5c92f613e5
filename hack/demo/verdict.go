package main

import (
	"fmt"

	"github.com/shove-dev/shove/hack/demo/ledger"
	"github.com/shove-dev/shove/settle"
)

// check is one thing that has to be seen before the demo counts as a success.
type check struct {
	what string
	ok   bool
	how  string
}

// verdict holds the state at the end, when nothing is published any more and the queues ran empty, against what was to
// be seen. Everything but the first line is the broker's word.
func verdict(s state, b ledger.Balance, left string) []check {
	c := s.counts
	acked, known := s.acked()
	// Delivery is at least once: a message that came twice may have been acknowledged twice, and only such a one.
	again := acked - b.Handled
	tiers := 0
	for _, n := range c.Retried {
		if n > 0 {
			tiers++
		}
	}
	return []check{
		{"the three objects are Ready", s.allReady(), ""},
		{"messages were acked", known && acked > 0, fmt.Sprintf("%d", acked)},
		{"retried over every tier", tiers == len(c.Retried) && tiers > 0, fmt.Sprintf("%v", c.Retried)},
		{"retried after an error, a timeout and a panic", c.RetriedBy[ledger.CauseError] > 0 && c.RetriedBy[ledger.CauseTimeout] > 0 && c.RetriedBy[ledger.CausePanic] > 0,
			fmt.Sprintf("%d, %d, %d", c.RetriedBy[ledger.CauseError], c.RetriedBy[ledger.CauseTimeout], c.RetriedBy[ledger.CausePanic])},
		{"came back from their tier", c.Returned > 0, fmt.Sprintf("%d", c.Returned)},
		{"deferred without spending a retry", c.Deferred > 0, fmt.Sprintf("%d", c.Deferred)},
		{"dead-lettered: rejected", c.Dead[settle.Rejected] > 0, fmt.Sprintf("%d", c.Dead[settle.Rejected])},
		{"dead-lettered: retries used up", c.Dead[settle.MaxRetriesExceeded] > 0, fmt.Sprintf("%d", c.Dead[settle.MaxRetriesExceeded])},
		{"every dead letter was drained", c.DeadTotal() > 0 && b.Dead == 0 && c.Drained >= c.DeadTotal(), fmt.Sprintf("%d of %d", c.Drained, c.DeadTotal())},
		{"the queues are empty, nothing is unacknowledged", left == "", left},
		{"every message is accounted for: published = acked + drained", left == "" && b.Waiting+b.Held+b.Dead == 0 && c.Published == b.Handled+b.Drained && known && again >= 0 && again <= c.Redelivered+c.Repeated,
			fmt.Sprintf("%d = %d + %d; %d acks without a copy, %d redelivered, %d sent again", c.Published, b.Handled, b.Drained, acked, c.Redelivered, c.Repeated)},
		{"nothing else happened on the broker", c.Unknown == 0, ""},
	}
}

// passed says whether all checks are.
func passed(checks []check) bool {
	for _, c := range checks {
		if !c.ok {
			return false
		}
	}
	return true
}
