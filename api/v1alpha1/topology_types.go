package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TopologySpec describes one subscription: a queue, its hold queues and its dead-letter queue.
// +kubebuilder:validation:XValidation:rule="self.brokerRef == oldSelf.brokerRef",message="brokerRef is immutable: create another Topology on the other Broker"
// +kubebuilder:validation:XValidation:rule="has(self.queue) == has(oldSelf.queue) && (!has(self.queue) || self.queue == oldSelf.queue)",message="queue is immutable, also from absent to set: create another Topology for another queue"
// +kubebuilder:validation:XValidation:rule="(has(self.external) ? self.external : false) == (has(oldSelf.external) ? oldSelf.external : false)",message="external is immutable: create another Topology; with deletionPolicy Retain the old one can be deleted without loss"
// +kubebuilder:validation:XValidation:rule="has(self.source) == has(oldSelf.source) && (!has(self.source) || self.source == oldSelf.source)",message="source is immutable, also from absent to set: create another Topology for another source"
// +kubebuilder:validation:XValidation:rule="has(self.sequenced) == has(oldSelf.sequenced)",message="sequenced cannot be added or removed: create another Topology with another queue"
// +kubebuilder:validation:XValidation:rule="!has(self.sequenced) || !has(oldSelf.sequenced) || (has(self.sequenced.shards) ? self.sequenced.shards : 8) == (has(oldSelf.sequenced.shards) ? oldSelf.sequenced.shards : 8)",message="sequenced.shards is immutable (default 8), because keys would change their shard: create another Topology with another queue"
// +kubebuilder:validation:XValidation:rule="(has(self.rabbitmq) && has(self.rabbitmq.queueType) ? self.rabbitmq.queueType : 'quorum') == (has(oldSelf.rabbitmq) && has(oldSelf.rabbitmq.queueType) ? oldSelf.rabbitmq.queueType : 'quorum')",message="rabbitmq.queueType is immutable (default quorum), because RabbitMQ cannot change it: create another Topology with another queue"
// +kubebuilder:validation:XValidation:rule="(has(self.deadLetter) && has(self.deadLetter.queue)) == (has(oldSelf.deadLetter) && has(oldSelf.deadLetter.queue)) && (!(has(self.deadLetter) && has(self.deadLetter.queue)) || !(has(oldSelf.deadLetter) && has(oldSelf.deadLetter.queue)) || self.deadLetter.queue == oldSelf.deadLetter.queue)",message="deadLetter.queue is immutable, also from absent to set: create another Topology, or leave the name as it was"
// +kubebuilder:validation:XValidation:rule="(has(self.kafka) && has(self.kafka.groupId)) == (has(oldSelf.kafka) && has(oldSelf.kafka.groupId)) && (!(has(self.kafka) && has(self.kafka.groupId)) || !(has(oldSelf.kafka) && has(oldSelf.kafka.groupId)) || self.kafka.groupId == oldSelf.kafka.groupId)",message="kafka.groupId is immutable, also from absent to set: create another Topology to read with another group"
// +kubebuilder:validation:XValidation:rule="!has(self.kafka) || !has(oldSelf.kafka) || !has(self.kafka.partitions) || !has(oldSelf.kafka.partitions) || self.kafka.partitions >= oldSelf.kafka.partitions",message="kafka.partitions can only grow: write the old number or a larger one"
// +kubebuilder:validation:XValidation:rule="(has(self.nats) && has(self.nats.storage) ? self.nats.storage : 'File') == (has(oldSelf.nats) && has(oldSelf.nats.storage) ? oldSelf.nats.storage : 'File')",message="nats.storage is immutable (default File), because NATS cannot change it: create another Topology with another queue"
// +kubebuilder:validation:XValidation:rule="!has(self.external) || !self.external || !has(self.rabbitmq) || !has(self.rabbitmq.bindings) || size(self.rabbitmq.bindings) == 0",message="an external Topology is only verified: remove rabbitmq.bindings, or external"
// +kubebuilder:validation:XValidation:rule="!has(self.external) || !self.external || !has(self.publishers) || size(self.publishers) == 0",message="nothing is published to an external Topology: remove publishers, or external"
// +kubebuilder:validation:XValidation:rule="!has(self.external) || !self.external || !has(self.rabbitmq) || !has(self.rabbitmq.queueType)",message="an external Topology declares no main queue: remove rabbitmq.queueType, or external"
// +kubebuilder:validation:XValidation:rule="!has(self.external) || !self.external || !has(self.kafka) || !(has(self.kafka.partitions) || has(self.kafka.replicationFactor) || has(self.kafka.config))",message="an external Topology declares no topic: remove kafka.partitions, kafka.replicationFactor and kafka.config, or external"
// +kubebuilder:validation:XValidation:rule="!has(self.sequenced) || (has(self.sequenced.allowMessageLoss) && self.sequenced.allowMessageLoss) || (has(self.deadLetter) && has(self.holdQueues) && size(self.holdQueues) > 0)",message="sequenced needs deadLetter and at least one of holdQueues: add deadLetter: {} and holdQueues, or accept loss with sequenced.allowMessageLoss: true"
// +kubebuilder:validation:XValidation:rule="!has(self.queue) || !has(self.deadLetter) || !has(self.deadLetter.queue) || self.deadLetter.queue != self.queue",message="deadLetter.queue must differ from queue: write another name, or deadLetter: {}"
type TopologySpec struct {
	// brokerRef names the Broker that holds the queues. Immutable.
	// +required
	BrokerRef BrokerReference `json:"brokerRef,omitzero"`

	// queue is the name of the main queue; every other name derives from it. Letters, digits and . _ -
	// with a letter or digit at both ends, at most 200 characters, not beginning with "amq.". Immutable.
	// Defaults to metadata.name, and to {namespace}.{name} outside the Broker's namespace.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=200
	// +kubebuilder:validation:XValidation:rule="self.matches('^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$')",message="queue must be letters, digits, dots, underscores and hyphens with a letter or digit at both ends: write it like orders or shop.orders"
	// +kubebuilder:validation:XValidation:rule="!self.startsWith('amq.')",message="queue must not begin with amq., which RabbitMQ keeps for itself: write another name"
	// +optional
	Queue string `json:"queue,omitempty"`

	// holdQueues are the delays between attempts, at most 16, in strictly ascending order: the first
	// retry waits in the first, and so on; further retries wait in the last. A tier that leaves the list is
	// retired, not deleted, until it is proven empty. Without any, a retry comes back at once.
	// +kubebuilder:validation:MaxItems=16
	// +listType=atomic
	// +kubebuilder:validation:XValidation:rule="!self.all(h, size(h.delay) > 0 && h.delay.matches('^([0-9]{1,6}([.][0-9]{1,3})?h)?([0-9]{1,7}([.][0-9]{1,3})?m)?([0-9]{1,9}([.][0-9]{1,3})?s)?([0-9]{1,12}ms)?$')) || (self.map(h, duration(h.delay)).isSorted() && self.all(h, self.exists_one(o, duration(o.delay) == duration(h.delay))))",message="holdQueues must go from the shortest delay to the longest, each delay once: write them like [{delay: 5s}, {delay: 30s}, {delay: 2m}]"
	// +optional
	HoldQueues []HoldQueue `json:"holdQueues,omitempty"`

	// deadLetter adds a dead-letter queue. Absent means none: what would go there is discarded, counted
	// and logged.
	// +optional
	DeadLetter *DeadLetter `json:"deadLetter,omitempty"`

	// sequenced keeps the messages of one key in order. Absent means no order. Whether it is present is
	// immutable. It takes effect with sequencing, which is not in this release.
	// +optional
	Sequenced *Sequenced `json:"sequenced,omitempty"`

	// source is another topic or stream to read in place of the queue itself: several Topologies with
	// one source each get every message, with hold and dead-letter queues of their own. Immutable. For
	// Kafka, NATS and Redis; on RabbitMQ, where it is the reason BrokerKindMismatch, use rabbitmq.bindings.
	// +optional
	Source *Source `json:"source,omitempty"`

	// external says that somebody else declares the main queue: the operator verifies that it exists and
	// neither declares nor writes to it; retries wait in place. Only the dead-letter queue is declared.
	// Immutable. Defaults to false.
	// +optional
	External bool `json:"external,omitempty"`

	// deletionPolicy says what becomes of the queues when this object is deleted: Retain, DeleteIfEmpty
	// or Delete. Queues that are external, or a dead-letter queue shared with another Topology, are never
	// deleted. Defaults to Retain.
	// +kubebuilder:default=Retain
	// +optional
	DeletionPolicy DeletionPolicy `json:"deletionPolicy,omitempty"`

	// publishers are workloads that get the publishing side of this Topology injected, at most 32. Refused
	// on an external Topology, to which nothing is published.
	// +kubebuilder:validation:MaxItems=32
	// +listType=map
	// +listMapKey=kind
	// +listMapKey=name
	// +optional
	Publishers []WorkloadReference `json:"publishers,omitempty"`

	// paused stops every write to the broker. Consumption goes on, and deletion works. Defaults to false.
	// +optional
	Paused bool `json:"paused,omitempty"`

	// rabbitmq holds what exists on RabbitMQ only. It has no effect on another kind of broker.
	// +optional
	RabbitMQ *RabbitMQTopology `json:"rabbitmq,omitempty"`

	// kafka holds what exists on Kafka only. It has no effect on another kind of broker.
	// +optional
	Kafka *KafkaTopology `json:"kafka,omitempty"`

	// nats holds what exists on NATS, the embedded broker included, only. It is refused on another kind of broker.
	// +optional
	NATS *NATSTopology `json:"nats,omitempty"`
}

