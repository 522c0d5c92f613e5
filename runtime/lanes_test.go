package runtime_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/broker/memory"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/topology"
)

// ordered is a sequenced topology and the log of what was handled per key.
type ordered struct {
	*fixture
	mu   sync.Mutex
	log  map[string][]string
	fate func(key string, o order, m *runtime.Metadata) runtime.Outcome
}

func newOrdered(t *testing.T, onFailure topology.OnFailure, fate func(string, order, *runtime.Metadata) runtime.Outcome) *ordered {
	f := newFixture(t, func(c *config.RuntimeConfig) {
		c.Topologies[0].Sequenced = &config.Sequenced{OnFailure: onFailure}
	})
	return &ordered{fixture: f, log: map[string][]string{}, fate: fate}
}

func (o *ordered) Handle(_ context.Context, m order, meta *runtime.Metadata) runtime.Outcome {
	out := o.fate(meta.Key(), m, meta)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.log[meta.Key()] = append(o.log[meta.Key()], fmt.Sprintf("%d:%s", m.ID, out.Verdict))
	return out
}

func (o *ordered) send(key string, ids ...int) {
	o.t.Helper()
	o.key = key
	o.publish(ids...)
}

func TestK1_K2_OrderPerKeyAcrossRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		failed := map[string]bool{}
		o := newOrdered(t, topology.Skip, func(key string, m order, meta *runtime.Metadata) runtime.Outcome {
			time.Sleep(10 * time.Millisecond)
			mu.Lock()
			defer mu.Unlock()
			id := fmt.Sprint(key, m.ID)
			if m.ID%3 == 0 && !failed[id] {
				failed[id] = true
				return runtime.Retry
			}
			return runtime.Ack
		})
		stop := o.run(runtime.Handle("orders", o))
		for id := 1; id <= 6; id++ {
			for _, key := range []string{"a", "b", "c"} {
				o.send(key, id)
			}
		}
		time.Sleep(settleTime)
		drains(t, stop)
		want := []string{"1:ack", "2:ack", "3:retry", "3:ack", "4:ack", "5:ack", "6:retry", "6:ack"}
		if diff := cmp.Diff(map[string][]string{"a": want, "b": want, "c": want}, o.log); diff != "" {
			t.Error(diff)
		}
	})
}

func TestK3_Skip(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOrdered(t, topology.Skip, func(_ string, m order, _ *runtime.Metadata) runtime.Outcome {
			if m.ID == 3 {
				return runtime.Reject
			}
			return runtime.Ack
		})
		stop := o.run(runtime.Handle("orders", o))
		o.send("a", 1, 2, 3, 4, 5)
		time.Sleep(settleTime)
		drains(t, stop)
		if diff := cmp.Diff([]string{"1:ack", "2:ack", "3:reject", "4:ack", "5:ack"}, o.log["a"]); diff != "" {
			t.Error(diff)
		}
		if diff := cmp.Diff([]string{"3 rejected"}, deadOf(o.server)); diff != "" {
			t.Error(diff)
		}
	})
}

func TestK4_G3_FailAll(t *testing.T) {
	poison := map[string]func(o *ordered){
		"reject":      func(o *ordered) { o.send("a", 1, 2, 3, 4, 5) },
		"exhausted":   func(o *ordered) { o.send("a", 1, 2, 3, 4, 5) },
		"undecodable": nil, // G3
	}
	for name, send := range poison {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newOrdered(t, topology.FailAll, func(key string, m order, _ *runtime.Metadata) runtime.Outcome {
					switch {
					case m.ID == 3 && key == "a" && name == "exhausted":
						return runtime.Retry
					case m.ID == 3 && key == "a":
						return runtime.Reject
					}
					return runtime.Ack
				})
				stop := o.run(runtime.Handle("orders", o, runtime.MaxRetries(1)))
				third := "rejected"
				if send != nil {
					send(o)
				} else {
					o.send("a", 1, 2)
					o.put(memory.Raw{Key: "a", Headers: header.Map{header.MessageID: "m3"}, Body: []byte("?")})
					o.send("a", 4, 5)
					third = "deserialize"
				}
				if name == "exhausted" {
					third = "max_retries_exceeded"
				}
				o.send("b", 1, 2, 3)
				time.Sleep(settleTime)
				o.send("a", 6)
				time.Sleep(settleTime)
				drains(t, stop)
				if diff := cmp.Diff([]string{"1:ack", "2:ack"}, o.log["a"][:2]); diff != "" {
					t.Error(diff)
				}
				for _, line := range o.log["a"][2:] {
					if line[0] != '3' {
						t.Errorf("a follower of the failed message was handled: %s", line)
					}
				}
				if diff := cmp.Diff([]string{"1:ack", "2:ack", "3:ack"}, o.log["b"]); diff != "" {
					t.Error("another key was touched:", diff)
				}
				if diff := cmp.Diff([]string{"3 " + third, "4 sequence_failed", "5 sequence_failed", "6 sequence_failed"}, deadOf(o.server)); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
}

// deadOf lists the dead letters as "id reason".
func deadOf(s *memory.Server) (all []string) {
	for _, d := range s.Peek("orders-dlq") {
		id, _ := d.Headers.Text(header.MessageID)
		reason, _ := d.Headers.Text(header.DeathReason)
		all = append(all, id[1:]+" "+reason)
	}
	return all
}
