package runtime_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/broker/memory"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/config"
)

// deadRecord is a handler that rejects everything and notes what its dead handler gets.
type deadRecord struct {
	mu     sync.Mutex
	calls  []time.Duration
	began  time.Time
	deaths []*runtime.DeadMetadata
	before func(call int)
}

func (d *deadRecord) Handle(context.Context, order, *runtime.Metadata) runtime.Outcome {
	return runtime.Reject.Because("no such item")
}

func (d *deadRecord) HandleDead(_ context.Context, _ order, m *runtime.DeadMetadata) {
	d.mu.Lock()
	d.calls = append(d.calls, time.Since(d.began))
	d.deaths = append(d.deaths, m)
	n := len(d.calls)
	d.mu.Unlock()
	if d.before != nil {
		d.before(n)
	}
}

func TestE1_E3_DrainsOnlyWithADeadHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		stop := f.run(runtime.Handle("orders", script(runtime.Reject.Because("no such item"))))
		f.publish(1)
		time.Sleep(time.Minute)
		drains(t, stop)
		f.wantLeft(map[string]int{"orders-dlq": 1})

		dead := &deadRecord{began: time.Now()}
		stop = f.run(runtime.Handle("orders", dead))
		time.Sleep(time.Minute)
		drains(t, stop)
		f.wantLeft(map[string]int{"orders-dlq": 0})
		if len(dead.deaths) != 1 {
			t.Fatalf("%d dead letters handled", len(dead.deaths))
		}
		got := dead.deaths[0].Death
		got.DiedAt = time.Time{}
		if diff := cmp.Diff(header.Death{Reason: "rejected", Detail: "no such item", Count: 1, OriginalQueue: "orders"}, got); diff != "" {
			t.Error(diff)
		}
	})
}

func TestE2_DrainWithoutDeadLetterQueueIsAnError(t *testing.T) {
	f := newFixture(t, func(c *config.RuntimeConfig) { c.Topologies[0].DeadLetter = "" })
	_, err := runtime.New(runtime.Drivers(f.driver), runtime.Config(f.cfg), runtime.Registerer(prometheus.NewRegistry()), runtime.Handle("orders", script(runtime.Ack)), runtime.DrainDead("orders"))
	if err == nil || !strings.Contains(err.Error(), "no dead-letter queue") {
		t.Errorf("New: %v", err)
	}
}

func TestE4_DefaultDeadHandlerLogs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		log := &logLines{}
		stop := f.run(log.option(), runtime.Handle("orders", script(runtime.Reject)), runtime.DrainDead("orders"))
		f.publish(1)
		time.Sleep(time.Minute)
		drains(t, stop)
		if n := log.count("WARN dead letter", "delivery=", "reason=rejected", "queue=orders", "deaths=1"); n != 1 {
			t.Errorf("%d such warnings, want 1: %q", n, log.lines)
		}
		f.wantLeft(map[string]int{"orders-dlq": 0})
	})
}

func TestE5_FailedDeadHandler(t *testing.T) {
	s := time.Second
	tests := map[string]struct {
		before func(call int)
		want   []time.Duration
	}{
		"panics once":        {func(n int) { panicIf(n == 1) }, []time.Duration{0, s}},
		"panics for ever":    {func(int) { panic("no") }, []time.Duration{0, s, 3 * s, 7 * s}},
		"times out for ever": {func(int) { time.Sleep(15 * s) }, []time.Duration{0, 11 * s, 23 * s, 37 * s}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, nil)
				dead := &deadRecord{began: time.Now(), before: tt.before}
				stop := f.run(runtime.Handle("orders", dead, runtime.HandlerTimeout(10*s)))
				f.publish(1)
				time.Sleep(2 * time.Minute)
				drains(t, stop)
				if diff := cmp.Diff(tt.want, dead.calls); diff != "" {
					t.Error(diff)
				}
				f.wantLeft(map[string]int{"orders-dlq": 0})
			})
		})
	}
}

func panicIf(yes bool) {
	if yes {
		panic("boom")
	}
}

func TestE6_OriginalsIdentity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		var original string
		var dead *runtime.DeadMetadata
		stop := f.run(
			runtime.Handle("orders", runtime.HandlerFunc[order](func(_ context.Context, _ order, m *runtime.Metadata) runtime.Outcome {
				original = m.DeliveryID()
				if m.RetryCount < 2 {
					return runtime.Retry
				}
				return runtime.Reject
			})),
			runtime.HandleDead("orders", runtime.DeadHandlerFunc[order](func(_ context.Context, _ order, m *runtime.DeadMetadata) { dead = m })))
		f.publish(1)
		time.Sleep(settleTime)
		drains(t, stop)
		if dead == nil || dead.DeliveryID() != original || dead.RetryCount != 2 || dead.MessageID() != "m1" {
			t.Errorf("dead letter %+v, original delivery %q", dead, original)
		}
	})
}

func TestE7_UndecodableDeadLetter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		dead := &deadRecord{began: time.Now()}
		stop := f.run(runtime.Handle("orders", dead))
		f.put(memory.Raw{Body: []byte("not json")})
		time.Sleep(time.Minute)
		drains(t, stop)
		if len(dead.deaths) != 1 {
			t.Fatalf("%d dead letters handled", len(dead.deaths))
		}
		m := dead.deaths[0]
		if m.DecodeError == nil || string(m.Body()) != "not json" || m.Death.Reason != "deserialize" {
			t.Errorf("%v %q %q", m.DecodeError, m.Body(), m.Death.Reason)
		}
	})
}

func TestE3_TheBrokersOwnDeath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		dead := &deadRecord{began: time.Now()}
		stop := f.run(runtime.Handle("orders", dead))
		if err := f.server.Put("orders-dlq", memory.Raw{Body: []byte(`{"id":7}`), Death: &header.Death{Reason: "expired", Count: 2, OriginalQueue: "orders"}}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		drains(t, stop)
		if len(dead.deaths) != 1 {
			t.Fatal("not handled")
		}
		if diff := cmp.Diff(header.Death{Reason: "expired", Count: 2, OriginalQueue: "orders"}, dead.deaths[0].Death); diff != "" {
			t.Error(diff)
		}
	})
}