// BrokerReference names a Broker.
type BrokerReference struct {
	// name of the Broker.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +required
	Name string `json:"name,omitempty"`

	// namespace of the Broker, which has to allow this namespace (spec.allowedNamespaces). Defaults to
	// the Topology's own.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +optional
	Namespace string `json:"namespace,omitempty"`
}

// HoldQueue is one delayed-retry tier.
type HoldQueue struct {
	// delay is how long a message stays in this tier, as whole milliseconds between 1ms and 720h, such
	// as 5s, 1m30s or 250ms.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="size(self) > 0 && self.matches('^([0-9]{1,6}([.][0-9]{1,3})?h)?([0-9]{1,7}([.][0-9]{1,3})?m)?([0-9]{1,9}([.][0-9]{1,3})?s)?([0-9]{1,12}ms)?$') && duration(self) >= duration('1ms') && duration(self) <= duration('720h')",message="delay must be whole milliseconds between 1ms and 720h: write it like 5s, 1m30s or 250ms"
	// +required
	Delay metav1.Duration `json:"delay,omitzero"`
}

// DeadLetter is a dead-letter queue.
type DeadLetter struct {
	// queue is the name of the dead-letter queue. Topologies of one namespace may share one; then
	// nobody deletes it. Immutable. Defaults to {queue}-dlq.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=200
	// +kubebuilder:validation:XValidation:rule="self.matches('^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$')",message="deadLetter.queue must be letters, digits, dots, underscores and hyphens with a letter or digit at both ends: write it like orders or shop.orders"
	// +kubebuilder:validation:XValidation:rule="!self.startsWith('amq.')",message="deadLetter.queue must not begin with amq., which RabbitMQ keeps for itself: write another name"
	// +optional
	Queue string `json:"queue,omitempty"`
}

