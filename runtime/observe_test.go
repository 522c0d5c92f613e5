package runtime_test

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/runtime"
)

// metricSet reads the metrics of one runtime.
type metricSet struct{ reg *prometheus.Registry }

func newMetrics() metricSet { return metricSet{prometheus.NewRegistry()} }

func (m metricSet) option() runtime.Option { return runtime.Registerer(m.reg) }

// value sums the series of a counter or gauge that have a label's value.
func (m metricSet) value(t *testing.T, name, label, value string) float64 {
	t.Helper()
	families, err := m.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, s := range f.GetMetric() {
			for _, l := range s.GetLabel() {
				if l.GetName() == label && l.GetValue() == value {
					sum += s.GetCounter().GetValue() + s.GetGauge().GetValue()
				}
			}
		}
	}
	return sum
}

// logLines keeps the messages that were logged.
type logLines struct {
	mu    sync.Mutex
	lines []string
}

func (l *logLines) option() runtime.Option { return runtime.Logger(slog.New(l)) }

func (l *logLines) Enabled(context.Context, slog.Level) bool { return true }

func (l *logLines) Handle(_ context.Context, r slog.Record) error {
	var b strings.Builder
	b.WriteString(r.Level.String() + " " + r.Message)
	r.Attrs(func(a slog.Attr) bool { b.WriteString(" " + a.String()); return true })
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, b.String())
	return nil
}

func (l *logLines) WithAttrs([]slog.Attr) slog.Handler { return l }
func (l *logLines) WithGroup(string) slog.Handler      { return l }

// count is how many lines have all the texts.
func (l *logLines) count(texts ...string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, line := range l.lines {
		all := true
		for _, text := range texts {
			all = all && strings.Contains(line, text)
		}
		if all {
			n++
		}
	}
	return n
}
