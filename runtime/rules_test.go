package runtime_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/broker/memory"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/config"
)

const settleTime = 10 * time.Minute // of virtual time: long enough for every tier

func TestA1_Outcomes(t *testing.T) {
	notBefore := 40 * time.Second
	tests := map[string]struct {
		outcome func(now time.Time) runtime.Outcome
		want    []call
		left    map[string]int
	}{
		"ack":    {func(time.Time) runtime.Outcome { return runtime.Ack }, []call{{1, 0, 0}}, map[string]int{"orders-dlq": 0}},
		"retry":  {func(time.Time) runtime.Outcome { return runtime.Retry }, []call{{1, 0, 0}, {1, 1, 5 * time.Second}}, map[string]int{"orders-dlq": 0}},
		"reject": {func(time.Time) runtime.Outcome { return runtime.Reject }, []call{{1, 0, 0}}, map[string]int{"orders-dlq": 1}},
		"defer":  {func(time.Time) runtime.Outcome { return runtime.Defer }, []call{{1, 0, 0}, {1, 0, 5 * time.Second}}, map[string]int{"orders-dlq": 0}},
		"reject error": {func(time.Time) runtime.Outcome {
			return runtime.FromError(fmt.Errorf("wrapped: %w", runtime.Reject.Err(errors.New("no such customer"))))
		}, []call{{1, 0, 0}}, map[string]int{"orders-dlq": 1}},
		"plain error": {func(time.Time) runtime.Outcome { return runtime.FromError(errors.New("down")) }, []call{{1, 0, 0}, {1, 1, 5 * time.Second}}, nil},
		"defer until": {func(now time.Time) runtime.Outcome { return runtime.Defer.Until(now.Add(notBefore)) },
			// 30 s is the longest tier that fits 40 s; the remaining 10 s take the 5 s tier twice, without a call.
			[]call{{1, 0, 0}, {1, 0, 40 * time.Second}}, nil},
		"zero outcome": {func(time.Time) runtime.Outcome { return runtime.Outcome{} }, []call{{1, 0, 0}, {1, 1, 5 * time.Second}}, nil},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, nil)
				h := script(tt.outcome(time.Now()), runtime.Ack)
				stop := f.run(runtime.Handle("orders", h))
				f.publish(1)
				time.Sleep(settleTime)
				drains(t, stop)
				h.want(t, tt.want...)
				f.wantLeft(tt.left)
				f.wantLeft(map[string]int{"orders": 0, "orders-hold-5s": 0, "orders-hold-30s": 0, "orders-hold-120s": 0})
			})
		})
	}
}

func TestA8_PanicIsRetry(t *testing.T) {
	for _, tt := range []struct {
		name string
		fail func()
	}{
		{"panic", func() { panic("boom") }},
		{"nil map", func() { var m map[string]int; m["x"] = 1 }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, nil)
				var calls []uint32
				stop := f.run(runtime.Handle("orders", runtime.HandlerFunc[order](func(_ context.Context, _ order, m *runtime.Metadata) runtime.Outcome {
					calls = append(calls, m.RetryCount)
					if len(calls) == 1 {
						tt.fail()
					}
					return runtime.Ack
				})))
				f.publish(1)
				time.Sleep(settleTime)
				drains(t, stop)
				if diff := cmp.Diff([]uint32{0, 1}, calls); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
}

func TestA10_FailedCopyComesBackUnchanged(t *testing.T) {
	for name, fault := range map[string]func(*memory.Server){
		"once rejected": func(s *memory.Server) { s.FailCopies(1, broker.ErrRejected) },
		"often":         func(s *memory.Server) { s.FailCopies(12, broker.ErrRejected) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, nil)
				fault(f.server)
				var calls atomic.Int32
				var last atomic.Uint32
				began := time.Now()
				stop := f.run(runtime.Handle("orders", runtime.HandlerFunc[order](func(_ context.Context, _ order, m *runtime.Metadata) runtime.Outcome {
					calls.Add(1)
					last.Store(m.RetryCount)
					if m.RetryCount == 1 {
						return runtime.Ack
					}
					return runtime.Retry
				})))
				f.publish(1)
				for last.Load() != 1 {
					time.Sleep(100 * time.Millisecond)
				}
				drains(t, stop)
				f.wantLeft(map[string]int{"orders": 0, "orders-dlq": 0, "orders-hold-5s": 0})
				if spent := time.Since(began); calls.Load() > 20 || spent < 5*time.Second {
					t.Errorf("%d calls in %s: it spins", calls.Load(), spent)
				}
			})
		})
	}
}

func TestA11_SlowMessageHoldsNobodyBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		release := make(chan struct{})
		var atOnce, most, done atomic.Int32
		stop := f.run(runtime.Handle("orders", runtime.HandlerFunc[order](func(_ context.Context, o order, _ *runtime.Metadata) runtime.Outcome {
			n := atOnce.Add(1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			defer atOnce.Add(-1)
			if o.ID == 0 {
				<-release
			} else {
				time.Sleep(time.Second)
			}
			done.Add(1)
			return runtime.Ack
		}), runtime.Concurrency(3), runtime.Prefetch(10)))
		for id := range 20 {
			f.publish(id)
		}
		time.Sleep(15 * time.Second)
		if got := done.Load(); got != 19 {
			t.Errorf("%d of the 19 others are done", got)
		}
		f.wantLeft(map[string]int{"orders": 1})
		close(release)
		time.Sleep(time.Second)
		drains(t, stop)
		if most.Load() != 3 {
			t.Errorf("%d handlers at once, want 3", most.Load())
		}
	})
}

func TestA12_BoundToTopologyNotToType(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *config.RuntimeConfig) {
			c.Topologies = append(c.Topologies, config.Topology{Name: "refunds", Broker: "mem", Queue: "refunds"})
			c.Consumers = append(c.Consumers, config.Consumer{Group: "refunders", Topology: "refunds"})
		})
		orders, refunds := script(runtime.Ack), script(runtime.Ack)
		stop := f.run(runtime.Handle("orders", orders), runtime.Handle("refunds", refunds))
		f.publish(1)
		if err := f.server.Put("refunds", memory.Raw{Body: []byte(`{"id":2}`)}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		drains(t, stop)
		orders.want(t, call{1, 0, 0})
		refunds.want(t, call{2, 0, 0})
	})
}

type tenant struct{}

func TestA13_SharedState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		var got any
		made := 0
		stop := f.run(
			runtime.Values(context.WithValue(t.Context(), tenant{}, "acme")),
			runtime.HandleFrom("orders", func() (runtime.Handler[order], error) {
				made++
				return runtime.HandlerFunc[order](func(ctx context.Context, _ order, _ *runtime.Metadata) runtime.Outcome {
					got = ctx.Value(tenant{})
					return runtime.Ack
				}), nil
			}))
		f.publish(1)
		time.Sleep(time.Second)
		drains(t, stop)
		if got != "acme" || made != 1 {
			t.Errorf("value %v, made %d times", got, made)
		}
	})
}

func TestC5_CountFromForeignHeaders(t *testing.T) {
	tests := map[string]struct {
		headers header.Map
		want    uint32
	}{
		"none":              {nil, 0},
		"ours":              {header.Map{"x-shove-retry-count": int64(3)}, 3},
		"theirs":            {header.Map{"x-retry-count": uint32(4)}, 4},
		"theirs on a log":   {header.Map{"Shove-Retry-Count": []byte("5")}, 5},
		"ours wins":         {header.Map{"x-shove-retry-count": int64(1), "x-retry-count": int64(9)}, 1},
		"negative":          {header.Map{"x-shove-retry-count": int64(-1)}, 0},
		"not a number":      {header.Map{"x-shove-retry-count": "many"}, 0},
		"absurd":            {header.Map{"x-shove-retry-count": int64(1 << 40)}, 0},
		"of a strange type": {header.Map{"x-shove-retry-count": []string{"1"}}, 0},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, nil)
				h := script(runtime.Ack)
				stop := f.run(runtime.Handle("orders", h))
				f.put(memory.Raw{Headers: tt.headers, Body: []byte(`{"id":1}`)})
				time.Sleep(time.Second)
				drains(t, stop)
				h.want(t, call{1, tt.want, 0})
			})
		})
	}
}

func TestC6_OnlyFailuresSpendTheBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		h := script(runtime.Defer, runtime.Retry, runtime.Defer, runtime.Retry, runtime.Ack)
		stop := f.run(runtime.Handle("orders", h))
		f.publish(1)
		time.Sleep(settleTime)
		drains(t, stop)
		s := time.Second
		h.want(t, call{1, 0, 0}, call{1, 0, 5 * s}, call{1, 1, 10 * s}, call{1, 1, 15 * s}, call{1, 2, 45 * s})
	})
}

