package runtime_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/codec"
	"github.com/shove-dev/shove/runtime/config"
)

// publisherFixture is a runtime that only publishes, not running yet.
func publisherFixture(t *testing.T, limit int64) (*fixture, *runtime.Runtime) {
	t.Helper()
	f := newFixture(t, func(c *config.RuntimeConfig) {
		c.Consumers, c.Publish = nil, []config.Publish{{Topology: "orders", MaxMessageSize: limit}}
	})
	r, err := runtime.New(runtime.Drivers(f.driver), runtime.Config(f.cfg), runtime.Declare(), runtime.HTTPAddr(""), runtime.Registerer(prometheus.NewRegistry()))
	if err != nil {
		t.Fatal(err)
	}
	return f, r
}

// running runs a runtime; the returned function ends it.
func running(t *testing.T, r *runtime.Runtime) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	synctest.Wait()
	return func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestQ1_PublishBeforeDuringAndAfterRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, r := publisherFixture(t, 0)
		p, err := runtime.NewPublisher[order](r, "orders", runtime.PublisherConfig{})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Publish(t.Context(), order{1}); err != nil {
			t.Errorf("before: %v", err)
		}
		stop := running(t, r)
		if err := p.PublishBatch(t.Context(), []runtime.Item[order]{{Value: order{2}}, {Value: order{3}, Options: []runtime.PublishOption{runtime.WithHeader("tenant", "a")}}}); err != nil {
			t.Errorf("during: %v", err)
		}
		stop()
		if err := p.Publish(t.Context(), order{4}); !errors.Is(err, broker.ErrClosed) {
			t.Errorf("after: got %v, want ErrClosed", err)
		}
		all := f.server.Peek("orders")
		var got []string
		ids := map[string]bool{}
		for _, m := range all {
			got = append(got, string(m.Body))
			id, _ := m.Headers.Text(header.MessageID)
			ids[id] = true
		}
		if d := cmp.Diff([]string{`{"id":1}`, `{"id":2}`, `{"id":3}`}, got); d != "" {
			t.Error(d)
		}
		if len(ids) != 3 || ids[""] {
			t.Errorf("message ids: %v", ids)
		}
		if all[2].Headers["tenant"] != "a" || all[2].ContentType != "application/json" {
			t.Errorf("got %+v", all[2])
		}
	})
}

func TestQ3_OnTheBroker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, r := publisherFixture(t, 0)
		p, err := runtime.NewPublisher[order](r, "orders", runtime.PublisherConfig{})
		if err != nil {
			t.Fatal(err)
		}
		f.server.FailPublishes(1, broker.ErrRejected)
		if err := p.Publish(t.Context(), order{1}); err != nil {
			t.Errorf("a refused message was not sent again: %v", err)
		}
		f.server.DropPublishConfirms(1)
		err = p.Publish(t.Context(), order{2})
		e, ok := errors.AsType[*runtime.PublishError](err)
		if !ok || len(e.Unknown) != 1 || !errors.Is(err, broker.ErrUnknown) || e.Unknown[0].MessageID == "" {
			t.Errorf("got %v, want one unknown message with its id", err)
		}
		if n := f.left("orders"); n != 2 { // stored, although nobody knows
			t.Errorf("%d messages, want 2: an unknown one is not sent again", n)
		}
		f.server.Stop()
		began := time.Now()
		if err := p.Publish(t.Context(), order{3}); !errors.Is(err, broker.ErrUnavailable) {
			t.Errorf("got %v, want ErrUnavailable", err)
		}
		if took := time.Since(began); took != 300*time.Millisecond {
			t.Errorf("three attempts took %v", took)
		}
		f.server.Start()
		if err := p.Publish(t.Context(), order{4}); err != nil {
			t.Errorf("after the broker came back: %v", err)
		}
		running(t, r)()
	})
}

func TestPublishSizeLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, r := publisherFixture(t, 8)
		p, err := runtime.NewPublisher[string](r, "orders", runtime.PublisherConfig{Codec: codec.Raw})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Publish(t.Context(), strings.Repeat("x", 8)); err != nil {
			t.Errorf("exactly the limit: %v", err)
		}
		if err := p.Publish(t.Context(), strings.Repeat("x", 9)); !errors.Is(err, broker.ErrTooLarge) {
			t.Errorf("one more: got %v, want ErrTooLarge", err)
		}
		f.wantLeft(map[string]int{"orders": 1})
		running(t, r)()
	})
}

func TestPublishOnlyWhereTheConfigurationSays(t *testing.T) {
	f := newFixture(t, nil) // a consumer, and no publish entry
	r, err := runtime.New(runtime.Drivers(f.driver), runtime.Config(f.cfg), runtime.Registerer(prometheus.NewRegistry()), runtime.Handle[order]("orders", script(runtime.Ack)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := runtime.NewPublisher[order](r, "orders", runtime.PublisherConfig{}); !errors.Is(err, broker.ErrNotFound) || !strings.Contains(err.Error(), "publishers") {
		t.Errorf("got %v, want ErrNotFound and what to do", err)
	}
	raw, err := runtime.NewRawPublisher(r, runtime.PublisherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Publish(t.Context(), "orders", nil); !errors.Is(err, broker.ErrNotFound) {
		t.Errorf("raw: got %v", err)
	}
}

// TestPublishWithoutDriver: a program that forgot a driver gets a sentence, not a crash.
func TestPublishWithoutDriver(t *testing.T) {
	f, _ := publisherFixture(t, 0)
	r, err := runtime.New(runtime.Config(f.cfg), runtime.Registerer(prometheus.NewRegistry()))
	if err != nil {
		t.Fatal(err)
	}
	p, err := runtime.NewPublisher[order](r, "orders", runtime.PublisherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Publish(t.Context(), order{1}); !errors.Is(err, broker.ErrUnsupported) || !strings.Contains(err.Error(), "runtime.Drivers") {
		t.Errorf("got %v", err)
	}
}

// TestPublishedTraceFollowsTheHandler: what an audited handler publishes belongs to the trace of what it handles.
func TestPublishedTraceFollowsTheHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *config.RuntimeConfig) {
			c.Topologies = append(c.Topologies, config.Topology{Name: "bills", Broker: "mem", Queue: "bills"})
			c.Publish = []config.Publish{{Topology: "bills"}}
		})
		var bills *runtime.Publisher[order]
		sink := &memorySink{}
		h := runtime.ErrorFunc[order](func(ctx context.Context, o order, _ *runtime.Metadata) error { return bills.Publish(ctx, o) })
		r, err := runtime.New(runtime.Drivers(f.driver), runtime.Config(f.cfg), runtime.Declare(), runtime.HTTPAddr(""), runtime.Registerer(prometheus.NewRegistry()),
			runtime.Handle("orders", runtime.Audited[order](h, sink, runtime.AuditConfig{})))
		if err != nil {
			t.Fatal(err)
		}
		if bills, err = runtime.NewPublisher[order](r, "bills", runtime.PublisherConfig{}); err != nil {
			t.Fatal(err)
		}
		stop := running(t, r)
		f.publish(1)
		synctest.Wait()
		stop()
		all := f.server.Peek("bills")
		if len(all) != 1 || len(sink.records) != 1 || all[0].Headers[header.Trace] != sink.records[0].TraceID {
			t.Errorf("got %+v and records %+v", all, sink.records)
		}
	})
}
