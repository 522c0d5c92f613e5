package render

import (
	"encoding/json"
	"fmt"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/topology"
)

// Kind is the driver's kind for a Broker. An embedded broker is NATS. "" when the spec has no section.
func Kind(b *v1alpha1.Broker) topology.Kind {
	switch b.Spec.Kind() {
	case v1alpha1.BrokerRabbitMQ:
		return topology.RabbitMQ
	case v1alpha1.BrokerKafka:
		return topology.Kafka
	case v1alpha1.BrokerNATS, v1alpha1.BrokerEmbedded:
		return topology.NATS
	case v1alpha1.BrokerRedis:
		return topology.Redis
	case v1alpha1.BrokerSQS:
		return topology.SQS
	default:
		return ""
	}
}

// Endpoint is the section of the spec that is named like the kind, as JSON: what the operator's connection takes. It
// may name the management URL, so it stays with the operator; workloads get WorkloadEndpoint. That of an embedded broker
// is the one of its Service.
func Endpoint(b *v1alpha1.Broker) (json.RawMessage, error) {
	s := b.Spec
	switch s.Kind() {
	case v1alpha1.BrokerRabbitMQ:
		return section("rabbitmq", s.RabbitMQ)
	case v1alpha1.BrokerKafka:
		return section("kafka", s.Kafka)
	case v1alpha1.BrokerNATS:
		return section("nats", s.NATS)
	case v1alpha1.BrokerRedis:
		return section("redis", s.Redis)
	case v1alpha1.BrokerSQS:
		return section("sqs", s.SQS)
	case v1alpha1.BrokerEmbedded:
		return section("nats", &v1alpha1.NATSBroker{Servers: []v1alpha1.NATSServer{EmbeddedAddress(b)}})
	default:
		return nil, &topology.FieldError{Field: "spec", Problem: "names no broker: set exactly one of rabbitmq, kafka, nats, redis, sqs and embedded"}
	}
}

// WorkloadEndpoint is Endpoint without what only the operator may know: the management URL.
func WorkloadEndpoint(b *v1alpha1.Broker) (json.RawMessage, error) {
	if b.Spec.RabbitMQ != nil && b.Spec.RabbitMQ.Management != nil {
		b = b.DeepCopy()
		b.Spec.RabbitMQ.Management = nil
	}
	return Endpoint(b)
}

func section(name string, v any) (json.RawMessage, error) {
	out, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode spec.%s: %w", name, err)
	}
	return out, nil
}