func TestC8_IdentityOfForeignMessages(t *testing.T) {
	tests := map[string]struct {
		anonymous bool
		headers   header.Map
		derived   bool
	}{
		"the publisher's":    {false, header.Map{"x-message-id": "abc"}, false},
		"the broker's":       {false, nil, false},
		"from the content":   {true, nil, true},
		"the Rust runtime's": {true, header.Map{"Shove-Message-Id": "xyz"}, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, nil)
				f.server = memory.New(memory.Options{Anonymous: tt.anonymous})
				f.driver = memory.Driver(f.server)
				ids := map[string]int{}
				derived := false
				stop := f.run(runtime.Handle("orders", runtime.HandlerFunc[order](func(_ context.Context, _ order, m *runtime.Metadata) runtime.Outcome {
					ids[m.MessageID()]++
					_, derived = m.Header(header.IDDerived)
					if m.RetryCount == 2 {
						return runtime.Ack
					}
					return runtime.Retry
				})))
				f.put(memory.Raw{Headers: tt.headers, Body: []byte(`{"id":1}`)})
				time.Sleep(settleTime)
				drains(t, stop)
				if len(ids) != 1 || ids[""] != 0 {
					t.Errorf("ids over three calls: %v, want one", ids)
				}
				if derived != tt.derived {
					t.Errorf("marked as derived: %v, want %v", derived, tt.derived)
				}
			})
		})
	}
}

func TestC9_HeadersThatNoLongerFit(t *testing.T) {
	big := strings.Repeat("h", 900)
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.server = memory.New(memory.Options{MaxHeaderBytes: 1200})
		f.driver = memory.Driver(f.server)
		h := script(runtime.Retry.Because(strings.Repeat("r", 300)), runtime.Retry.Because(strings.Repeat("r", 300)), runtime.Reject.Because(strings.Repeat("d", 1000)))
		stop := f.run(runtime.Handle("orders", h))
		f.put(memory.Raw{Headers: header.Map{"x-message-id": "a", "mine": big}, Body: []byte(`{"id":1}`)})
		time.Sleep(settleTime)
		drains(t, stop)
		dead := f.server.Peek("orders-dlq")
		if len(h.calls) != 3 || len(dead) != 1 {
			t.Fatalf("%d calls, %d dead letters, want 3 and 1", len(h.calls), len(dead))
		}
		if dead[0].Headers["mine"] != big || dead[0].Headers[header.DeathReason] != "rejected" {
			t.Errorf("the dead letter lost more than history and detail: %v", dead[0].Headers)
		}
		if _, kept := dead[0].Headers[header.History]; kept {
			t.Error("history was kept although it did not fit")
		}
	})
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		f.server = memory.New(memory.Options{MaxHeaderBytes: len(big) + 20})
		f.driver = memory.Driver(f.server)
		h := script(runtime.Retry)
		stop := f.run(runtime.Handle("orders", h))
		f.put(memory.Raw{Headers: header.Map{"mine": big}, Body: []byte(`{"id":1}`)}) // fits as it is, but no copy of it does
		time.Sleep(settleTime)
		drains(t, stop)
		dead := f.server.Peek("orders-dlq")
		if len(dead) != 1 {
			t.Fatalf("%d dead letters, want 1", len(dead))
		}
		if dead[0].Headers[header.DeathReason] != "oversize" || !strings.Contains(string(dead[0].Body), big) {
			t.Errorf("reason %v; the headers are not in the body: %.80s", dead[0].Headers[header.DeathReason], dead[0].Body)
		}
	})
}

func TestD2_DeferWithoutHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *config.RuntimeConfig) { c.Topologies[0].HoldQueues = nil })
		var defers []uint32
		stop := f.run(runtime.Handle("orders", runtime.HandlerFunc[order](func(_ context.Context, _ order, m *runtime.Metadata) runtime.Outcome {
			defers = append(defers, m.DeferCount)
			return runtime.Defer
		})))
		f.publish(1)
		time.Sleep(10*time.Second + 500*time.Millisecond)
		drains(t, stop)
		if diff := cmp.Diff([]uint32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, defers); diff != "" {
			t.Error("one call a second, not a hot loop:", diff)
		}
		f.wantLeft(map[string]int{"orders": 1})
	})
}

