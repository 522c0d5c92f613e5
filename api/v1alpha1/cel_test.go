package v1alpha1_test

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/shove-dev/shove/api/v1alpha1"
)

const (
	crdDir   = "../../config/crd"
	broker   = v1alpha1.KindBroker
	topology = v1alpha1.KindTopology
	group    = v1alpha1.KindConsumerGroup
)

// celCase is one CEL rule with an object that it accepts and one that it refuses. The specs are lines of YAML
// added to the smallest valid spec of the kind, unless they replace a part of it.
type celCase struct {
	name string
	kind string
	// old is the object before an update; without it the objects are created.
	old            *string
	accept, refuse string
	// acceptName and refuseName are the objects' names, for rules about names.
	acceptName, refuseName string
	// field and says are the field of the one error that is expected, and a part of its message.
	field, says string
}

func ptr(s string) *string { return &s }

// spec completes the lines of a case.
func (c celCase) spec(lines string) string {
	base := map[string]string{broker: "rabbitmq: {url: 'amqp://rabbit:5672/'}", topology: "brokerRef: {name: rabbit}", group: "topologyRef: {name: orders}"}[c.kind]
	key := strings.SplitN(base, ":", 2)[0]
	if c.kind == broker || strings.HasPrefix(lines, key+":") {
		// A Broker case writes its own broker block, or none when it is about something else.
		for _, block := range []string{"rabbitmq", "kafka", "nats", "redis", "sqs", "embedded", "none", "brokerRef", "topologyRef"} {
			if strings.HasPrefix(lines, block+":") {
				return strings.TrimPrefix(lines, "none:")
			}
		}
	}
	return base + "\n" + lines
}

