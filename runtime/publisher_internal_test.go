package runtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/runtime/codec"
	"github.com/shove-dev/shove/runtime/metrics"
	"github.com/shove-dev/shove/topology"
)

// scriptedBroker answers each Publish with the next entry of a script, and with success after that.
type scriptedBroker struct {
	script  []func(msgs []broker.Message) error
	targets []error // answers of publishTarget
	calls   [][]broker.Message
	times   []time.Duration
	began   time.Time
	topo    topology.Topology
	limit   int64
	meter   *metrics.Metrics
}

func (b *scriptedBroker) publishes(name string) error {
	if name != "orders" {
		return fmt.Errorf("topology %q: %w", name, broker.ErrNotFound)
	}
	return nil
}
func (b *scriptedBroker) publishMetrics() *metrics.Metrics { return b.meter }
func (b *scriptedBroker) publishLogger() *slog.Logger      { return slog.New(slog.DiscardHandler) }

func (b *scriptedBroker) publishTarget(context.Context, string) (publishTarget, error) {
	if len(b.targets) > 0 {
		err := b.targets[0]
		b.targets = b.targets[1:]
		if err != nil {
			return publishTarget{}, err
		}
	}
	return publishTarget{publisher: b, kind: topology.Memory, topology: b.topo, limit: b.limit, release: func() {}}, nil
}

func (b *scriptedBroker) Publish(_ context.Context, msgs []broker.Message) error {
	b.calls, b.times = append(b.calls, msgs), append(b.times, time.Since(b.began))
	if len(b.script) == 0 {
		return nil
	}
	next := b.script[0]
	b.script = b.script[1:]
	return next(msgs)
}

func (b *scriptedBroker) Close(context.Context) error { return nil }

// fails is an answer that lists items.
func fails(items ...broker.PublishItem) func([]broker.Message) error {
	return func([]broker.Message) error { return &broker.PublishError{Items: items} }
}

func item(index int, err error) broker.PublishItem {
	return broker.PublishItem{Index: index, Err: fmt.Errorf("test: %w", err)}
}

