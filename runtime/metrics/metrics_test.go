package metrics

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"

	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

var update = flag.Bool("update", false, "write the table into docs/metrics.md")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// moveAll touches every metric once.
func moveAll(m *Metrics) {
	c := m.Consumer("orders", "worker")
	c.Consumed(settle.VerdictAck)
	c.Failed(Timeout)
	c.Discarded(settle.Rejected)
	c.Duration(settle.VerdictRetry, 20*time.Millisecond)
	c.Size(300)
	c.InflightAdd(2)
	c.InflightAdd(-1)
	c.AbandonedAdd(1)
	c.Malformed(2)
	c.Suspect()
	c.Reconnect()
	c.Up(true)
	c.DeadHandled()
	c.DeadFailed(Panic)
	p := m.Publisher("orders")
	p.Published(PublishSuccess, 3)
	p.Duration(PublishUnknown, time.Second)
	m.BackendError(topology.RabbitMQ, Connection)
	m.AuditFailed("orders")
	m.Reloaded(Applied)
	m.Generation("a")
	m.Generation("b")
}

func TestP_NamesAndLabels(t *testing.T) {
	reg := prometheus.NewRegistry()
	m, err := New(reg)
	if err != nil {
		t.Fatal(err)
	}
	moveAll(m)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, f := range families {
		var labels []string
		for _, l := range f.Metric[0].Label {
			labels = append(labels, l.GetName())
		}
		got[f.GetName()] = strings.Join(labels, ",")
	}
	// The first nine are the contract of rule P, label by label. Gather sorts labels.
	want := map[string]string{
		"shove_messages_consumed_total":             "consumer_group,outcome,topic",
		"shove_messages_failed_total":               "consumer_group,reason,topic",
		"shove_messages_discarded_total":            "consumer_group,reason,topic",
		"shove_messages_published_total":            "outcome,topic",
		"shove_message_processing_duration_seconds": "consumer_group,outcome,topic",
		"shove_message_publish_duration_seconds":    "outcome,topic",
		"shove_message_size_bytes":                  "consumer_group,topic",
		"shove_messages_inflight":                   "consumer_group,topic",
		"shove_backend_errors_total":                "backend,kind",

		"shove_handlers_abandoned":                 "consumer_group,topic",
		"shove_malformed_headers_total":            "consumer_group,topic",
		"shove_suspect_messages_total":             "consumer_group,topic",
		"shove_reconnects_total":                   "consumer_group,topic",
		"shove_consumer_up":                        "consumer_group,topic",
		"shove_dead_letters_handled_total":         "consumer_group,topic",
		"shove_dead_letter_handler_failures_total": "consumer_group,reason,topic",
		"shove_audit_failures_total":               "topic",
		"shove_config_reloads_total":               "result",
		"shove_config_info":                        "generation",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Errorf("lint: %v %v", problems, err)
	}
}

func TestValues(t *testing.T) {
	m, err := New(nil)
	if err != nil {
		t.Fatal(err)
	}
	moveAll(m)
	c := m.Consumer("orders", "worker")
	for _, v := range []settle.Verdict{settle.VerdictUnset, settle.VerdictRetry, settle.VerdictPoison, settle.VerdictEarly, settle.VerdictRelease} {
		c.Consumed(v)
	}
	c.Failed("whatever a handler wrote")
	c.Discarded(Timeout)
	cases := []struct {
		name string
		got  float64
		want float64
	}{
		{"ack", testutil.ToFloat64(m.consumed.WithLabelValues("orders", "worker", "ack")), 1},
		{"retry", testutil.ToFloat64(m.consumed.WithLabelValues("orders", "worker", "retry")), 2},
		{"reject", testutil.ToFloat64(m.consumed.WithLabelValues("orders", "worker", "reject")), 1},
		{"defer", testutil.ToFloat64(m.consumed.WithLabelValues("orders", "worker", "defer")), 1},
		{"timeout", testutil.ToFloat64(m.failed.WithLabelValues("orders", "worker", "timeout")), 1},
		{"other", testutil.ToFloat64(m.failed.WithLabelValues("orders", "worker", "other")), 1},
		{"discarded", testutil.ToFloat64(m.discarded.WithLabelValues("orders", "worker", "rejected")), 1},
		{"discarded other", testutil.ToFloat64(m.discarded.WithLabelValues("orders", "worker", "other")), 1},
		{"inflight", testutil.ToFloat64(m.inflight), 1},
		{"abandoned", testutil.ToFloat64(m.abandoned), 1},
		{"malformed", testutil.ToFloat64(m.malformed), 2},
		{"up", testutil.ToFloat64(m.up), 1},
		{"published", testutil.ToFloat64(m.published.WithLabelValues("orders", "success")), 3},
		{"generation", testutil.ToFloat64(m.generation.WithLabelValues("b")), 1},
		{"generations", float64(testutil.CollectAndCount(m.generation)), 1},
		{"dead failed", testutil.ToFloat64(m.deadFailed.WithLabelValues("orders", "worker", "panic")), 1},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if c.got != c.want {
				t.Errorf("got %v, want %v", c.got, c.want)
			}
		})
	}
}

