package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// PublishOutcome is what became of a published message, or of a publish call: then the worst of its messages.
type PublishOutcome uint8

const (
	// PublishSuccess: confirmed.
	PublishSuccess PublishOutcome = iota
	// PublishFailed: known not to be stored. Its label is "error".
	PublishFailed
	// PublishUnknown: it may be stored, or not.
	PublishUnknown
	publishOutcomes
)

var publishLabels = [publishOutcomes]string{"success", "error", "unknown"}

// Publisher moves the metrics of publishing to one topology. Safe for concurrent use; a nil one counts nothing.
type Publisher struct {
	published [publishOutcomes]prometheus.Counter
	duration  [publishOutcomes]prometheus.Observer
}

// Publisher returns the handle for a topology.
func (m *Metrics) Publisher(topic string) *Publisher {
	if m == nil {
		return nil
	}
	p := &Publisher{}
	for i, label := range publishLabels {
		p.published[i] = m.published.WithLabelValues(topic, label)
		p.duration[i] = m.publishDuration.WithLabelValues(topic, label)
	}
	return p
}

// Published counts n messages.
func (p *Publisher) Published(o PublishOutcome, n int) {
	if p != nil && n > 0 {
		p.published[o].Add(float64(n))
	}
}

// Duration observes a publish call.
func (p *Publisher) Duration(o PublishOutcome, d time.Duration) {
	if p != nil {
		p.duration[o].Observe(d.Seconds())
	}
}