func brokerCases() []celCase {
	return []celCase{
		{name: "one of none", field: "spec", says: "exactly one of", accept: "nats: {servers: ['nats://nats:4222']}", refuse: "none:\nresyncInterval: 5m"},
		{name: "one of two", field: "spec", says: "exactly one of", accept: "sqs: {region: eu-central-1}",
			refuse: "rabbitmq: {url: 'amqp://rabbit:5672/'}\nsqs: {region: eu-central-1}"},
		{name: "user info in url", field: "spec.rabbitmq.url", says: "Secret", accept: "rabbitmq: {url: 'amqps://rabbit.shop.svc:5671/a%40b'}",
			refuse: "rabbitmq: {url: 'amqp://user:pass@rabbit:5672/'}"},
		{name: "user info that hides in the path", field: "spec.rabbitmq.url", says: "Secret", accept: "rabbitmq: {url: 'amqp://rabbit'}",
			refuse: "rabbitmq: {url: 'amqp://user:pa/pass@rabbit:5672/'}"},
		{name: "scheme of url", field: "spec.rabbitmq.url", says: "AMQP address", accept: "rabbitmq: {url: 'amqp://[::1]:5672'}",
			refuse: "rabbitmq: {url: 'http://rabbit:15672/'}"},
		{name: "two path segments in url", field: "spec.rabbitmq.url", says: "%2F", accept: "rabbitmq: {url: 'amqp://rabbit:5672/a%2Fb'}",
			refuse: "rabbitmq: {url: 'amqp://rabbit:5672/a/b'}"},
		{name: "query in url", field: "spec.rabbitmq.url", says: "without query", accept: "rabbitmq: {url: 'amqp://rabbit:5672/%2F'}",
			refuse: "rabbitmq: {url: 'amqp://rabbit:5672/?password=x'}"},
		{name: "user info in management url", field: "spec.rabbitmq.management.url", says: "secretRef",
			accept: "rabbitmq: {url: 'amqp://rabbit/', management: {url: 'http://rabbit:15672'}}",
			refuse: "rabbitmq: {url: 'amqp://rabbit/', management: {url: 'http://user:pass@rabbit:15672'}}"},
		{name: "scheme of management url", field: "spec.rabbitmq.management.url", says: "HTTP address",
			accept: "rabbitmq: {url: 'amqp://rabbit/', management: {url: 'https://rabbit/prefix/'}}",
			refuse: "rabbitmq: {url: 'amqp://rabbit/', management: {url: 'rabbit:15672'}}"},
		{name: "consumer timeout", field: "spec.rabbitmq.consumerTimeout", says: "write it like 30m",
			accept: "rabbitmq: {url: 'amqp://rabbit/', consumerTimeout: 0s}", refuse: "rabbitmq: {url: 'amqp://rabbit/', consumerTimeout: 1y}"},
		{name: "resync interval", field: "spec.resyncInterval", says: "write it like 5m", accept: "resyncInterval: 1m30s", refuse: "resyncInterval: 0s"},
		{name: "kafka address", field: "spec.kafka.bootstrapServers", says: "host:port",
			accept: "kafka: {bootstrapServers: ['kafka.shop.svc:9092', '[::1]:9092']}", refuse: "kafka: {bootstrapServers: ['kafka://kafka:9092']}"},
		{name: "sasl without credentials", field: "spec", says: "kafka.sasl needs credentials",
			accept: "kafka: {bootstrapServers: ['kafka:9092'], sasl: {mechanism: SCRAM-SHA-512}}\ncredentials: {secretRef: {name: kafka}}",
			refuse: "kafka: {bootstrapServers: ['kafka:9092'], sasl: {mechanism: SCRAM-SHA-512}}"},
		{name: "nats address", field: "spec.nats.servers", says: "tls://nats.shop.svc:4222",
			accept: "nats: {servers: ['tls://nats.shop.svc:4222', 'nats-1:4222']}", refuse: "nats: {servers: ['nats://user:pass@nats:4222']}"},
		{name: "redis address", field: "spec.redis.addresses", says: "redis.shop.svc:6379", accept: "redis: {addresses: ['redis:6379']}",
			refuse: "redis: {addresses: ['redis://redis:6379']}"},
		{name: "redis sentinel without a master", field: "spec.redis", says: "masterName goes with mode: Sentinel",
			accept: "redis: {addresses: ['s1:26379', 's2:26379'], mode: Sentinel, masterName: main}", refuse: "redis: {addresses: ['s1:26379'], mode: Sentinel}"},
		{name: "redis master without sentinel", field: "spec.redis", says: "masterName goes with mode: Sentinel",
			accept: "redis: {addresses: ['n1:6379', 'n2:6379'], mode: Cluster}", refuse: "redis: {addresses: ['redis:6379'], masterName: main}"},
		{name: "redis standalone with two servers", field: "spec.redis", says: "write one address",
			accept: "redis: {addresses: ['redis:6379'], mode: Standalone}", refuse: "redis: {addresses: ['r1:6379', 'r2:6379']}"},
		{name: "sqs region", field: "spec.sqs.region", says: "eu-central-1", accept: "sqs: {region: us-gov-west-1}", refuse: "sqs: {region: Frankfurt}"},
		{name: "sqs endpoint", field: "spec.sqs.endpoint", says: "HTTP address", accept: "sqs: {region: us-east-1, endpoint: 'http://localhost:9324'}",
			refuse: "sqs: {region: us-east-1, endpoint: 'http://key:secret@localhost:9324'}"},
		{name: "embedded with tls", field: "spec", says: "an embedded broker has no TLS", accept: "embedded: {storage: {size: 1Gi}}", refuse: "embedded: {storage: {size: 1Gi}}\ntls: {serverName: x}"},
		{name: "embedded taken away", field: "spec", says: "create another Broker", old: ptr("embedded: {storage: {size: 1Gi}}"), accept: "embedded: {storage: {size: 2Gi}}", refuse: "nats: {servers: ['nats://nats:4222']}"},
		{name: "embedded storage", field: "spec.embedded.storage.size", says: "1Gi or 500Mi", accept: "embedded: {storage: {size: 1Gi}}", refuse: "embedded: {storage: {size: 0}}"},
		{name: "empty tls", field: "spec.tls", says: "remove tls", accept: "tls: {caSecretRef: {name: ca}}", refuse: "tls: {}"},
		{name: "selector missing", field: "spec.allowedNamespaces", says: "selector goes with from: Selector",
			accept: "allowedNamespaces: {from: Selector, selector: {matchLabels: {team: shop}}}", refuse: "allowedNamespaces: {from: Selector}"},
		{name: "selector too many", field: "spec.allowedNamespaces", says: "selector goes with from: Selector",
			accept: "allowedNamespaces: {from: All, queues: ['{namespace}.*', 'shared-*']}", refuse: "allowedNamespaces: {from: All, selector: {}}"},
		{name: "queue pattern", field: "spec.allowedNamespaces.queues[1]", says: "{namespace}.*", accept: "allowedNamespaces: {queues: ['*']}",
			refuse: "allowedNamespaces: {queues: ['*', '{name}.*']}"},
	}
}