func newScripted(t *testing.T, script ...func([]broker.Message) error) *scriptedBroker {
	t.Helper()
	m, err := metrics.New(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	topo, err := topology.Derive(topology.Spec{Queue: "orders"})
	if err != nil {
		t.Fatal(err)
	}
	return &scriptedBroker{script: script, began: time.Now(), topo: topo, meter: m}
}

func stringsOf(values ...string) []Item[string] {
	var items []Item[string]
	for _, v := range values {
		items = append(items, Item[string]{Value: v})
	}
	return items
}

// report is a PublishError without its texts.
type report struct{ Confirmed, Failed, Unknown []int }

func reportOf(t *testing.T, err error) report {
	t.Helper()
	if err == nil {
		return report{}
	}
	e, ok := errors.AsType[*PublishError](err)
	if !ok {
		t.Fatalf("got %v, want a *PublishError", err)
	}
	r := report{Confirmed: e.Confirmed}
	for _, f := range e.Failed {
		r.Failed = append(r.Failed, f.Index)
	}
	for _, f := range e.Unknown {
		r.Unknown = append(r.Unknown, f.Index)
	}
	return r
}

func bodies(msgs []broker.Message) []string {
	var all []string
	for _, m := range msgs {
		all = append(all, string(m.Body))
	}
	return all
}

func TestQ3_BatchesAreReportedOverEveryAttempt(t *testing.T) {
	all := []string{"a", "b", "c", "d"}
	cases := map[string]struct {
		script  []func([]broker.Message) error
		targets []error
		want    report
		sent    [][]string
		at      []time.Duration
	}{
		"all confirmed": {sent: [][]string{all}, at: []time.Duration{0}},
		"a refused one is sent again, alone": {
			script: []func([]broker.Message) error{fails(item(2, broker.ErrRejected))},
			sent:   [][]string{all, {"c"}}, at: []time.Duration{0, 100 * time.Millisecond},
		},
		"an unknown one is not": {
			script: []func([]broker.Message) error{fails(item(1, broker.ErrUnknown), item(3, broker.ErrRejected))},
			want:   report{Confirmed: []int{0, 2, 3}, Unknown: []int{1}},
			sent:   [][]string{all, {"d"}}, at: []time.Duration{0, 100 * time.Millisecond},
		},
		"indexes are the caller's, whatever was left out before": {
			script: []func([]broker.Message) error{
				fails(item(0, broker.ErrUnavailable), item(2, broker.ErrUnavailable), item(3, broker.ErrUnroutable)),
				fails(item(1, broker.ErrUnknown)),
			},
			want: report{Confirmed: []int{0, 1}, Failed: []int{3}, Unknown: []int{2}},
			sent: [][]string{all, {"a", "c"}}, at: []time.Duration{0, 100 * time.Millisecond},
		},
		"three attempts, 100 ms doubling": {
			script: []func([]broker.Message) error{fails(item(0, broker.ErrRejected)), fails(item(0, broker.ErrRejected)), fails(item(0, broker.ErrRejected))},
			want:   report{Confirmed: []int{1, 2, 3}, Failed: []int{0}},
			sent:   [][]string{all, {"a"}, {"a"}}, at: []time.Duration{0, 100 * time.Millisecond, 300 * time.Millisecond},
		},
		"what no attempt can help fails at once": {
			script: []func([]broker.Message) error{fails(item(0, broker.ErrUnroutable), item(1, broker.ErrTooLarge), item(2, broker.ErrUnauthorized), item(3, broker.ErrClosed))},
			want:   report{Failed: []int{0, 1, 2, 3}},
			sent:   [][]string{all}, at: []time.Duration{0},
		},
		"one error for all, not stored": {
			script: []func([]broker.Message) error{func([]broker.Message) error { return broker.ErrUnavailable }},
			sent:   [][]string{all, all}, at: []time.Duration{0, 100 * time.Millisecond},
		},
		"an error that says nothing is unknown": {
			script: []func([]broker.Message) error{func([]broker.Message) error { return errors.New("boom") }},
			want:   report{Unknown: []int{0, 1, 2, 3}},
			sent:   [][]string{all}, at: []time.Duration{0},
		},
		"an item that says nothing is unknown": {
			script: []func([]broker.Message) error{fails(broker.PublishItem{Index: 0}, broker.PublishItem{Index: 1, Err: errors.New("boom")}, broker.PublishItem{Index: 99, Err: broker.ErrRejected})},
			want:   report{Confirmed: []int{2, 3}, Unknown: []int{0, 1}},
			sent:   [][]string{all}, at: []time.Duration{0},
		},
		"unknown wins over not stored": {
			script: []func([]broker.Message) error{fails(broker.PublishItem{Index: 0, Err: errors.Join(broker.ErrUnavailable, broker.ErrUnknown)})},
			want:   report{Confirmed: []int{1, 2, 3}, Unknown: []int{0}},
			sent:   [][]string{all}, at: []time.Duration{0},
		},
		"no connection at first": {
			targets: []error{broker.ErrUnavailable, broker.ErrUnavailable},
			sent:    [][]string{all}, at: []time.Duration{300 * time.Millisecond},
		},
		"no connection at all": {
			targets: []error{broker.ErrUnavailable, broker.ErrUnavailable, broker.ErrUnavailable},
			want:    report{Failed: []int{0, 1, 2, 3}},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newScripted(t, c.script...)
				b.targets = c.targets
				p, err := newPublisher[string](b, "orders", PublisherConfig{Codec: codec.Raw})
				if err != nil {
					t.Fatal(err)
				}
				err = p.PublishBatch(t.Context(), stringsOf(all...))
				if d := cmp.Diff(c.want, reportOf(t, err)); d != "" {
					t.Errorf("%s\n%v", d, err)
				}
				var sent [][]string
				ids := map[string]string{}
				for _, msgs := range b.calls {
					sent = append(sent, bodies(msgs))
					for _, m := range msgs {
						if id, again := ids[string(m.Body)]; again && id != m.ID {
							t.Errorf("%q was sent with two ids", m.Body)
						}
						ids[string(m.Body)] = m.ID
					}
				}
				if d := cmp.Diff(c.sent, sent); d != "" {
					t.Errorf("sent: %s", d)
				}
				if d := cmp.Diff(c.at, b.times); d != "" {
					t.Errorf("times: %s", d)
				}
			})
		})
	}
}

func TestPublishEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newScripted(t, fails(item(0, broker.ErrUnavailable)))
		p, err := newPublisher[string](b, "orders", PublisherConfig{Codec: codec.Raw, Attempts: 100})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		err = p.Publish(ctx, "a")
		if !errors.Is(err, broker.ErrUnavailable) || time.Since(b.began) != 50*time.Millisecond {
			t.Errorf("got %v after %v", err, time.Since(b.began))
		}
		calls := len(b.calls)
		if err := p.Publish(ctx, "b"); !errors.Is(err, context.DeadlineExceeded) || len(b.calls) != calls || len(reportOf(t, err).Failed) != 1 {
			t.Errorf("with a context that is over: got %v, and %d calls of the broker", err, len(b.calls)-calls)
		}
	})
}

func TestQ1_Message(t *testing.T) {
	b := newScripted(t)
	p, err := newPublisher[map[string]int](b, "orders", PublisherConfig{Type: "shop.order"})
	if err != nil {
		t.Fatal(err)
	}
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	ctx := WithTrace(t.Context(), "trace-1")
	if err := p.Publish(ctx, map[string]int{"n": 1}, WithKey("k"), WithRoutingKey("r"), WithTimestamp(at), WithHeader("tenant", "a"),
		WithHeaders(map[string]any{"n": 7, "f": float32(0.5), "b": []byte{1}, "t": at, "yes": true, "u": uint32(3)})); err != nil {
		t.Fatal(err)
	}
	if err := p.Publish(ctx, nil, WithType("other"), WithTraceID("trace-2"), WithMessageID("mine"), WithContentType("text/plain")); err != nil {
		t.Fatal(err)
	}
	got := b.calls[0][0]
	if id, err := uuid.Parse(got.ID); err != nil || id.Version() != 7 {
		t.Errorf("the id %q is no UUIDv7", got.ID)
	}
	got.ID = ""
	want := broker.Message{Key: "k", RoutingKey: "r", ContentType: "application/json", Body: []byte(`{"n":1}`), Timestamp: at,
		Headers: header.Map{"tenant": "a", "n": int64(7), "f": 0.5, "b": []byte{1}, "t": at, "yes": true, "u": int64(3), "x-shove-type": "shop.order", "x-trace-id": "trace-1"}}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	second := b.calls[1][0]
	if second.ID != "mine" || second.ContentType != "text/plain" || second.Headers["x-shove-type"] != "other" || second.Headers["x-trace-id"] != "trace-2" || second.Timestamp.IsZero() {
		t.Errorf("got %+v", second)
	}
}

func TestQ4_ReservedHeaders(t *testing.T) {
	for _, name := range []string{"x-shove-retry-count", "X-Shove-Retry-Count", "x-shove-anything", "x-retry-count", "Shove-Retry-Count", "x-message-id",
		"x-death", "x-first-death-queue", "x-death-reason", "CC", "bcc", "Nats-Msg-Id", "x-delivery-count", "x-shove-key", "x-shove-user-id"} {
		t.Run(name, func(t *testing.T) {
			b := newScripted(t)
			p, err := newPublisher[string](b, "orders", PublisherConfig{})
			if err != nil {
				t.Fatal(err)
			}
			err = p.Publish(t.Context(), "secret", WithHeader(name, "1"))
			if !errors.Is(err, ErrReservedHeader) || len(b.calls) > 0 {
				t.Errorf("got %v and %d calls of the broker, want ErrReservedHeader and none", err, len(b.calls))
			}
			if !strings.Contains(err.Error(), name) || strings.Contains(err.Error(), "secret") {
				t.Errorf("the error names the header and not the body: %v", err)
			}
		})
	}
}