// SequenceFailure says what a failed message means for the later messages of its key.
// +kubebuilder:validation:Enum=Skip;FailAll
type SequenceFailure string

const (
	// SequenceSkip dead-letters the failed message and goes on with the next one.
	SequenceSkip SequenceFailure = "Skip"
	// SequenceFailAll dead-letters the failed message and every later one of its key.
	SequenceFailAll SequenceFailure = "FailAll"
)

// SequenceDefer says what Defer means where order is kept.
// +kubebuilder:validation:Enum=Retry;Hold
type SequenceDefer string

const (
	// SequenceDeferRetry treats Defer as Retry, with a warning.
	SequenceDeferRetry SequenceDefer = "Retry"
	// SequenceDeferHold holds the message, and with it its key, without spending a retry.
	SequenceDeferHold SequenceDefer = "Hold"
)

// Sequenced keeps the messages of one key in order: the next one starts only after the previous one is
// finally settled.
type Sequenced struct {
	// onFailure is Skip or FailAll. Defaults to Skip.
	// +optional
	OnFailure SequenceFailure `json:"onFailure,omitempty"`

	// shards is the number of queues over which keys are spread, between 1 and 256. Different keys of
	// one shard run concurrently. Immutable. Defaults to 8.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=256
	// +optional
	Shards int32 `json:"shards,omitempty"`

	// key is where the publisher finds the key of a message when it is not given one: the path of a
	// field in a JSON body, such as customer.id. Absent means that every publish names its key.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +optional
	Key string `json:"key,omitempty"`

	// onDefer is Retry or Hold. Defaults to Retry.
	// +optional
	OnDefer SequenceDefer `json:"onDefer,omitempty"`

	// maxPendingPerKey is the number of messages of one key that may wait in a consumer before it stops
	// fetching, between 1 and 100000. Defaults to 1000.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100000
	// +optional
	MaxPendingPerKey int32 `json:"maxPendingPerKey,omitempty"`

	// allowMessageLoss accepts a sequenced Topology without a dead-letter queue or without hold queues,
	// where a failed message is discarded. Defaults to false.
	// +optional
	AllowMessageLoss bool `json:"allowMessageLoss,omitempty"`
}