func topologyCases() []celCase {
	none := ptr("")
	seq := "holdQueues: [{delay: 5s}]\ndeadLetter: {}\nsequenced: "
	return []celCase{
		{name: "queue name", field: "spec.queue", says: "orders or shop.orders", accept: "queue: shop.Orders_v2-eu", refuse: "queue: 'orders created'"},
		{name: "reserved queue name", field: "spec.queue", says: "RabbitMQ keeps for itself", accept: "queue: amqp.orders", refuse: "queue: amq.orders"},
		{name: "dead-letter queue name", field: "spec.deadLetter.queue", says: "orders or shop.orders", accept: "deadLetter: {queue: my-dead-orders}", refuse: "deadLetter: {queue: orders-}"},
		{name: "reserved dead-letter queue name", field: "spec.deadLetter.queue", says: "RabbitMQ keeps for itself", accept: "deadLetter: {}", refuse: "deadLetter: {queue: amq.dead}"},
		{name: "dead-letter queue is the queue", field: "spec", says: "must differ from queue", accept: "queue: a\ndeadLetter: {queue: b}", refuse: "queue: a\ndeadLetter: {queue: a}"},
		{name: "source name", field: "spec.source.name", says: "orders-log", accept: "source: {name: orders-log}", refuse: "source: {name: '*'}"},
		{name: "name as queue too long", field: "", says: "set spec.queue", acceptName: strings.Repeat("a", 201), accept: "queue: short", refuseName: strings.Repeat("a", 201)},

		{name: "B2 delay of zero", field: "spec.holdQueues[0].delay", says: "5s, 1m30s or 250ms", accept: "holdQueues: [{delay: 1ms}]", refuse: "holdQueues: [{delay: 0s}]"},
		{name: "B2 delay below zero", field: "spec.holdQueues[0].delay", says: "5s, 1m30s or 250ms", accept: "holdQueues: [{delay: 720h}]", refuse: "holdQueues: [{delay: -5s}]"},
		{name: "B2 delay with a fraction of a millisecond", field: "spec.holdQueues[0].delay", says: "whole milliseconds",
			accept: "holdQueues: [{delay: 1.5s}, {delay: 1m0.001s}]", refuse: "holdQueues: [{delay: 1.5ms}]"},
		{name: "B2 delay of microseconds", field: "spec.holdQueues[0].delay", says: "whole milliseconds", accept: "holdQueues: [{delay: 2ms}]", refuse: "holdQueues: [{delay: 2000us}]"},
		{name: "delay that is no duration", field: "spec.holdQueues[0].delay", says: "write it like", accept: "holdQueues: [{delay: 1h2m3s4ms}]", refuse: "holdQueues: [{delay: soon}]"},
		{name: "delay without a unit", field: "spec.holdQueues[0].delay", says: "write it like", accept: "holdQueues: [{delay: 30s}]", refuse: "holdQueues: [{delay: '30'}]"},
		{name: "empty delay", field: "spec.holdQueues[0].delay", says: "write it like", accept: "holdQueues: []", refuse: "holdQueues: [{delay: ''}]"},
		{name: "huge delay", field: "spec.holdQueues[0].delay", says: "720h", accept: "holdQueues: [{delay: 43200m}]", refuse: "holdQueues: [{delay: 999999h9999999m}]"},
		{name: "B2 descending delays", field: "spec.holdQueues", says: "from the shortest delay to the longest", accept: "holdQueues: [{delay: 5s}, {delay: 30s}, {delay: 2m}]",
			refuse: "holdQueues: [{delay: 30s}, {delay: 5s}]"},
		{name: "B2 the same delay twice", field: "spec.holdQueues", says: "each delay once", accept: "holdQueues: [{delay: 1s}, {delay: 1001ms}]",
			refuse: "holdQueues: [{delay: 1s}, {delay: 1000ms}]"},

		{name: "J4 external with bindings", field: "spec", says: "remove rabbitmq.bindings", accept: "external: true\nrabbitmq: {bindings: []}",
			refuse: "external: true\nrabbitmq: {bindings: [{exchange: shop}]}"},
		{name: "external with publishers", field: "spec", says: "remove publishers", accept: "external: false\npublishers: [{kind: Deployment, name: w}]",
			refuse: "external: true\npublishers: [{kind: Deployment, name: w}]"},
		{name: "external with a queue type", field: "spec", says: "remove rabbitmq.queueType", accept: "external: false\nrabbitmq: {queueType: classic}",
			refuse: "external: true\nrabbitmq: {queueType: classic}"},
		{name: "external with topic settings", field: "spec", says: "declares no topic", accept: "external: true\nkafka: {groupId: old-group}", refuse: "external: true\nkafka: {partitions: 3}"},
		{name: "binding twice", field: "spec.rabbitmq.bindings", says: "remove the repeated one", accept: "rabbitmq: {bindings: [{exchange: a}, {exchange: a, routingKey: x}]}",
			refuse: "rabbitmq: {bindings: [{exchange: a}, {exchange: a, routingKey: ''}]}"},
		{name: "group id", field: "spec.kafka.groupId", says: "orders-worker", accept: "kafka: {groupId: Orders.v1}", refuse: "kafka: {groupId: 'a b'}"},
		{name: "topic settings", field: "spec.kafka.config", says: "retention.ms", accept: "kafka: {config: {retention.ms: '604800000'}}", refuse: "kafka: {config: {Retention-MS: '1'}}"},

		{name: "ack wait", field: "spec.nats.ackWait", says: "write it like 30s", accept: "nats: {replicas: 3, ackWait: 1m30s}", refuse: "nats: {ackWait: 0s}"},

		{name: "K8 sequenced without hold queues", field: "spec", says: "allowMessageLoss: true", accept: seq + "{onFailure: FailAll}", refuse: "deadLetter: {}\nsequenced: {onFailure: FailAll}"},
		{name: "K8 sequenced without a dead-letter queue", field: "spec", says: "allowMessageLoss: true", accept: "sequenced: {onFailure: Skip, allowMessageLoss: true}",
			refuse: "holdQueues: [{delay: 5s}]\nsequenced: {onFailure: Skip, allowMessageLoss: false}"},

		{name: "brokerRef changes", field: "spec", says: "brokerRef is immutable", old: none, accept: "paused: true", refuse: "brokerRef: {name: other}"},
		{name: "brokerRef gets a namespace", field: "spec", says: "brokerRef is immutable", old: none, accept: "paused: true", refuse: "brokerRef: {name: rabbit, namespace: x}"},
		{name: "queue changes", field: "spec", says: "queue is immutable", old: ptr("queue: a"), accept: "queue: a\npaused: true", refuse: "queue: b"},
		{name: "queue is set", field: "spec", says: "queue is immutable", old: none, accept: "holdQueues: [{delay: 1s}]", refuse: "queue: b"},
		{name: "queue is unset", field: "spec", says: "queue is immutable", old: ptr("queue: a"), accept: "queue: a\ndeletionPolicy: Delete", refuse: ""},
		{name: "external is set", field: "spec", says: "external is immutable", old: none, accept: "external: false", refuse: "external: true"},
		{name: "source is set", field: "spec", says: "source is immutable", old: none, accept: "paused: true", refuse: "source: {name: log}"},
		{name: "source changes", field: "spec", says: "source is immutable", old: ptr("source: {name: log}"), accept: "source: {name: log}\npaused: true", refuse: "source: {name: other}"},
		{name: "sequenced is added", field: "spec", says: "sequenced cannot be added or removed", old: none, accept: "holdQueues: [{delay: 5s}]\ndeadLetter: {}", refuse: seq + "{}"},
		{name: "sequenced is removed", field: "spec", says: "sequenced cannot be added or removed", old: ptr(seq + "{}"), accept: seq + "{onDefer: Hold}", refuse: ""},
		{name: "K6 shards change", field: "spec", says: "sequenced.shards is immutable", old: ptr(seq + "{shards: 4}"), accept: seq + "{shards: 4, onFailure: FailAll}", refuse: seq + "{shards: 5}"},
		{name: "K6 shards are set", field: "spec", says: "sequenced.shards is immutable", old: ptr(seq + "{}"), accept: seq + "{shards: 8}", refuse: seq + "{shards: 16}"},
		{name: "queue type changes", field: "spec", says: "rabbitmq.queueType is immutable", old: ptr("rabbitmq: {queueType: classic}"),
			accept: "rabbitmq: {queueType: classic, bindings: [{exchange: x}]}", refuse: "rabbitmq: {queueType: quorum}"},
		{name: "queue type is set", field: "spec", says: "rabbitmq.queueType is immutable", old: none, accept: "rabbitmq: {queueType: quorum}", refuse: "rabbitmq: {queueType: classic}"},
		{name: "queue type is unset", field: "spec", says: "rabbitmq.queueType is immutable", old: ptr("rabbitmq: {queueType: classic}"),
			accept: "rabbitmq: {queueType: classic}\npaused: true", refuse: ""},
		{name: "storage changes", field: "spec", says: "nats.storage is immutable", old: ptr("nats: {storage: Memory}"), accept: "nats: {storage: Memory, replicas: 3}", refuse: "nats: {replicas: 3}"},
		{name: "storage is set", field: "spec", says: "nats.storage is immutable", old: none, accept: "nats: {storage: File, replicas: 5}", refuse: "nats: {storage: Memory}"},
		{name: "dead-letter queue changes", field: "spec", says: "deadLetter.queue is immutable", old: ptr("deadLetter: {queue: a}"), accept: "deadLetter: {queue: a}\npaused: true",
			refuse: "deadLetter: {queue: b}"},
		{name: "dead-letter queue is set", field: "spec", says: "deadLetter.queue is immutable", old: ptr("deadLetter: {}"), accept: "paused: true", refuse: "deadLetter: {queue: b}"},
		{name: "group id changes", field: "spec", says: "kafka.groupId is immutable", old: ptr("kafka: {groupId: a}"), accept: "kafka: {groupId: a, partitions: 3}", refuse: "kafka: {groupId: b}"},
		{name: "group id is set", field: "spec", says: "kafka.groupId is immutable", old: none, accept: "kafka: {partitions: 3}", refuse: "kafka: {groupId: b}"},
		{name: "partitions shrink", field: "spec", says: "kafka.partitions can only grow", old: ptr("kafka: {partitions: 8}"), accept: "kafka: {partitions: 16}", refuse: "kafka: {partitions: 7}"},
	}
}

