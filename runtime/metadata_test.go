package runtime_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/broker/memory"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/config"
)

func TestI1_Metadata(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		var all []*runtime.Metadata
		stop := f.run(runtime.Handle("orders", runtime.HandlerFunc[order](func(_ context.Context, _ order, m *runtime.Metadata) runtime.Outcome {
			all = append(all, m)
			if len(all) == 1 {
				return runtime.Retry
			}
			return runtime.Ack
		})))
		f.put(memory.Raw{Body: []byte(`{"id":1}`), ContentType: "application/json", Key: "k",
			Headers: header.Map{header.MessageID: "abc", "text": "t", "bytes": []byte("b"), "number": int64(7), "table": map[string]any{"x": 1}}})
		time.Sleep(settleTime)
		drains(t, stop)
		if len(all) != 2 {
			t.Fatalf("%d calls", len(all))
		}
		m := all[0]
		if m.Topology != "orders" || m.Queue != "orders" || m.RetryCount != 0 || m.DeferCount != 0 || m.Redelivered || m.MessageID() != "abc" ||
			m.Key() != "k" || m.ContentType() != "application/json" || string(m.Body()) != `{"id":1}` || m.DeliveryID() == "" || m.FirstSeen().IsZero() {
			t.Errorf("%+v", m)
		}
		if n, known := m.DeliveryCount(); n != 1 || !known {
			t.Errorf("the first delivery is number %d (known: %v), want 1", n, known)
		}
		if _, known := m.Partition(); known {
			t.Error("a partition on a broker that has none")
		}
		if _, known := m.Offset(); known {
			t.Error("an offset on a broker that has none")
		}
		if diff := cmp.Diff(map[string]string{header.MessageID: "abc", "text": "t", "bytes": "b", "number": "7"}, m.Headers()); diff != "" {
			t.Error(diff)
		}
		if v, ok := m.Header("number"); !ok || v != "7" {
			t.Errorf("header: %q %v", v, ok)
		}
		again := all[1]
		if again.RetryCount != 1 || again.MessageID() != "abc" || !again.FirstSeen().Equal(m.FirstSeen()) || len(again.History()) != 1 {
			t.Errorf("on the retry: %+v", again)
		}
		if n, _ := again.DeliveryCount(); n != 1 { // I3
			t.Errorf("a copy's first delivery is number %d", n)
		}
	})
}

func TestB6_WarningsOfTheTopology(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*config.Topology)
		want   string
	}{
		"hold without dead letter": {func(c *config.Topology) { c.DeadLetter = "" }, "hold queues without a dead-letter queue"},
		"dead letter without hold": {func(c *config.Topology) { c.HoldQueues = nil }, "a dead-letter queue without hold queues"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, func(c *config.RuntimeConfig) { tt.change(&c.Topologies[0]) })
				log := &logLines{}
				stop := f.run(log.option(), runtime.Handle("orders", script(runtime.Ack)))
				drains(t, stop)
				if log.count("WARN", tt.want) != 1 {
					t.Errorf("no such warning: %q", log.lines)
				}
			})
		})
	}
}

func TestC7_RetryWithoutHoldIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *config.RuntimeConfig) { c.Topologies[0].HoldQueues = nil })
		log := &logLines{}
		h := script(runtime.Retry)
		stop := f.run(log.option(), runtime.Handle("orders", h, runtime.MaxRetries(3)))
		f.publish(1)
		time.Sleep(time.Minute)
		drains(t, stop)
		h.want(t, call{1, 0, 0}, call{1, 1, 0}, call{1, 2, 0}, call{1, 3, 0})
		f.wantLeft(map[string]int{"orders": 0, "orders-dlq": 1})
		if log.count("WARN retried without a hold queue") != 1 {
			t.Error("the warning is rate-limited, and there is one")
		}
	})
}