func TestP_Buckets(t *testing.T) {
	if lo, hi := durationBuckets[0], durationBuckets[len(durationBuckets)-1]; lo != 0.001 || hi != 10 {
		t.Errorf("durations from %v to %v, want 1 ms to 10 s", lo, hi)
	}
	if lo, hi := sizeBuckets[0], sizeBuckets[len(sizeBuckets)-1]; lo != 256 || hi != 10<<20 {
		t.Errorf("sizes from %v to %v, want 256 B to 10 MiB", lo, hi)
	}
}

func TestRegisterTwice(t *testing.T) {
	reg := prometheus.NewRegistry()
	first, err := New(reg)
	if err != nil {
		t.Fatal(err)
	}
	second, err := New(reg)
	if err != nil {
		t.Fatalf("the second time: %v", err)
	}
	first.Consumer("orders", "").Consumed(settle.VerdictAck)
	second.Consumer("orders", "").Consumed(settle.VerdictAck)
	if got := testutil.ToFloat64(first.consumed.WithLabelValues("orders", DefaultGroup, "ack")); got != 2 {
		t.Errorf("counted %v, want 2 in one collector", got)
	}
}

func TestRegisterConflict(t *testing.T) {
	reg := prometheus.NewRegistry()
	reg.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "shove_messages_consumed_total", Help: "somebody else's"}))
	if _, err := New(reg); err == nil {
		t.Error("a metric of the same name and another shape was accepted")
	}
}

func TestForget(t *testing.T) {
	reg := prometheus.NewRegistry()
	m, err := New(reg)
	if err != nil {
		t.Fatal(err)
	}
	gone, stays := m.Consumer("orders", "a"), m.Consumer("orders", "b")
	gone.Forget()
	gone.Consumed(settle.VerdictAck)
	stays.Consumed(settle.VerdictAck)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, metric := range f.Metric {
			for _, l := range metric.Label {
				if l.GetName() == labelGroup && l.GetValue() == "a" {
					t.Errorf("%s still has the group's series", f.GetName())
				}
			}
		}
	}
	if got := testutil.ToFloat64(m.consumed.WithLabelValues("orders", "b", "ack")); got != 1 {
		t.Errorf("the other group counts %v, want 1", got)
	}
}

func TestNilCountsNothing(t *testing.T) {
	moveAll(nil)
	var m *Metrics
	m.Consumer("a", "b").Forget()
}

func TestHotPathAllocatesNothing(t *testing.T) {
	m, err := New(nil)
	if err != nil {
		t.Fatal(err)
	}
	c := m.Consumer("orders", "worker")
	if n := testing.AllocsPerRun(100, func() {
		c.InflightAdd(1)
		c.Size(128)
		c.Duration(settle.VerdictAck, time.Millisecond)
		c.Consumed(settle.VerdictAck)
		c.Failed(settle.MaxRetriesExceeded)
		c.InflightAdd(-1)
	}); n != 0 {
		t.Errorf("%v allocations a message, want none", n)
	}
}

func BenchmarkMessage(b *testing.B) {
	m, err := New(nil)
	if err != nil {
		b.Fatal(err)
	}
	c := m.Consumer("orders", "worker")
	b.ReportAllocs()
	for b.Loop() {
		c.InflightAdd(1)
		c.Size(128)
		c.Duration(settle.VerdictAck, time.Millisecond)
		c.Consumed(settle.VerdictAck)
		c.InflightAdd(-1)
	}
}

const (
	docsPath  = "../../docs/metrics.md"
	docsStart = "<!-- runtime metrics: written by go test ./runtime/metrics -update -->\n"
	docsEnd   = "<!-- end of runtime metrics -->\n"
)

// TestDocs keeps the table in the documentation equal to what the code registers.
func TestDocs(t *testing.T) {
	page, err := os.ReadFile(docsPath)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(page), docsStart)
	_, after, end := strings.Cut(rest, docsEnd)
	if !found || !end {
		t.Fatalf("%s lacks the lines between which the table is written", docsPath)
	}
	want := before + docsStart + table() + docsEnd + after
	if *update {
		if err := os.WriteFile(docsPath, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if d := cmp.Diff(want, string(page)); d != "" {
		t.Errorf("run go test ./runtime/metrics -update:\n%s", d)
	}
}

func table() string {
	var b strings.Builder
	b.WriteString("| Metric | Kind | Labels | Meaning |\n|---|---|---|---|\n")
	for _, d := range definitions {
		fmt.Fprintf(&b, "| `%s` | %s | `%s` | %s |\n", d.name, d.kind, strings.Join(d.labels, "`, `"), d.help)
	}
	return b.String()
}
