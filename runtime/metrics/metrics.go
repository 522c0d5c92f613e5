// Package metrics holds the Prometheus collectors of a runtime. Names and labels are those of the Rust original, so
// that its dashboards work (P); docs/metrics.md lists them. Labels are bounded: topologies, groups and fixed words.
//
// What a consumer moves for each message is behind a handle of its own (Consumer), whose methods look up no label and
// allocate nothing.
package metrics

import (
	"errors"
	"fmt"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/topology"
)

// Metrics are the collectors of one registerer. It is safe for concurrent use. A nil Metrics counts nothing.
type Metrics struct {
	consumed, failed, discarded, malformed, suspects, reconnects *prometheus.CounterVec
	deadHandled, deadFailed, auditFailures                       *prometheus.CounterVec
	published, backendErrors, reloads                            *prometheus.CounterVec
	duration, size, publishDuration                              *prometheus.HistogramVec
	inflight, abandoned, up, generation                          *prometheus.GaugeVec

	mu      sync.Mutex
	current string // generation in force
}

// New registers the collectors, or takes those that an earlier call registered with the same registerer: two runtimes
// of one process then share them. A nil registerer registers nothing; the collectors work all the same.
func New(reg prometheus.Registerer) (*Metrics, error) {
	r := &registration{reg: reg}
	m := &Metrics{
		consumed: r.counter(defConsumed), failed: r.counter(defFailed), discarded: r.counter(defDiscarded),
		duration: r.histogram(defDuration), size: r.histogram(defSize),
		inflight: r.gauge(defInflight), abandoned: r.gauge(defAbandoned), up: r.gauge(defUp),
		malformed: r.counter(defMalformed), suspects: r.counter(defSuspects), reconnects: r.counter(defReconnects),
		deadHandled: r.counter(defDeadHandled), deadFailed: r.counter(defDeadFailed), auditFailures: r.counter(defAuditFailures),
		published: r.counter(defPublished), publishDuration: r.histogram(defPublishDuration), backendErrors: r.counter(defBackendErrors),
		reloads: r.counter(defReloads), generation: r.gauge(defGeneration),
	}
	if r.err != nil {
		return nil, r.err
	}
	return m, nil
}

// registration registers collectors and keeps the first errors.
type registration struct {
	reg prometheus.Registerer
	err error
}

func (r *registration) counter(d definition) *prometheus.CounterVec {
	return register(r, d, prometheus.NewCounterVec(prometheus.CounterOpts{Name: d.name, Help: d.help}, d.labels))
}

func (r *registration) gauge(d definition) *prometheus.GaugeVec {
	return register(r, d, prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: d.name, Help: d.help}, d.labels))
}

func (r *registration) histogram(d definition) *prometheus.HistogramVec {
	return register(r, d, prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: d.name, Help: d.help, Buckets: d.buckets}, d.labels))
}

func register[C prometheus.Collector](r *registration, d definition, c C) C {
	if r.reg == nil {
		return c
	}
	err := r.reg.Register(c)
	if err == nil {
		return c
	}
	if dup, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		if same, ok := dup.ExistingCollector.(C); ok {
			return same
		}
	}
	r.err = errors.Join(r.err, fmt.Errorf("register metric %q: %w", d.name, err))
	return c
}

// ErrorKind says what a broker's error was about. The values are labels.
type ErrorKind string

const (
	Connection ErrorKind = "connection"
	Publish    ErrorKind = "publish"
	Consume    ErrorKind = "consume"
	Topology   ErrorKind = "topology"
	Ack        ErrorKind = "ack"
)

// BackendError counts an error of a broker.
func (m *Metrics) BackendError(backend topology.Kind, kind ErrorKind) {
	if m != nil {
		m.backendErrors.WithLabelValues(backendLabel(backend), string(kind)).Inc()
	}
}

// backendLabel is the name that the Rust original's dashboards know a broker by.
func backendLabel(k topology.Kind) string {
	switch k {
	case topology.Memory:
		return "inmemory"
	case topology.SQS:
		return "sns_sqs"
	}
	return string(k)
}

// AuditFailed counts a record that an audit sink did not take (O2).
func (m *Metrics) AuditFailed(topic string) {
	if m != nil {
		m.auditFailures.WithLabelValues(topic).Inc()
	}
}

// Reload says what became of a configuration. The values are labels.
type Reload string

const (
	// Applied: everything in it is in force.
	Applied Reload = "applied"
	// RestartRequired: it is in force but for changes that need a restart.
	RestartRequired Reload = "restart_required"
	// Refused: it could not be used; the last good one stays in force.
	Refused Reload = "refused"
)

// Reloaded counts a configuration that the watcher found.
func (m *Metrics) Reloaded(result Reload) {
	if m != nil {
		m.reloads.WithLabelValues(string(result)).Inc()
	}
}

// Generation says which generation of the configuration is in force.
func (m *Metrics) Generation(generation string) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.current != generation {
		m.generation.DeleteLabelValues(m.current)
		m.current = generation
	}
	m.generation.WithLabelValues(generation).Set(1)
}