func groupCases() []celCase {
	none := ptr("")
	work := "workloadRef: {kind: Deployment, name: w}\n"
	return []celCase{
		{name: "long name", field: "", says: "choose a shorter name", acceptName: strings.Repeat("a", 247), refuseName: strings.Repeat("a", 248)},
		{name: "sidecar missing", field: "spec", says: "mode Sidecar needs sidecar", accept: "mode: Sidecar\nsidecar: {port: 8080}", refuse: "mode: Sidecar"},
		{name: "sidecar path", field: "spec.sidecar.path", says: "like /messages", accept: "sidecar: {port: 80, path: /in/orders}", refuse: "sidecar: {port: 80, path: messages}"},
		{name: "sidecar readiness path", field: "spec.sidecar.readinessPath", says: "like /ready", accept: "sidecar: {port: 80, readinessPath: /}",
			refuse: "sidecar: {port: 80, readinessPath: '/ready?full=1'}"},
		{name: "replicas without workload", field: "spec", says: "workloadRef", accept: work + "replicas: {max: 3}", refuse: "replicas: {max: 3}"},
		{name: "min above max", field: "spec.replicas", says: "raise max", accept: work + "replicas: {min: 3, max: 3}", refuse: work + "replicas: {min: 4, max: 3}"},
		{name: "scaling without replicas", field: "spec", says: "set replicas like", accept: "scaling: {mode: None}", refuse: work + "scaling: {mode: Builtin}"},
		{name: "up multiplier", field: "spec.scaling.scaleUpMultiplier", says: "like '2.0'", accept: "scaling: {mode: None, scaleUpMultiplier: '3'}",
			refuse: "scaling: {mode: None, scaleUpMultiplier: twice}"},
		{name: "down multiplier", field: "spec.scaling.scaleDownMultiplier", says: "like '0.5'", accept: "scaling: {mode: None, scaleDownMultiplier: '0'}",
			refuse: "scaling: {mode: None, scaleDownMultiplier: '-1'}"},
		{name: "multipliers crossed", field: "spec.scaling", says: "must be below scaleUpMultiplier", accept: "scaling: {mode: None, scaleUpMultiplier: '1', scaleDownMultiplier: '0.9'}",
			refuse: "scaling: {mode: None, scaleDownMultiplier: '2.5'}"},
		{name: "poll interval", field: "spec.scaling.pollInterval", says: "like 5s", accept: "scaling: {mode: None, pollInterval: 1m}", refuse: "scaling: {mode: None, pollInterval: 10ms}"},
		{name: "hysteresis", field: "spec.scaling.hysteresis", says: "like 10s", accept: "scaling: {mode: None, hysteresis: 0s}", refuse: "scaling: {mode: None, hysteresis: 25h}"},
		{name: "cooldown", field: "spec.scaling.cooldown", says: "like 30s", accept: "scaling: {mode: None, cooldown: 0s}", refuse: "scaling: {mode: None, cooldown: -1s}"},

		{name: "topologyRef changes", field: "spec", says: "topologyRef is immutable", old: none, accept: "prefetch: 5", refuse: "topologyRef: {name: other}"},
		{name: "workloadRef is set", field: "spec", says: "workloadRef is immutable", old: none, accept: "paused: true", refuse: "workloadRef: {kind: Deployment, name: w}"},
		{name: "workloadRef is unset", field: "spec", says: "workloadRef is immutable", old: ptr(work), accept: work + "paused: true", refuse: ""},
		{name: "workloadRef changes", field: "spec", says: "workloadRef is immutable", old: ptr(work), accept: work + "replicas: {max: 2}", refuse: "workloadRef: {kind: StatefulSet, name: w}"},
		{name: "mode changes", field: "spec", says: "mode is immutable", old: none, accept: "mode: Library", refuse: "mode: Sidecar\nsidecar: {port: 80}"},
	}
}

