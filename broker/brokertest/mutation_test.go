package brokertest_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/brokertest"
	"github.com/shove-dev/shove/broker/brokertest/reference"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/broker/memory"
	"github.com/shove-dev/shove/settle"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// flaw is a backend's bug that the suite has to find.
type flaw struct {
	// settle replaces Settle.
	settle func(ctx context.Context, s broker.Subscription, batch []broker.Settlement) error
	// prefetch changes what is subscribed with.
	prefetch func(int) int
	// foundBy are subtests that fail because of it, below TestFlawed.
	foundBy []string
}

// each settles a batch one by one, with a change to each.
func each(change func(st *broker.Settlement)) func(context.Context, broker.Subscription, []broker.Settlement) error {
	return func(ctx context.Context, s broker.Subscription, batch []broker.Settlement) error {
		changed := append([]broker.Settlement(nil), batch...)
		for i := range changed {
			change(&changed[i])
		}
		return s.Settle(ctx, changed)
	}
}

var flaws = map[string]flaw{
	"dead_letters_are_only_acked": {
		settle: each(func(st *broker.Settlement) {
			if st.Action.Kind == settle.DeadLetter {
				st.Action.Kind = settle.Done
			}
		}),
		foundBy: []string{"A3", "A5", "E3", "G1", "faults/cut_mid_flight"},
	},
	"always_the_first_tier": {
		settle:  each(func(st *broker.Settlement) { st.Action.Tier = 0 }),
		foundBy: []string{"A4", "B4", "C1", "D3"},
	},
	"the_count_does_not_travel": {
		settle:  each(func(st *broker.Settlement) { st.Stamp = header.Drop(st.Stamp, header.RetryCount) }),
		foundBy: []string{"A4", "C1", "C5"},
	},
	"the_id_does_not_travel": {
		settle:  each(func(st *broker.Settlement) { st.Stamp = header.Drop(st.Stamp, header.MessageID) }),
		foundBy: []string{"C8", "Q2"},
	},
	"acknowledges_before_it_copies": {
		settle: func(ctx context.Context, s broker.Subscription, batch []broker.Settlement) error {
			first := append([]broker.Settlement(nil), batch...)
			for i := range first {
				if first[i].Action.Kind.Copies() {
					first[i].Action.Kind = settle.Done
				}
			}
			return s.Settle(ctx, first)
		},
		foundBy: []string{"A9", "A10", "faults/cut_mid_flight"},
	},
	"swallows_errors": {
		settle: func(ctx context.Context, s broker.Subscription, batch []broker.Settlement) error {
			_ = s.Settle(ctx, batch)
			return nil
		},
		foundBy: []string{"seam/settle_twice"},
	},
	"giving_back_counts": {
		settle: each(func(st *broker.Settlement) {
			if st.Action.Kind == settle.GiveBack {
				st.Action.Kind = settle.Requeue
			}
		}),
		foundBy: []string{"N1"},
	},
	"prefetches_more": {
		prefetch: func(n int) int { return n + 1 },
		foundBy:  []string{"seam/prefetch"},
	},
}

// broken is the driver of the in-memory broker with a flaw.
func broken(s *memory.Server, f flaw) broker.Driver {
	d := memory.Driver(s)
	open := d.OpenClient
	d.OpenClient = func(ctx context.Context, cfg broker.Config) (broker.Client, error) {
		c, err := open(ctx, cfg)
		return flawedClient{c, f}, err
	}
	return d
}

type flawedClient struct {
	broker.Client
	flaw flaw
}

func (c flawedClient) Subscribe(ctx context.Context, cfg broker.Subscribe) (broker.Subscription, error) {
	if c.flaw.prefetch != nil {
		cfg.Prefetch = c.flaw.prefetch(cfg.Prefetch)
	}
	s, err := c.Client.Subscribe(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return flawedSubscription{s, c.flaw}, nil
}

type flawedSubscription struct {
	broker.Subscription
	flaw flaw
}

func (s flawedSubscription) Settle(ctx context.Context, batch []broker.Settlement) error {
	if s.flaw.settle == nil {
		return s.Subscription.Settle(ctx, batch)
	}
	return s.flaw.settle(ctx, s.Subscription, batch)
}

const flawVar = "SHOVE_TEST_FLAW"

// TestFlawed is the suite on a broken backend. It is run by TestTheSuiteFindsFlaws in another process, and fails there.
func TestFlawed(t *testing.T) {
	f, ok := flaws[os.Getenv(flawVar)]
	if !ok {
		return // not that process
	}
	brokertest.Run(t, reference.Backend(memory.Options{}, func(s *memory.Server) broker.Driver { return broken(s, f) }))
}

// TestTheSuiteFindsFlaws holds the suite to what it is for: each of these bugs makes the subtests fail that prove the
// rule it breaks.
func TestTheSuiteFindsFlaws(t *testing.T) {
	if os.Getenv(flawVar) != "" {
		return
	}
	for name, f := range flaws {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, subtest := range f.foundBy {
				parts := strings.Split("TestFlawed/"+subtest, "/")
				cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^"+strings.Join(parts, "$/^")+"$", "-test.timeout", "60s")
				cmd.Env = append(os.Environ(), flawVar+"="+name)
				var out bytes.Buffer
				cmd.Stdout, cmd.Stderr = &out, &out
				err := cmd.Run()
				if err == nil {
					t.Errorf("%s passes", subtest)
				} else if !strings.Contains(out.String(), "--- FAIL: TestFlawed/"+subtest) {
					t.Errorf("%s did not end as a failed test: %v\n%.4000s", subtest, err, out.String())
				}
			}
		})
	}
}
