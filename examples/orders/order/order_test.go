package order

import (
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMixIsAHundred(t *testing.T) {
	total := 0
	for _, m := range mix {
		total += m.share
	}
	if total != 100 {
		t.Errorf("the shares add up to %d", total)
	}
}

func TestFirstOrdersAreOneOfEachKind(t *testing.T) {
	for n, kind := range Kinds() {
		if o := Make(n, time.Now()); o.Kind != kind {
			t.Errorf("order %d is %q, want %q", n, o.Kind, kind)
		}
	}
	for n := range 1000 {
		if o := Make(n, time.Now()); o.ID == "" || o.Kind == Early && o.NotBefore.IsZero() || o.Kind == Flaky && (o.Failures < 1 || o.Failures > 2) {
			t.Fatalf("order %d: %+v", n, o)
		}
	}
}