// optionCases are the rules of consumer options, in both places where options are written.
func optionCases() []celCase {
	options := []celCase{
		{name: "handler timeout below zero", field: "handlerTimeout", says: "0s (no deadline)", accept: "{handlerTimeout: 0s}", refuse: "{handlerTimeout: -1s}"},
		{name: "handler timeout too long", field: "handlerTimeout", says: "24h", accept: "{handlerTimeout: 1.5h}", refuse: "{handlerTimeout: 24h1ms}"},
		{name: "handler timeout outcome without deadline", field: "handlerTimeout", says: "30s", accept: "{handlerTimeout: 0s, handlerTimeoutOutcome: Defer}", refuse: "{handlerTimeout: none}"},
		{name: "drain timeout", field: "drainTimeout", says: "30s or 2m", accept: "{drainTimeout: 0s}", refuse: "{drainTimeout: 1d}"},
		{name: "message size zero", field: "maxMessageSize", says: "10Mi", accept: "{maxMessageSize: 1}", refuse: "{maxMessageSize: 0}"},
		{name: "message size with a fraction", field: "maxMessageSize", says: "whole number of bytes", accept: "{maxMessageSize: 1.5Ki}", refuse: "{maxMessageSize: 1500m}"},
		{name: "message size negative", field: "maxMessageSize", says: "whole number of bytes", accept: "{maxMessageSize: 65536}", refuse: "{maxMessageSize: -1Ki}"},
		{name: "message size huge", field: "maxMessageSize", says: "at most 1Gi", accept: "{maxMessageSize: 1Gi}", refuse: "{maxMessageSize: 1Ti}"},
		{name: "defer limit empty", field: "deferLimit", says: "remove deferLimit", accept: "{deferLimit: {maxDefers: 1}}", refuse: "{deferLimit: {}}"},
		{name: "defer limit age", field: "deferLimit.maxAge", says: "24h or 90m", accept: "{deferLimit: {maxAge: 24h}}", refuse: "{deferLimit: {maxAge: 0s}}"},
	}
	var cases []celCase
	for _, o := range options {
		inGroup, inBroker := o, o
		inGroup.kind, inGroup.field = group, "spec."+o.field
		inGroup.accept, inGroup.refuse = flow(o.accept), flow(o.refuse)
		inBroker.kind, inBroker.field, inBroker.name = broker, "spec.consumerDefaults."+o.field, "default "+o.name
		inBroker.accept, inBroker.refuse = "consumerDefaults: "+o.accept, "consumerDefaults: "+o.refuse
		cases = append(cases, inGroup, inBroker)
	}
	return cases
}

