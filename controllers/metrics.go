package controllers

import (
	"context"
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// Labels of the operator's metrics. All are bounded by the number of objects; series go with their object.
const (
	labelTopic     = "topic"
	labelNamespace = "namespace"
	labelTopology  = "topology"
	labelQueue     = "queue"
	labelRole      = "role"
	labelBroker    = "broker"
	labelBackend   = "backend"
	labelKind      = "kind"
)

// operatorMetrics are the operator's own metrics. Those about messages are read from the observers when they are
// scraped: what is unknown has no series.
type operatorMetrics struct {
	connections   *prometheus.GaugeVec
	brokerUp      *prometheus.GaugeVec
	backendErrors *prometheus.CounterVec
	repairs       *prometheus.CounterVec
}

func newOperatorMetrics(reg prometheus.Registerer) (*operatorMetrics, error) {
	m := &operatorMetrics{
		connections: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "shove_broker_connections",
			Help: "Connections that the operator holds to a Broker: one, or two for the moment in which a rotated Secret takes over."}, []string{labelNamespace, labelBroker}),
		brokerUp: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "shove_broker_up",
			Help: "1 while the operator's connection to a Broker works, else 0."}, []string{labelNamespace, labelBroker}),
		backendErrors: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "shove_backend_errors_total",
			Help: "Failed calls to brokers, by kind: connection or topology."}, []string{labelBackend, labelKind}),
		repairs: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "shove_topology_repairs_total",
			Help: "Repairs of what somebody else changed or deleted on a broker."}, []string{labelNamespace, labelTopology}),
	}
	for _, c := range []prometheus.Collector{m.connections, m.brokerUp, m.backendErrors, m.repairs} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return m, nil
}

func (m *operatorMetrics) backendError(kind topology.Kind, err error) {
	m.backendErrors.WithLabelValues(string(kind), errorKind(err)).Inc()
}

// errorKind is one of the kinds that the runtime uses.
func errorKind(err error) string {
	if errors.Is(err, broker.ErrUnavailable) || errors.Is(err, context.DeadlineExceeded) {
		return "connection"
	}
	return "topology"
}

func (m *operatorMetrics) connectionClosed(name types.NamespacedName) {
	m.connections.WithLabelValues(name.Namespace, name.Name).Dec()
}

func (m *operatorMetrics) setUp(name types.NamespacedName, up bool) {
	v := 0.0
	if up {
		v = 1
	}
	m.brokerUp.WithLabelValues(name.Namespace, name.Name).Set(v)
}

func (m *operatorMetrics) forgetBroker(name types.NamespacedName) {
	m.brokerUp.DeleteLabelValues(name.Namespace, name.Name)
}

func (m *operatorMetrics) forgetTopology(name types.NamespacedName) {
	m.repairs.DeleteLabelValues(name.Namespace, name.Name)
}

// depthCollector shows what the observers last counted.
type depthCollector struct {
	pool              *brokerPool
	backlog, inflight *prometheus.Desc
}

func newDepthCollector(pool *brokerPool) *depthCollector {
	labels := []string{labelTopic, labelNamespace, labelQueue, labelRole}
	return &depthCollector{pool: pool,
		backlog:  prometheus.NewDesc("shove_queue_backlog", "Messages that wait in a queue: for a consumer, or in a hold queue for their time. Without a series: unknown.", labels, nil),
		inflight: prometheus.NewDesc("shove_queue_inflight", "Messages of a queue that consumers have received and not settled. Without a series: unknown.", labels, nil),
	}
}

// Describe implements prometheus.Collector.
func (c *depthCollector) Describe(ch chan<- *prometheus.Desc) { ch <- c.backlog; ch <- c.inflight }

// Collect implements prometheus.Collector.
func (c *depthCollector) Collect(ch chan<- prometheus.Metric) {
	for _, e := range c.pool.all() {
		e.observer.each(func(t types.NamespacedName, q trackedQueue, d broker.Depth) {
			labels := []string{t.Name, t.Namespace, q.name, string(q.role)}
			if d.Ready.Known {
				ch <- prometheus.MustNewConstMetric(c.backlog, prometheus.GaugeValue, float64(d.Ready.N), labels...)
			}
			if d.InFlight.Known {
				ch <- prometheus.MustNewConstMetric(c.inflight, prometheus.GaugeValue, float64(d.InFlight.N), labels...)
			}
		})
	}
}
