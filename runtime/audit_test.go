package runtime_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
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

// memorySink keeps records, fails while err is set, and takes its time.
type memorySink struct {
	mu      sync.Mutex
	records []runtime.AuditRecord
	err     error
	delay   time.Duration
	writes  int
}

func (s *memorySink) Write(ctx context.Context, records []runtime.AuditRecord) error {
	s.mu.Lock()
	s.writes++
	err, delay := s.err, s.delay
	s.mu.Unlock()
	select {
	case <-time.After(delay):
	case <-ctx.Done():
		return ctx.Err()
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.records = append(s.records, records...)
	return nil
}

func (s *memorySink) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

// lines are the records in a short form.
func (s *memorySink) lines() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []string
	for _, r := range s.records {
		line := fmt.Sprintf("%s %s retries=%d", r.Event, r.Outcome, r.RetryCount)
		if r.Reason != "" {
			line += " " + r.Reason
		}
		if r.Death != nil {
			line += " dead:" + r.Death.Reason
		}
		all = append(all, line)
	}
	return all
}

// deadScript is a record that drains dead letters as well.
type deadScript struct {
	*record
	deaths int
	traces []string
}

func (d *deadScript) HandleDead(ctx context.Context, _ order, _ *runtime.DeadMetadata) {
	d.deaths++
	d.traces = append(d.traces, runtime.TraceID(ctx))
}

func TestO1_Record(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		sink := &memorySink{}
		var traces []string
		h := runtime.HandlerFunc[order](func(ctx context.Context, _ order, _ *runtime.Metadata) runtime.Outcome {
			traces = append(traces, runtime.TraceID(ctx))
			time.Sleep(time.Second)
			return runtime.Ack.Because("fine")
		})
		stop := f.run(runtime.Handle("orders", runtime.Audited[order](h, sink, runtime.AuditConfig{MaxPayload: 5}), runtime.Concurrency(1)))
		began := time.Now()
		f.put(memory.Raw{Body: []byte(`{"id":1}`), Headers: header.Map{header.Trace: "t-1", "tenant": "a", header.MessageID: "m-1"}, ContentType: "application/json"})
		f.put(memory.Raw{Body: []byte(`{"id":2}`)})
		synctest.Wait()
		time.Sleep(settleTime)
		drains(t, stop)
		if len(sink.records) != 2 {
			t.Fatalf("got %q", sink.lines())
		}
		got := sink.records[0]
		want := runtime.AuditRecord{
			TraceID: "t-1", Event: runtime.AuditHandled, Time: began, Duration: time.Second, Pod: "pod-0", Topology: "orders", Group: "workers", Queue: "orders",
			Outcome: "ack", Reason: "fine", MessageID: "m-1", DeliveryID: got.DeliveryID, DeliveryCount: new(uint32(1)), Timestamp: got.Timestamp,
			Headers: map[string]string{header.Trace: "t-1", "tenant": "a", header.MessageID: "m-1"}, ContentType: "application/json", Payload: []byte(`{"id"`), PayloadSize: 8,
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
		second := sink.records[1]
		if second.TraceID == "" || second.TraceID == "t-1" {
			t.Errorf("a message without a trace id got %q", second.TraceID)
		}
		if d := cmp.Diff([]string{"t-1", second.TraceID}, traces); d != "" {
			t.Errorf("what handlers see: %s", d)
		}
	})
}

func TestO2_EveryEndIsRecorded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		sink := &memorySink{}
		h := &deadScript{record: script(runtime.Ack)}
		inner := struct {
			runtime.Handler[order]
			runtime.DeadHandler[order]
		}{runtime.HandlerFunc[order](func(ctx context.Context, o order, m *runtime.Metadata) runtime.Outcome {
			switch m.RetryCount {
			case 0:
				panic("a bug")
			case 1:
				<-ctx.Done() // the deadline; what is returned then is dropped
				return runtime.Ack
			case 2:
				return runtime.Outcome{} // none: a retry
			}
			return runtime.Reject.Because("enough")
		}), h}
		stop := f.run(runtime.Handle("orders", runtime.Audited[order](inner, sink, runtime.AuditConfig{}), runtime.HandlerTimeout(10*time.Second)))
		f.publish(1)
		time.Sleep(settleTime)
		drains(t, stop)
		want := []string{
			"panic retry retries=0",
			"timeout retry retries=1 no outcome within 10s",
			"handled retry retries=2",
			"handled reject retries=3 enough",
			"handled handled retries=3 dead:rejected",
		}
		if d := cmp.Diff(want, sink.lines()); d != "" {
			t.Error(d)
		}
		if h.deaths != 1 || h.traces[0] != sink.records[4].TraceID {
			t.Errorf("the dead handler was called %d times, with traces %q", h.deaths, h.traces)
		}
	})
}