// flow turns the flow mapping "{a: 1, b: 2}", of scalars or with a mapping as its only value, into lines.
func flow(s string) string {
	s = strings.TrimSuffix(strings.TrimPrefix(s, "{"), "}")
	if strings.Contains(s, "{") {
		return s
	}
	return strings.ReplaceAll(s, ", ", "\n")
}

func allCases() []celCase {
	var cases []celCase
	for kind, list := range map[string][]celCase{broker: brokerCases(), topology: topologyCases(), group: groupCases()} {
		for _, c := range list {
			c.kind = kind
			cases = append(cases, c)
		}
	}
	return append(cases, optionCases()...)
}

// seenRule is a CEL rule, known by the place and the text of its message.
type seenRule struct{ kind, field, message string }

// TestCEL shows for every rule one object that is accepted and one that is refused, by a real API server, and then
// that no rule of the CRDs is without one.
func TestCEL(t *testing.T) {
	api, ns := server(t)
	seen := map[seenRule]bool{}
	for _, c := range allCases() {
		t.Run(c.kind+"/"+strings.ReplaceAll(c.name, " ", "_"), func(t *testing.T) {
			if c.old != nil {
				updateCase(t, api, ns, c, seen)
				return
			}
			accepted := named(object(t, c.kind, ns, c.spec(c.accept)), c.acceptName)
			if err := api.Create(t.Context(), accepted, client.DryRunAll); err != nil {
				t.Errorf("this should be accepted:\n%s\n%v", c.accept, err)
			}
			decodes(t, accepted)
			refused := named(object(t, c.kind, ns, c.spec(c.refuse)), c.refuseName)
			c.check(t, api.Create(t.Context(), refused, client.DryRunAll), seen)
		})
	}
	if t.Failed() {
		return
	}
	for _, r := range slices.SortedFunc(maps.Keys(rules(t)), func(a, b seenRule) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) }) {
		if !seen[r] {
			t.Errorf("no case shows a refusal by the rule of %s at %s: %s", r.kind, r.field, r.message)
		}
	}
}