// Source is a topic or stream that is read and not owned.
type Source struct {
	// name of the topic or stream.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=200
	// +kubebuilder:validation:XValidation:rule="self.matches('^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$')",message="source.name must be letters, digits, dots, underscores and hyphens with a letter or digit at both ends: write it like orders-log"
	// +required
	Name string `json:"name,omitempty"`
}

// DeletionPolicy says what becomes of queues when their Topology is deleted.
// +kubebuilder:validation:Enum=Retain;DeleteIfEmpty;Delete
type DeletionPolicy string

const (
	// DeletionRetain leaves everything on the broker.
	DeletionRetain DeletionPolicy = "Retain"
	// DeletionDeleteIfEmpty deletes the queues when they are proven empty and unused for 15 s. Without
	// proof within 2 minutes the object goes and the queues stay; an event names them.
	DeletionDeleteIfEmpty DeletionPolicy = "DeleteIfEmpty"
	// DeletionDelete deletes the queues with their messages; an event says how many.
	DeletionDelete DeletionPolicy = "Delete"
)

// RabbitMQQueueType is a type of queue on RabbitMQ.
// +kubebuilder:validation:Enum=quorum;classic
type RabbitMQQueueType string

const (
	// QueueTypeQuorum is a replicated queue.
	QueueTypeQuorum RabbitMQQueueType = "quorum"
	// QueueTypeClassic is a durable queue on one node. It counts no deliveries, so crashLimit has no
	// effect on it.
	QueueTypeClassic RabbitMQQueueType = "classic"
)

// RabbitMQTopology holds what exists on RabbitMQ only.
type RabbitMQTopology struct {
	// queueType is the type of the main queue and of shards: quorum or classic. Hold queues and the
	// dead-letter queue are always quorum queues. Immutable. Defaults to quorum.
	// +optional
	QueueType RabbitMQQueueType `json:"queueType,omitempty"`

	// bindings route messages of existing exchanges to the main queue, at most 64. The operator repairs
	// them, and removes one that leaves the list; it never touches bindings that it did not make.
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	// +kubebuilder:validation:XValidation:rule="self.all(b, self.exists_one(o, o.exchange == b.exchange && (has(o.routingKey) ? o.routingKey : '') == (has(b.routingKey) ? b.routingKey : '')))",message="bindings must name each pair of exchange and routingKey once: remove the repeated one"
	// +optional
	Bindings []RabbitMQBinding `json:"bindings,omitempty"`
}

// RabbitMQBinding binds the main queue to an exchange.
// +structType=atomic
type RabbitMQBinding struct {
	// exchange is the name of an existing exchange.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=255
	// +required
	Exchange string `json:"exchange,omitempty"`

	// routingKey of the binding; in a topic exchange * stands for one word and # for any number.
	// Defaults to empty, which is right for fanout exchanges.
	// +kubebuilder:validation:MaxLength=255
	// +optional
	RoutingKey string `json:"routingKey,omitempty"`
}