func TestInvalidMessagesFailAlone(t *testing.T) {
	cases := map[string]struct {
		opts []PublishOption
		body string
		want error
	}{
		"header value": {opts: []PublishOption{WithHeader("h", struct{}{})}, want: ErrInvalidMessage},
		"huge number":  {opts: []PublishOption{WithHeader("h", uint64(1<<63))}, want: ErrInvalidMessage},
		"huge uint":    {opts: []PublishOption{WithHeader("h", uint(1<<63))}, want: ErrInvalidMessage},
		"no name":      {opts: []PublishOption{WithHeader("", "v")}, want: ErrInvalidMessage},
		"long name":    {opts: []PublishOption{WithHeader(strings.Repeat("n", 256), "v")}, want: ErrInvalidMessage},
		"line break":   {opts: []PublishOption{WithHeader("a\r\nb", "v")}, want: ErrInvalidMessage},
		"empty id":     {opts: []PublishOption{WithMessageID("")}, want: ErrInvalidMessage},
		"oversize":     {body: strings.Repeat("x", 11), want: broker.ErrTooLarge},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			b := newScripted(t)
			b.limit = 10
			p, err := newPublisher[string](b, "orders", PublisherConfig{Codec: codec.Raw})
			if err != nil {
				t.Fatal(err)
			}
			err = p.PublishBatch(t.Context(), []Item[string]{{Value: "exactly 10"}, {Value: c.body, Options: c.opts}, {Value: "c"}})
			if !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
			if d := cmp.Diff(report{Confirmed: []int{0, 2}, Failed: []int{1}}, reportOf(t, err)); d != "" {
				t.Error(d)
			}
			if d := cmp.Diff([][]string{{"exactly 10", "c"}}, [][]string{bodies(b.calls[0])}); d != "" {
				t.Error(d)
			}
		})
	}
	t.Run("encode", func(t *testing.T) {
		p, err := newPublisher[any](newScripted(t), "orders", PublisherConfig{})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Publish(t.Context(), func() {}); !errors.Is(err, codec.ErrEncode) {
			t.Errorf("got %v, want ErrEncode", err)
		}
	})
}

func TestK2_KeyFromABodyField(t *testing.T) {
	cases := map[string]struct {
		field, body, want string
		opts              []PublishOption
		err               error
	}{
		"text":           {field: "customer", body: `{"customer":"ann"}`, want: "ann"},
		"number":         {field: "customer", body: `{"customer":17}`, want: "17"},
		"nested":         {field: "customer.id", body: `{"customer":{"id":"ann"}}`, want: "ann"},
		"explicit wins":  {field: "customer", body: `{"customer":"ann"}`, opts: []PublishOption{WithKey("bob")}, want: "bob"},
		"missing":        {field: "customer", body: `{}`, err: ErrInvalidMessage},
		"null":           {field: "customer", body: `{"customer":null}`, err: ErrInvalidMessage},
		"not an object":  {field: "customer.id", body: `{"customer":"ann"}`, err: ErrInvalidMessage},
		"not JSON":       {field: "customer", body: `ann`, err: ErrInvalidMessage},
		"nobody says it": {body: `{}`, err: ErrInvalidMessage},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			b := newScripted(t)
			topo, err := topology.Derive(topology.Spec{Queue: "orders", Sequenced: &topology.SequencedSpec{Key: c.field, AllowMessageLoss: true}})
			if err != nil {
				t.Fatal(err)
			}
			b.topo = topo
			p, err := newPublisher[string](b, "orders", PublisherConfig{Codec: codec.Raw})
			if err != nil {
				t.Fatal(err)
			}
			err = p.Publish(t.Context(), c.body, c.opts...)
			if !errors.Is(err, c.err) || (err == nil) != (c.err == nil) {
				t.Fatalf("got %v, want %v", err, c.err)
			}
			if err == nil && b.calls[0][0].Key != c.want {
				t.Errorf("got key %q, want %q", b.calls[0][0].Key, c.want)
			}
		})
	}
}