func updateCase(t *testing.T, api client.Client, ns string, c celCase, seen map[seenRule]bool) {
	t.Helper()
	created := object(t, c.kind, ns, c.spec(*c.old))
	if err := api.Create(t.Context(), created); err != nil {
		t.Fatalf("create the object to update: %v", err)
	}
	update := func(lines string) error {
		u := created.DeepCopy()
		u.Object["spec"] = object(t, c.kind, ns, c.spec(lines)).Object["spec"]
		return api.Update(t.Context(), u, client.DryRunAll)
	}
	if err := update(c.accept); err != nil {
		t.Errorf("this update should be accepted:\n%s\n%v", c.accept, err)
	}
	c.check(t, update(c.refuse), seen)
}

// check demands exactly the one error of the case, so that its object is refused for no other reason.
func (c celCase) check(t *testing.T, err error, seen map[seenRule]bool) {
	t.Helper()
	var status *apierrors.StatusError
	if !errors.As(err, &status) || !apierrors.IsInvalid(err) {
		t.Fatalf("this should be refused as invalid:\n%s\ngot: %v", c.refuse, err)
	}
	causes := slices.DeleteFunc(slices.Clone(status.ErrStatus.Details.Causes), func(cause metav1.StatusCause) bool {
		return strings.Contains(cause.Message, "some validation rules were not checked")
	})
	if len(causes) != 1 || root(causes[0].Field) != c.field || !strings.Contains(causes[0].Message, c.says) {
		t.Fatalf("refused, but not by one error at %q that says %q:\n%v", c.field, c.says, causes)
	}
	if strings.Contains(causes[0].Message, "pass@") || strings.Contains(causes[0].Message, "secret@") {
		t.Errorf("the refusal repeats a password: %s", causes[0].Message)
	}
	for r := range rules(t) {
		if r.kind == c.kind && r.field == item.ReplaceAllString(root(causes[0].Field), "[]") && strings.Contains(causes[0].Message, r.message) {
			seen[r] = true
		}
	}
}

