package runtime_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/config"
)

// slow is a handler that blocks until its context ends, or for ever where it ignores that.
type slow struct {
	mu      sync.Mutex
	began   time.Time
	starts  []time.Duration
	ctxErrs []error
	ignore  chan struct{} // non-nil: the context is ignored until it is closed
}

func (s *slow) Handle(ctx context.Context, _ order, _ *runtime.Metadata) runtime.Outcome {
	s.mu.Lock()
	s.starts = append(s.starts, time.Since(s.began))
	s.mu.Unlock()
	if s.ignore != nil {
		<-s.ignore
		return runtime.Ack
	}
	<-ctx.Done()
	s.mu.Lock()
	s.ctxErrs = append(s.ctxErrs, ctx.Err())
	s.mu.Unlock()
	return runtime.Ack // too late
}

func TestH1_DefaultDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		h := &slow{began: time.Now()}
		stop := f.run(runtime.Handle("orders", h, runtime.MaxRetries(1)))
		f.publish(1)
		time.Sleep(settleTime)
		drains(t, stop)
		if diff := cmp.Diff([]time.Duration{0, 35 * time.Second}, h.starts); diff != "" {
			t.Error("30 s of deadline and 5 s of hold between the calls:", diff)
		}
		for _, err := range h.ctxErrs {
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("the context ended with %v", err)
			}
		}
		f.wantLeft(map[string]int{"orders": 0, "orders-dlq": 1})
	})
}

func TestH3_TimeoutOutcome(t *testing.T) {
	tests := map[string]struct {
		opts   []runtime.HandleOption
		starts []time.Duration
		dead   int
		reason string
	}{
		"unset":  {nil, []time.Duration{0, 15 * time.Second}, 1, "max_retries_exceeded"},
		"Retry":  {[]runtime.HandleOption{runtime.HandlerTimeoutOutcome(runtime.Retry)}, []time.Duration{0, 15 * time.Second}, 1, "max_retries_exceeded"},
		"Reject": {[]runtime.HandleOption{runtime.HandlerTimeoutOutcome(runtime.Reject)}, []time.Duration{0}, 1, "rejected"},
		"Ack":    {[]runtime.HandleOption{runtime.HandlerTimeoutOutcome(runtime.Ack)}, []time.Duration{0}, 0, ""},
		"Defer": {[]runtime.HandleOption{runtime.HandlerTimeoutOutcome(runtime.Defer), runtime.DeferLimit(2, 0)},
			[]time.Duration{0, 15 * time.Second, 30 * time.Second}, 1, "defer_limit_exceeded"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, nil)
				m := newMetrics()
				h := &slow{began: time.Now()}
				opts := append([]runtime.HandleOption{runtime.HandlerTimeout(10 * time.Second), runtime.MaxRetries(1)}, tt.opts...)
				stop := f.run(m.option(), runtime.Handle("orders", h, opts...))
				f.publish(1)
				time.Sleep(settleTime)
				drains(t, stop)
				if diff := cmp.Diff(tt.starts, h.starts); diff != "" {
					t.Error(diff)
				}
				dead := f.server.Peek("orders-dlq")
				if len(dead) != tt.dead || (tt.dead > 0 && dead[0].Headers[header.DeathReason] != tt.reason) {
					t.Errorf("dead letters: %v", dead)
				}
				if got := m.value(t, "shove_messages_failed_total", "reason", "timeout"); got != float64(len(tt.starts)) {
					t.Errorf("%v timeouts counted, want %d", got, len(tt.starts))
				}
			})
		})
	}
}

func TestH4_HandlerThatIgnoresItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		m, log := newMetrics(), &logLines{}
		h := &slow{began: time.Now(), ignore: make(chan struct{})}
		stop := f.run(m.option(), log.option(), runtime.Handle("orders", h, runtime.HandlerTimeout(10*time.Second), runtime.HandlerTimeoutOutcome(runtime.Reject), runtime.Concurrency(1), runtime.MaxRetries(0)))
		f.publish(1, 2)
		time.Sleep(10*time.Second + time.Millisecond)
		synctest.Wait()
		f.wantLeft(map[string]int{"orders": 1, "orders-dlq": 1}) // on time, although the handler still runs
		if got := m.value(t, "shove_handlers_abandoned", "topic", "orders"); got != 1 {
			t.Errorf("gauge of abandoned handlers: %v, want 1", got)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if diff := cmp.Diff([]time.Duration{0, 20 * time.Second}, h.starts); diff != "" {
			t.Error("the slot is freed after one further deadline:", diff)
		}
		f.wantLeft(map[string]int{"orders": 0, "orders-dlq": 2})
		if log.count("another worker takes its place") != 2 {
			t.Errorf("no warning names the abandoned handlers: %q", log.lines)
		}
		close(h.ignore)
		synctest.Wait()
		if got := m.value(t, "shove_handlers_abandoned", "topic", "orders"); got != 0 {
			t.Errorf("gauge of abandoned handlers after their return: %v", got)
		}
		f.wantLeft(map[string]int{"orders": 0, "orders-dlq": 2}) // the late Ack is dropped
		drains(t, stop)
	})
}

func TestH5_PanicIsRetryWhateverTheTimeoutOutcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		calls := 0
		stop := f.run(runtime.Handle("orders", runtime.HandlerFunc[order](func(context.Context, order, *runtime.Metadata) runtime.Outcome {
			calls++
			panicIf(calls == 1)
			return runtime.Ack
		}), runtime.HandlerTimeoutOutcome(runtime.Reject)))
		f.publish(1)
		time.Sleep(settleTime)
		drains(t, stop)
		if calls != 2 {
			t.Errorf("%d calls, want 2", calls)
		}
		f.wantLeft(map[string]int{"orders-dlq": 0})
	})
}

func TestH6_NoDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		h := &slow{began: time.Now()}
		stop := f.run(runtime.Handle("orders", h, runtime.HandlerTimeout(0), runtime.HandlerTimeoutOutcome(runtime.Reject), runtime.DrainTimeout(20*time.Second)))
		f.publish(1)
		time.Sleep(48 * time.Hour)
		synctest.Wait()
		if len(h.ctxErrs) != 0 {
			t.Error("a handler without a deadline was ended")
		}
		began := time.Now()
		err := stop()
		if !errors.Is(err, runtime.ErrDrainTimeout) {
			t.Errorf("Run: %v", err)
		}
		if took := time.Since(began); took != 20*time.Second {
			t.Errorf("the drain took %s, want 20s", took)
		}
		synctest.Wait()
		ready, _ := f.server.Counts("orders")
		if ready != 1 || f.left("orders-dlq") != 0 {
			t.Errorf("%d back on the main queue, %d dead", ready, f.left("orders-dlq"))
		}
	})
}

func TestH7_TimeoutDeferWithoutHoldIsRefused(t *testing.T) {
	f := newFixture(t, func(c *config.RuntimeConfig) { c.Topologies[0].HoldQueues = nil })
	_, err := runtime.New(runtime.Drivers(f.driver), runtime.Config(f.cfg), runtime.Registerer(prometheus.NewRegistry()),
		runtime.Handle("orders", script(runtime.Ack), runtime.HandlerTimeoutOutcome(runtime.Defer)))
	if err == nil {
		t.Error("accepted")
	}
}