// KafkaTopology holds what exists on Kafka only.
type KafkaTopology struct {
	// partitions of the main topic, between 1 and 10000. It may grow, never shrink. Defaults to 8.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	// +optional
	Partitions int32 `json:"partitions,omitempty"`

	// replicationFactor of all topics, between 1 and 64. Defaults to the cluster's default.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	// +optional
	ReplicationFactor int32 `json:"replicationFactor,omitempty"`

	// groupId adopts the committed positions of an existing consumer group. Immutable. Defaults to the
	// queue's name.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=249
	// +kubebuilder:validation:XValidation:rule="self.matches('^[A-Za-z0-9._-]+$')",message="kafka.groupId must be letters, digits, dots, underscores and hyphens: write it like orders-worker"
	// +optional
	GroupID string `json:"groupId,omitempty"`

	// config are topic settings, such as retention.ms: "604800000", at most 64. Only what is set here is
	// compared with the broker.
	// +kubebuilder:validation:MaxProperties=64
	// +kubebuilder:validation:XValidation:rule="self.all(k, k.matches('^[a-z][a-z0-9._-]*$') && size(self[k]) <= 1024)",message="config must map names of topic settings to values of at most 1024 characters: write it like {retention.ms: '604800000'}"
	// +optional
	Config map[string]string `json:"config,omitempty"`
}

// NATSStorage is where a stream keeps its messages.
// +kubebuilder:validation:Enum=File;Memory
type NATSStorage string

const (
	// NATSFile keeps messages on disk.
	NATSFile NATSStorage = "File"
	// NATSMemory keeps them in the server's memory: a restart of the server loses them.
	NATSMemory NATSStorage = "Memory"
)

// NATSTopology holds what exists on NATS only. It applies to the streams that are declared: the main queue's, in which
// held messages wait as well, and the dead-letter queue's.
type NATSTopology struct {
	// replicas of each stream, between 1 and 5; more than 1 need a cluster of as many servers. It may be changed.
	// Defaults to 1, and on a stream that exists to what it has.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=5
	// +optional
	Replicas int32 `json:"replicas,omitempty"`

	// storage of each stream: File or Memory. Memory loses every message when the server restarts. Immutable.
	// Defaults to File.
	// +optional
	Storage NATSStorage `json:"storage,omitempty"`

	// ackWait is how long the messages of a consumer that died stay away before others get them, as whole
	// milliseconds between 1s and 1h. A consumer that lives renews it, so that it bounds no handler. Defaults to 30s.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="size(self) > 0 && self.matches('^([0-9]{1,6}([.][0-9]{1,3})?h)?([0-9]{1,7}([.][0-9]{1,3})?m)?([0-9]{1,9}([.][0-9]{1,3})?s)?([0-9]{1,12}ms)?$') && duration(self) >= duration('1s') && duration(self) <= duration('1h')",message="ackWait must be whole milliseconds between 1s and 1h: write it like 30s"
	// +optional
	AckWait *metav1.Duration `json:"ackWait,omitempty"`
}

// Topology is one subscription: a queue with its delayed-retry tiers and its dead-letter queue.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=topo,categories=shove
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Queue",type=string,JSONPath=`.status.queue`
// +kubebuilder:printcolumn:name="Broker",type=string,JSONPath=`.spec.brokerRef.name`
// +kubebuilder:printcolumn:name="Messages",type=integer,JSONPath=`.status.counts.ready`,description="Messages that wait for a consumer"
// +kubebuilder:printcolumn:name="Held",type=integer,JSONPath=`.status.counts.held`,description="Messages in hold queues"
// +kubebuilder:printcolumn:name="Dead",type=integer,JSONPath=`.status.counts.dead`,description="Messages in the dead-letter queue"
// +kubebuilder:printcolumn:name="Status",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].message`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="has(self.spec.queue) || size(self.metadata.name) <= 200",message="metadata.name has more than 200 characters and is the name of the queue: set spec.queue to a shorter one"
type Topology struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the standard object metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec is what is wanted.
	// +required
	Spec TopologySpec `json:"spec,omitzero"`

	// status is what the operator found.
	// +kubebuilder:default={"observedGeneration":-1}
	// +optional
	Status TopologyStatus `json:"status,omitzero"`
}

// GetConditions returns the conditions in the status. The slice is shared, not copied.
func (t *Topology) GetConditions() []metav1.Condition { return t.Status.Conditions }

// SetConditions replaces the conditions in the status.
func (t *Topology) SetConditions(c []metav1.Condition) { t.Status.Conditions = c }

// TopologyList is a list of Topologies.
//
// +kubebuilder:object:root=true
type TopologyList struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the standard list metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitzero"`

	// items are the Topologies.
	// +required
	Items []Topology `json:"items"`
}