var item = regexp.MustCompile(`\[[0-9]+\]`)

// root is how the API server names the field of an error at the object itself.
func root(field string) string {
	if field == "<nil>" {
		return ""
	}
	return field
}

func named(u *unstructured.Unstructured, name string) *unstructured.Unstructured {
	if name != "" {
		u.SetGenerateName("")
		u.SetName(name)
	}
	return u
}

// decodes checks that the Go types know every field that the API server took, and keep its value.
func decodes(t *testing.T, u *unstructured.Unstructured) {
	t.Helper()
	into := map[string]any{broker: &v1alpha1.Broker{}, topology: &v1alpha1.Topology{}, group: &v1alpha1.ConsumerGroup{}}[u.GetKind()]
	text, err := yaml.Marshal(u.Object)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(text, into); err != nil {
		t.Errorf("the Go type does not take what the API server took: %v", err)
	}
}

// rules are all CEL rules of the CRDs.
func rules(t *testing.T) map[seenRule]bool {
	t.Helper()
	found := map[seenRule]bool{}
	for kind, crd := range crds(t) {
		walk(*crd.Spec.Versions[0].Schema.OpenAPIV3Schema, "", func(field, message string) { found[seenRule{kind, field, message}] = true })
	}
	if len(found) < 50 {
		t.Fatalf("only %d rules found in the CRDs", len(found))
	}
	return found
}

func walk(s apiextensionsv1.JSONSchemaProps, field string, rule func(field, message string)) {
	for _, v := range s.XValidations {
		rule(field+v.FieldPath, v.Message)
	}
	for name, p := range s.Properties {
		walk(p, strings.TrimPrefix(field+"."+name, "."), rule)
	}
	if s.Items != nil && s.Items.Schema != nil {
		walk(*s.Items.Schema, field+"[]", rule)
	}
	if s.AdditionalProperties != nil && s.AdditionalProperties.Schema != nil {
		walk(*s.AdditionalProperties.Schema, field+"[*]", rule)
	}
}

// crds reads the CRDs by kind.
func crds(t *testing.T) map[string]apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(crdDir, "shove.dev_*.yaml"))
	if err != nil || len(files) != 3 {
		t.Fatalf("CRD files: %v, %v", files, err)
	}
	byKind := map[string]apiextensionsv1.CustomResourceDefinition{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var crd apiextensionsv1.CustomResourceDefinition
		if err := yaml.UnmarshalStrict(text, &crd); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		byKind[crd.Spec.Names.Kind] = crd
	}
	return byKind
}