func TestNewPublisherRefuses(t *testing.T) {
	if _, err := newPublisher[string](newScripted(t), "elsewhere", PublisherConfig{}); !errors.Is(err, broker.ErrNotFound) {
		t.Errorf("a topology that is not there: got %v", err)
	}
	if _, err := newPublisher[int](newScripted(t), "orders", PublisherConfig{Codec: codec.Raw}); err == nil {
		t.Error("a codec that does not take the type was accepted")
	}
	if _, err := newPublisher[int](newScripted(t), "orders", PublisherConfig{Attempts: -1}); err == nil {
		t.Error("a negative number of attempts was accepted")
	}
}

func TestRawPublisher(t *testing.T) {
	b := newScripted(t)
	p, err := newRawPublisher(b, PublisherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Publish(t.Context(), "orders", []byte("x"), WithContentType("text/plain")); err != nil {
		t.Fatal(err)
	}
	if m := b.calls[0][0]; string(m.Body) != "x" || m.ContentType != "text/plain" || m.ID == "" {
		t.Errorf("got %+v", m)
	}
	if err := p.Publish(t.Context(), "elsewhere", nil); !errors.Is(err, broker.ErrNotFound) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
	if len(p.senders) != 1 {
		t.Error("a name that is not in the configuration leaves something behind")
	}
}

func TestP_PublishMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newScripted(t, fails(item(0, broker.ErrUnknown), item(1, broker.ErrUnroutable)))
		reg := prometheus.NewRegistry()
		m, err := metrics.New(reg)
		if err != nil {
			t.Fatal(err)
		}
		b.meter = m
		p, err := newPublisher[string](b, "orders", PublisherConfig{})
		if err != nil {
			t.Fatal(err)
		}
		_ = p.PublishBatch(t.Context(), stringsOf("a", "b", "c", "d"))
		got := map[string]float64{}
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			for _, metric := range f.Metric {
				key := f.GetName()
				for _, l := range metric.Label {
					key += " " + l.GetValue()
				}
				if c := metric.Counter; c != nil && c.GetValue() > 0 {
					got[key] = c.GetValue()
				}
				if h := metric.Histogram; h != nil && h.GetSampleCount() > 0 {
					got[key] = float64(h.GetSampleCount())
				}
			}
		}
		want := map[string]float64{
			"shove_messages_published_total success orders":         2,
			"shove_messages_published_total error orders":           1,
			"shove_messages_published_total unknown orders":         1,
			"shove_message_publish_duration_seconds unknown orders": 1,
			"shove_backend_errors_total inmemory publish":           1,
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
	})
}

func TestPublishErrorStaysReadable(t *testing.T) {
	e := &PublishError{Topology: "orders"}
	for i := range 1000 {
		e.Failed = append(e.Failed, PublishFailure{Index: i, Err: broker.ErrRejected})
	}
	want := `publish: "orders": 0 confirmed, 1000 failed, 0 unknown; message 0: rejected by the broker; message 1: rejected by the broker; message 2: rejected by the broker; and 997 more`
	if d := cmp.Diff(want, e.Error()); d != "" {
		t.Error(d)
	}
}

func FuzzPublishHeaders(f *testing.F) {
	f.Add("x-shove-a", "v")
	f.Add("", "")
	f.Add("a:b", "c")
	f.Fuzz(func(t *testing.T, name, value string) {
		d := newDraft(t.Context(), PublisherConfig{Codec: codec.Raw}, []PublishOption{WithHeader(name, value), WithKey(value)}, nil)
		if d.err == nil && (header.Reserved(name) || name == "" || d.msg.Headers[name] != value) {
			t.Errorf("header %q was accepted", name)
		}
	})
}