func TestF1_F2_NoDeadLetterQueue(t *testing.T) {
	for name, tt := range map[string]struct {
		outcome runtime.Outcome
		body    string
	}{"reject": {runtime.Reject, `{"id":1}`}, "exhausted": {runtime.Retry, `{"id":1}`}, "undecodable": {runtime.Ack, `{`}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, func(c *config.RuntimeConfig) { c.Topologies[0].DeadLetter = "" })
				m := newMetrics()
				log := &logLines{}
				stop := f.run(m.option(), log.option(), runtime.Handle("orders", script(tt.outcome), runtime.MaxRetries(0)))
				f.put(memory.Raw{Body: []byte(tt.body)})
				time.Sleep(settleTime)
				drains(t, stop)
				f.wantLeft(map[string]int{"orders": 0})
				if n := log.count("message discarded"); n != 1 {
					t.Errorf("%d warnings of a discard, want 1", n)
				}
				reason := map[string]string{"reject": "rejected", "exhausted": "max_retries_exceeded", "undecodable": "deserialize"}[name]
				for _, counter := range []string{"shove_messages_discarded_total", "shove_messages_failed_total"} {
					if got := m.value(t, counter, "reason", reason); got != 1 {
						t.Errorf("%s{reason=%q} = %v, want 1", counter, reason, got)
					}
				}
			})
		})
	}
}

func TestG_Poison(t *testing.T) {
	tests := map[string]struct{ body, reason string }{
		"G1": {`not json`, "deserialize"},
		"G2": {`{"id":1,"pad":"` + strings.Repeat("x", 200) + `"}`, "oversize"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, nil)
				h := script(runtime.Ack)
				stop := f.run(runtime.Handle("orders", h, runtime.MaxMessageSize(100)))
				f.put(memory.Raw{Headers: header.Map{header.RetryCount: int64(2)}, Body: []byte(tt.body)})
				time.Sleep(time.Second)
				drains(t, stop)
				h.want(t)
				dead := f.server.Peek("orders-dlq")
				if len(dead) != 1 || dead[0].Headers[header.DeathReason] != tt.reason || string(dead[0].Body) != tt.body {
					t.Errorf("dead letters: %v", dead)
				}
			})
		})
	}
	t.Run("G2/exactly_the_limit_passes", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			f := newFixture(t, nil)
			h := script(runtime.Ack)
			body := `{"id":1}`
			stop := f.run(runtime.Handle("orders", h, runtime.MaxMessageSize(int64(len(body)))))
			f.put(memory.Raw{Body: []byte(body)})
			time.Sleep(time.Second)
			drains(t, stop)
			h.want(t, call{1, 0, 0})
		})
	})
}

func TestI4_History(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		h := script(runtime.Retry.Because("stock down"), runtime.Defer, runtime.Reject.Because("no such item"))
		stop := f.run(runtime.Handle("orders", h))
		f.publish(1)
		time.Sleep(settleTime)
		drains(t, stop)
		dead := f.server.Peek("orders-dlq")
		if len(dead) != 1 {
			t.Fatal("not dead")
		}
		text, _ := dead[0].Headers.Text(header.History)
		var got []string
		for _, a := range header.ParseHistory(text) {
			got = append(got, a.Pod+" "+a.Outcome+" "+a.Reason)
		}
		if diff := cmp.Diff([]string{"pod-0 retry stock down", "pod-0 defer ", "pod-0 reject no such item"}, got); diff != "" {
			t.Error(diff)
		}
	})
}

// Case 19 of the public trackers: whichever way the options are ordered, all attempts come before the dead letter.
func TestCase19_OrderOfOptions(t *testing.T) {
	options := []runtime.HandleOption{runtime.MaxRetries(2), runtime.HandlerTimeout(time.Second), runtime.HandlerTimeoutOutcome(runtime.Retry), runtime.Concurrency(2)}
	backwards := slices.Clone(options)
	slices.Reverse(backwards)
	for name, options := range map[string][]runtime.HandleOption{"forwards": options, "backwards": backwards} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, nil)
				var calls atomic.Int32
				stop := f.run(runtime.Handle("orders", runtime.HandlerFunc[order](func(ctx context.Context, _ order, m *runtime.Metadata) runtime.Outcome {
					calls.Add(1)
					if m.RetryCount == 1 {
						<-ctx.Done() // a timeout is an attempt like the others
					}
					if dead := f.left("orders-dlq"); dead != 0 {
						t.Errorf("attempt %d: %d messages are dead already", m.RetryCount+1, dead)
					}
					return runtime.Retry
				}), options...))
				f.publish(1)
				time.Sleep(settleTime)
				drains(t, stop)
				if calls.Load() != 3 {
					t.Errorf("%d attempts, want the first and 2 retries", calls.Load())
				}
				f.wantLeft(map[string]int{"orders": 0, "orders-dlq": 1})
			})
		})
	}
}
