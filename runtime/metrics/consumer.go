package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/settle"
)

// Reasons of Failed that are no reason to die: a retry may mend them.
const (
	Timeout settle.Reason = "timeout"
	Panic   settle.Reason = "panic"
)

// Lost is the reason of Failed and Discarded for messages that somebody removed from the broker before they were
// settled.
const Lost settle.Reason = "lost"

// DefaultGroup is the group label of a consumer without a group.
const DefaultGroup = "default"

// reasons are the values of the reason label; everything else counts as the last one, so that the label stays bounded.
var reasons = [...]settle.Reason{settle.Rejected, settle.MaxRetriesExceeded, settle.Expired, settle.Deserialize, settle.Oversize,
	settle.CrashLoop, settle.DeferLimitExceeded, settle.SequenceFailed, Timeout, Panic, Lost, "other"}

func reasonIndex(r settle.Reason) int {
	for i, known := range reasons {
		if r == known {
			return i
		}
	}
	return len(reasons) - 1
}

// The values of the outcome label.
const (
	ack = iota
	retry
	reject
	deferred
	outcomes
)

var outcomeLabels = [outcomes]string{"ack", "retry", "reject", "defer"}

// outcomeIndex is -1 for a message that is given back or stays pending: it has no outcome.
func outcomeIndex(v settle.Verdict) int {
	switch v {
	case settle.VerdictAck:
		return ack
	case settle.VerdictReject, settle.VerdictPoison:
		return reject
	case settle.VerdictDefer, settle.VerdictEarly:
		return deferred
	case settle.VerdictRelease, settle.VerdictPending:
		return -1
	default: // an unset verdict is decided as a retry
		return retry
	}
}

// Consumer moves the metrics of one consumer. Its methods look up no label and allocate nothing, and are safe for
// concurrent use. A nil Consumer counts nothing.
type Consumer struct {
	m            *Metrics
	topic, group string

	consumed                                     [outcomes]prometheus.Counter
	duration                                     [outcomes]prometheus.Observer
	failed, discarded, deadFailed                [len(reasons)]prometheus.Counter
	size                                         prometheus.Observer
	inflight, abandoned, up                      prometheus.Gauge
	malformed, suspects, reconnects, deadHandled prometheus.Counter
}

// Consumer returns the handle for a topology and group; an empty group is DefaultGroup. All series of it exist from
// then on, at zero, so that a rate over the first failure is seen.
func (m *Metrics) Consumer(topic, group string) *Consumer {
	if m == nil {
		return nil
	}
	if group == "" {
		group = DefaultGroup
	}
	c := &Consumer{
		m: m, topic: topic, group: group,
		size: m.size.WithLabelValues(topic, group), inflight: m.inflight.WithLabelValues(topic, group),
		abandoned: m.abandoned.WithLabelValues(topic, group), up: m.up.WithLabelValues(topic, group),
		malformed: m.malformed.WithLabelValues(topic, group), suspects: m.suspects.WithLabelValues(topic, group),
		reconnects: m.reconnects.WithLabelValues(topic, group), deadHandled: m.deadHandled.WithLabelValues(topic, group),
	}
	for i, label := range outcomeLabels {
		c.consumed[i] = m.consumed.WithLabelValues(topic, group, label)
		c.duration[i] = m.duration.WithLabelValues(topic, group, label)
	}
	for i, reason := range reasons {
		c.failed[i] = m.failed.WithLabelValues(topic, group, string(reason))
		if reason != Timeout && reason != Panic {
			c.discarded[i] = m.discarded.WithLabelValues(topic, group, string(reason))
		}
	}
	for _, reason := range [...]settle.Reason{Timeout, Panic} {
		c.deadFailed[reasonIndex(reason)] = m.deadFailed.WithLabelValues(topic, group, string(reason))
	}
	return c
}

// Forget removes the consumer's series, for one that left the configuration. The handle stays usable; what it counts
// from then on is not shown.
func (c *Consumer) Forget() {
	if c == nil {
		return
	}
	labels := prometheus.Labels{labelTopic: c.topic, labelGroup: c.group}
	for _, v := range []interface {
		DeletePartialMatch(prometheus.Labels) int
	}{c.m.consumed, c.m.failed, c.m.discarded, c.m.duration, c.m.size, c.m.inflight, c.m.abandoned, c.m.up, c.m.malformed,
		c.m.suspects, c.m.reconnects, c.m.deadHandled, c.m.deadFailed} {
		v.DeletePartialMatch(labels)
	}
}

// Consumed counts a message that got an outcome. One that is given back has none and is not counted.
func (c *Consumer) Consumed(v settle.Verdict) {
	if c == nil {
		return
	}
	if i := outcomeIndex(v); i >= 0 {
		c.consumed[i].Inc()
	}
}

// Failed counts a failure: a reason to die, Timeout or Panic.
func (c *Consumer) Failed(reason settle.Reason) {
	if c != nil {
		c.failed[reasonIndex(reason)].Inc()
	}
}

// Discarded counts a message that is lost for want of a dead-letter queue. The caller counts Failed as well (F2).
func (c *Consumer) Discarded(reason settle.Reason) {
	if c == nil {
		return
	}
	counter := c.discarded[reasonIndex(reason)]
	if counter == nil { // neither a timeout nor a panic ends a message
		counter = c.discarded[len(reasons)-1]
	}
	counter.Inc()
}

// Duration observes how long a message took from the start of decoding to its outcome.
func (c *Consumer) Duration(v settle.Verdict, d time.Duration) {
	if c == nil {
		return
	}
	if i := outcomeIndex(v); i >= 0 {
		c.duration[i].Observe(d.Seconds())
	}
}

// Size observes the size of a received body in bytes.
func (c *Consumer) Size(bytes int) {
	if c != nil {
		c.size.Observe(float64(bytes))
	}
}

// InflightAdd moves the number of received and unsettled messages.
func (c *Consumer) InflightAdd(n int) {
	if c != nil {
		c.inflight.Add(float64(n))
	}
}

// AbandonedAdd moves the number of handlers that outlive their deadline (H4).
func (c *Consumer) AbandonedAdd(n int) {
	if c != nil {
		c.abandoned.Add(float64(n))
	}
}

// Malformed counts headers that were taken for absent (C5).
func (c *Consumer) Malformed(n int) {
	if c != nil && n > 0 {
		c.malformed.Add(float64(n))
	}
}

// Suspect counts a message that runs alone (C10).
func (c *Consumer) Suspect() {
	if c != nil {
		c.suspects.Inc()
	}
}

// Reconnect counts an attempt to subscribe again (M).
func (c *Consumer) Reconnect() {
	if c != nil {
		c.reconnects.Inc()
	}
}

// Up says whether the consumer holds a subscription.
func (c *Consumer) Up(up bool) {
	switch {
	case c == nil:
	case up:
		c.up.Set(1)
	default:
		c.up.Set(0)
	}
}

// DeadHandled counts a dead letter that the dead handler took.
func (c *Consumer) DeadHandled() {
	if c != nil {
		c.deadHandled.Inc()
	}
}

// DeadFailed counts a call of the dead handler that ended with Timeout or Panic (E5); any other reason is ignored.
func (c *Consumer) DeadFailed(reason settle.Reason) {
	if c == nil {
		return
	}
	if counter := c.deadFailed[reasonIndex(reason)]; counter != nil {
		counter.Inc()
	}
}