func TestO2_TimeoutRecordsWhatWasApplied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		sink := &memorySink{}
		h := &slow{began: time.Now()}
		stop := f.run(runtime.Handle("orders", runtime.Audited[order](h, sink, runtime.AuditConfig{Strict: true}),
			runtime.HandlerTimeoutOutcome(runtime.Reject), runtime.HandlerTimeout(time.Second)))
		f.publish(1)
		time.Sleep(settleTime)
		drains(t, stop)
		if d := cmp.Diff([]string{"timeout reject retries=0 no outcome within 1s"}, sink.lines()); d != "" {
			t.Error(d)
		}
		f.wantLeft(map[string]int{"orders": 0, "orders-dlq": 1})
	})
}

func TestO2_AbandonedAtShutdown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		sink := &memorySink{}
		h := &slow{began: time.Now(), ignore: make(chan struct{})}
		stop := f.run(runtime.Handle("orders", runtime.Audited[order](h, sink, runtime.AuditConfig{}), runtime.DrainTimeout(time.Second)))
		f.publish(1)
		synctest.Wait()
		if err := stop(); !errors.Is(err, runtime.ErrDrainTimeout) {
			t.Errorf("got %v", err)
		}
		close(h.ignore)
		synctest.Wait()
		if d := cmp.Diff([]string{"abandoned release retries=0"}, sink.lines()); d != "" {
			t.Error(d)
		}
		f.wantLeft(map[string]int{"orders": 1})
	})
}

func TestO2_FailingSinkChangesNoOutcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		reg := prometheus.NewRegistry()
		sink := &memorySink{err: errors.New("disk full")}
		h := script(runtime.Ack)
		stop := f.run(runtime.Handle("orders", runtime.Audited[order](h, sink, runtime.AuditConfig{})), runtime.Registerer(reg))
		f.publish(1, 2, 3)
		synctest.Wait()
		sink.fail(nil)
		f.publish(4)
		time.Sleep(time.Second)
		drains(t, stop)
		if h.count() != 4 {
			t.Errorf("%d calls, want 4", h.count())
		}
		f.wantLeft(map[string]int{"orders": 0, "orders-hold-5s": 0, "orders-dlq": 0})
		if got := counter(t, reg, "shove_audit_failures_total"); got != 3 {
			t.Errorf("counted %v lost records, want 3", got)
		}
		if d := cmp.Diff([]string{"handled ack retries=0"}, sink.lines()); d != "" {
			t.Error(d)
		}
	})
}

// TestO2_HangingSinkChangesNoOutcome: a sink that never answers costs neither a deadline nor, once it is known, time.
func TestO2_HangingSinkChangesNoOutcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		release := make(chan struct{})
		sink := runtime.AuditSinkFunc(func(context.Context, []runtime.AuditRecord) error { <-release; return nil })
		h := script(runtime.Ack)
		stop := f.run(runtime.Handle("orders", runtime.Audited[order](h, sink, runtime.AuditConfig{Buffer: 3}),
			runtime.HandlerTimeout(500*time.Millisecond), runtime.Concurrency(1)))
		began := time.Now()
		f.publish(1, 2, 3, 4, 5, 6)
		time.Sleep(2 * time.Second)
		f.wantLeft(map[string]int{"orders": 0, "orders-hold-5s": 0, "orders-dlq": 0})
		if h.count() != 6 || h.calls[5].At > 500*time.Millisecond {
			t.Errorf("%d calls in %v, the last began after %v", h.count(), time.Since(began), h.calls[5].At)
		}
		close(release)
		drains(t, stop)
	})
}

func TestO2_StrictRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		sink := &memorySink{err: errors.New("disk full")}
		h := script(runtime.Reject)
		stop := f.run(runtime.Handle("orders", runtime.Audited[order](h, sink, runtime.AuditConfig{Strict: true})))
		f.publish(1)
		time.Sleep(time.Second)
		f.wantLeft(map[string]int{"orders-hold-5s": 1, "orders-dlq": 0})
		sink.fail(nil)
		time.Sleep(settleTime)
		drains(t, stop)
		f.wantLeft(map[string]int{"orders": 0, "orders-dlq": 1})
		if d := cmp.Diff([]string{"handled reject retries=1"}, sink.lines()); d != "" {
			t.Error(d)
		}
	})
}

func TestO2_SinkPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		sink := runtime.AuditSinkFunc(func(context.Context, []runtime.AuditRecord) error { panic("no") })
		h := script(runtime.Ack)
		stop := f.run(runtime.Handle("orders", runtime.Audited[order](h, sink, runtime.AuditConfig{})))
		f.publish(1)
		time.Sleep(time.Second)
		drains(t, stop)
		f.wantLeft(map[string]int{"orders": 0, "orders-hold-5s": 0})
	})
}

// TestO2_LastRecordsAreWritten: a drain waits for records that their sink has not taken yet.
func TestO2_LastRecordsAreWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		sink := &memorySink{delay: 4 * time.Second}
		stop := f.run(runtime.Handle("orders", runtime.Audited[order](script(runtime.Ack), sink, runtime.AuditConfig{})))
		f.publish(1, 2)
		synctest.Wait()
		drains(t, stop)
		if len(sink.lines()) != 2 {
			t.Errorf("got %q", sink.lines())
		}
	})
}

