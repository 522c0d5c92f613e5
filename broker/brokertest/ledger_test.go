package brokertest_test

import (
	"strings"
	"testing"

	"github.com/shove-dev/shove/broker/brokertest"
)

func TestLedger(t *testing.T) {
	tests := map[string]struct {
		run  func(*brokertest.Ledger)
		want string // part of the problem; empty: it adds up
	}{
		"acked": {func(l *brokertest.Ledger) { l.Published("a"); l.Called("a", 0, 0); l.Acked("a") }, ""},
		"dead, discarded, left": {func(l *brokertest.Ledger) {
			l.Published("a", "b", "c")
			l.Dead("a")
			l.Discarded("b")
			l.Left("c")
		}, ""},
		"retried": {func(l *brokertest.Ledger) {
			l.Published("a")
			l.Called("a", 0, 0)
			l.Called("a", 1, 0)
			l.Called("a", 1, 1)
			l.Acked("a")
		}, ""},
		"lost":                 {func(l *brokertest.Ledger) { l.Published("a"); l.Called("a", 0, 0) }, "a is lost"},
		"unknown may be lost":  {func(l *brokertest.Ledger) { l.Unknown("a") }, ""},
		"unknown may be there": {func(l *brokertest.Ledger) { l.Unknown("a"); l.Called("a", 0, 0); l.Acked("a") }, ""},
		"from nowhere":         {func(l *brokertest.Ledger) { l.Called("a", 0, 0); l.Acked("a") }, "never published"},
		"handled twice":        {func(l *brokertest.Ledger) { l.Published("a"); l.Called("a", 0, 0); l.Called("a", 0, 0); l.Acked("a") }, "handled 2 times"},
		"handled twice over fault": {func(l *brokertest.Ledger) {
			l.Published("a")
			l.Called("a", 0, 0)
			l.Fault()
			l.Called("a", 0, 0)
			l.Acked("a")
		}, ""},
		"ended twice": {func(l *brokertest.Ledger) { l.Published("a"); l.Called("a", 0, 0); l.Acked("a"); l.Dead("a") }, "ended 2 times"},
		"a fault before it began": {func(l *brokertest.Ledger) {
			l.Published("a")
			l.Fault()
			l.Called("a", 0, 0)
			l.Acked("a")
			l.Dead("a")
		}, "no fault explains"},
		"a fault after it happened": {func(l *brokertest.Ledger) {
			l.Published("a")
			l.Called("a", 0, 0)
			l.Acked("a")
			l.Dead("a")
			l.Fault()
		}, "no fault explains"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			var l brokertest.Ledger
			tc.run(&l)
			err := l.Check()
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
			if strings.Contains(name, "twice") != (l.Duplicates() > 0) && !strings.Contains(name, "fault") {
				t.Errorf("%d duplicates", l.Duplicates())
			}
		})
	}
}