func withAuditTopology(c *config.RuntimeConfig) {
	c.Topologies = append(c.Topologies, config.Topology{Name: runtime.AuditTopology, Broker: "mem", Queue: runtime.AuditTopology})
	c.Publish = append(c.Publish, config.Publish{Topology: runtime.AuditTopology})
}

func TestO3_TopologySink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, withAuditTopology)
		stop := f.run(runtime.Handle("orders", runtime.Audited[order](script(runtime.Ack), runtime.TopologySink(runtime.AuditTopology), runtime.AuditConfig{})))
		f.publish(1)
		synctest.Wait()
		drains(t, stop)
		all := f.server.Peek(runtime.AuditTopology)
		if len(all) != 1 {
			t.Fatalf("%d records, want 1", len(all))
		}
		var rec runtime.AuditRecord
		if err := json.Unmarshal(all[0].Body, &rec); err != nil {
			t.Fatal(err)
		}
		if rec.Outcome != "ack" || rec.MessageID != "m1" || string(rec.Payload) != `{"id":1}` {
			t.Errorf("got %s", all[0].Body)
		}
		if trace, _ := all[0].Headers.Text(header.Trace); trace != rec.TraceID {
			t.Errorf("the record's message has trace %q, the record %q", trace, rec.TraceID)
		}
	})
}

func TestO3_AuditIsNotAudited(t *testing.T) {
	f := newFixture(t, func(c *config.RuntimeConfig) {
		withAuditTopology(c)
		c.Consumers = []config.Consumer{{Group: "auditors", Topology: runtime.AuditTopology}}
	})
	h := runtime.Audited[order](script(runtime.Ack), runtime.TopologySink(runtime.AuditTopology), runtime.AuditConfig{})
	_, err := runtime.New(runtime.Drivers(f.driver), runtime.Config(f.cfg), runtime.Registerer(prometheus.NewRegistry()), runtime.Handle(runtime.AuditTopology, h))
	if err == nil || !strings.Contains(err.Error(), "would never end") {
		t.Errorf("got %v", err)
	}
}

func TestO3_MissingAuditTopologyIsAStartError(t *testing.T) {
	f := newFixture(t, nil)
	h := runtime.Audited[order](script(runtime.Ack), runtime.TopologySink(runtime.AuditTopology), runtime.AuditConfig{})
	_, err := runtime.New(runtime.Drivers(f.driver), runtime.Config(f.cfg), runtime.Registerer(prometheus.NewRegistry()), runtime.Handle("orders", h))
	if err == nil || !strings.Contains(err.Error(), runtime.AuditTopology) {
		t.Errorf("got %v", err)
	}
}

func TestO3_LogSink(t *testing.T) {
	records := []runtime.AuditRecord{{TraceID: "t-1", Event: runtime.AuditHandled, Outcome: "ack", Topology: "orders", Payload: []byte("s3cr3t"),
		Headers: map[string]string{"authorization": "s3cr3t"}, Reason: "fine", Death: &runtime.AuditDeath{Reason: "rejected"}}}
	for name, c := range map[string]struct {
		sink func(*slog.Logger) runtime.AuditSink
		want bool
	}{"without payload": {runtime.LogSink, false}, "with payload": {runtime.LogSinkWithPayload, true}} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			if err := c.sink(slog.New(slog.NewTextHandler(&out, nil))).Write(t.Context(), records); err != nil {
				t.Fatal(err)
			}
			for _, want := range []string{"trace=t-1", "outcome=ack", "reason=fine", "death.reason=rejected"} {
				if !strings.Contains(out.String(), want) {
					t.Errorf("without %s: %s", want, out.String())
				}
			}
			if strings.Contains(out.String(), "s3cr3t") != c.want {
				t.Errorf("payload and headers: got %s", out.String())
			}
		})
	}
}

// TestO1_WrapperKeepsTheContract: it drains dead letters exactly where the handler does.
func TestO1_WrapperKeepsTheContract(t *testing.T) {
	sink := &memorySink{}
	if _, ok := runtime.Audited[order](script(runtime.Ack), sink, runtime.AuditConfig{}).(runtime.DeadHandler[order]); ok {
		t.Error("a handler that drains nothing became a dead handler")
	}
	if _, ok := runtime.Audited[order](&deadScript{record: script(runtime.Ack)}, sink, runtime.AuditConfig{}).(runtime.DeadHandler[order]); !ok {
		t.Error("a dead handler was lost")
	}
	for name, opt := range map[string]runtime.Option{
		"no handler": runtime.Handle("orders", runtime.Audited[order](nil, sink, runtime.AuditConfig{})),
		"no sink":    runtime.Handle("orders", runtime.Audited[order](script(runtime.Ack), nil, runtime.AuditConfig{})),
		"no dead":    runtime.HandleDead("orders", runtime.AuditedDead[order](nil, sink, runtime.AuditConfig{})),
	} {
		if _, err := runtime.New(opt); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// counter sums a counter over its series.
func counter(t *testing.T, reg *prometheus.Registry, name string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	total := 0.0
	for _, f := range families {
		if f.GetName() == name {
			for _, m := range f.Metric {
				total += m.Counter.GetValue()
			}
		}
	}
	return total
}
