package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TopologySpec describes one subscription: a queue, its hold queues and its dead-letter queue.
type TopologySpec struct {
	// brokerRef names the Broker that holds the queues. Immutable.
	// +required
	BrokerRef BrokerReference `json:"brokerRef,omitzero"`

	// queue is the name of the main queue; every other name derives from it. Letters, digits and . _ -,
	// at most 200 characters, not beginning with "amq.". Immutable. Defaults to metadata.name, and to
	// {namespace}.{name} outside the Broker's namespace.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=200
	// +optional
	Queue string `json:"queue,omitempty"`

	// holdQueues are the delays between attempts, at most 16, in strictly ascending order: the first
	// retry waits in the first, and so on; further retries wait in the last. A tier that leaves the list is
	// retired, not deleted, until it is proven empty. Without any, a retry comes back at once.
	// +kubebuilder:validation:MaxItems=16
	// +listType=atomic
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
	// Kafka, NATS and Redis; on RabbitMQ use rabbitmq.bindings. It takes effect with the Kafka, NATS and
	// Redis backends, which are not in this release.
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

	// publishers are workloads that get the publishing side of this Topology injected, at most 32.
	// +kubebuilder:validation:MaxItems=32
	// +listType=map
	// +listMapKey=kind
	// +listMapKey=name
	// +optional
	Publishers []WorkloadReference `json:"publishers,omitempty"`

	// paused stops every write to the broker. Consumption goes on, and deletion works. Defaults to false.
	// +optional
	Paused bool `json:"paused,omitempty"`

	// rabbitmq holds what exists on RabbitMQ only.
	// +optional
	RabbitMQ *RabbitMQTopology `json:"rabbitmq,omitempty"`

	// kafka holds what exists on Kafka only. It takes effect with the Kafka backend, which is not in this
	// release.
	// +optional
	Kafka *KafkaTopology `json:"kafka,omitempty"`
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
	// +required
	Delay metav1.Duration `json:"delay,omitzero"`
}

// DeadLetter is a dead-letter queue.
type DeadLetter struct {
	// queue is the name of the dead-letter queue. Topologies of one namespace may share one; then
	// nobody deletes it. Immutable. Defaults to {queue}-dlq.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=249
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
	// onFailure is Skip or FailAll.
	// +required
	OnFailure SequenceFailure `json:"onFailure,omitempty"`

	// shards is the number of queues over which keys are spread, between 1 and 128. Different keys of
	// one shard run concurrently. Immutable. Defaults to 8.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=128
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
	// +kubebuilder:validation:MaxLength=249
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
	// +optional
	GroupID string `json:"groupId,omitempty"`

	// config are topic settings, such as retention.ms: "604800000", at most 64. Only what is set here is
	// compared with the broker.
	// +kubebuilder:validation:MaxProperties=64
	// +optional
	Config map[string]string `json:"config,omitempty"`
}

// QueueRole is the part that a queue plays in a Topology.
// +kubebuilder:validation:Enum=Main;Hold;DeadLetter;Shard;Retired
type QueueRole string

const (
	// QueueRoleMain is the queue that publishers write to.
	QueueRoleMain QueueRole = "Main"
	// QueueRoleHold is a delayed-retry tier.
	QueueRoleHold QueueRole = "Hold"
	// QueueRoleDeadLetter is the dead-letter queue.
	QueueRoleDeadLetter QueueRole = "DeadLetter"
	// QueueRoleShard is one shard of a sequenced Topology.
	QueueRoleShard QueueRole = "Shard"
	// QueueRoleRetired is a hold queue that left the spec and still exists.
	QueueRoleRetired QueueRole = "Retired"
)

// QueueStatus is one queue on the broker. Absent numbers are unknown, not zero.
type QueueStatus struct {
	// name of the queue.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=255
	// +required
	Name string `json:"name,omitempty"`

	// role of the queue: Main, Hold, DeadLetter, Shard or Retired.
	// +required
	Role QueueRole `json:"role,omitempty"`

	// delay of a hold queue, also of a retired one.
	// +optional
	Delay *metav1.Duration `json:"delay,omitempty"`

	// ready counts messages that wait: for a consumer, or in a hold queue for their time.
	// +optional
	Ready *int64 `json:"ready,omitempty"`

	// inFlight counts messages that a consumer has received and not settled.
	// +optional
	InFlight *int64 `json:"inFlight,omitempty"`

	// retiredGeneration is the generation of the spec with which a retired queue left it.
	// +optional
	RetiredGeneration *int64 `json:"retiredGeneration,omitempty"`

	// retiredAt is when a retired queue left the spec.
	// +optional
	RetiredAt *metav1.Time `json:"retiredAt,omitempty"`
}

// DeclaredRecord says where the queues of a Topology were declared. Deletion works from it and from
// status.queues alone, also when the Broker or its Secret is gone or has changed.
type DeclaredRecord struct {
	// broker is the Broker object that was used.
	// +optional
	Broker ObjectIdentity `json:"broker,omitzero"`

	// kind of that broker.
	// +kubebuilder:validation:MaxLength=32
	// +optional
	Kind BrokerKind `json:"kind,omitempty"`

	// serverID of the server, as in the Broker's status.
	// +kubebuilder:validation:MaxLength=512
	// +optional
	ServerID string `json:"serverID,omitempty"`

	// vhost is the virtual host on RabbitMQ.
	// +kubebuilder:validation:MaxLength=255
	// +optional
	VHost string `json:"vhost,omitempty"`

	// bindings that the operator made on RabbitMQ.
	// +kubebuilder:validation:MaxItems=128
	// +listType=atomic
	// +optional
	Bindings []RabbitMQBinding `json:"bindings,omitempty"`

	// exchanges that the operator made on RabbitMQ.
	// +kubebuilder:validation:MaxItems=8
	// +kubebuilder:validation:items:MaxLength=255
	// +listType=set
	// +optional
	Exchanges []string `json:"exchanges,omitempty"`
}

// TopologyStatus is what the operator found on the broker.
type TopologyStatus struct {
	// observedGeneration is the generation of the spec that this status is about; -1 before the first
	// reconciliation.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// conditions of the Topology, see the documentation of each.
	// +kubebuilder:validation:MaxItems=32
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// queue is the resolved name of the main queue.
	// +kubebuilder:validation:MaxLength=255
	// +optional
	Queue string `json:"queue,omitempty"`

	// queues are all queues of this Topology on the broker, retired ones included. Written before the
	// first declaration, so that deletion knows them.
	// +kubebuilder:validation:MaxItems=4096
	// +listType=map
	// +listMapKey=name
	// +optional
	Queues []QueueStatus `json:"queues,omitempty"`

	// counts are the sums over queues. They are refreshed at most every 30 s, and only when one of them
	// crosses zero or moves by more than 10 %; live figures are metrics.
	// +optional
	Counts *MessageCounts `json:"counts,omitempty"`

	// countsObservedAt is when the counts were read.
	// +optional
	CountsObservedAt *metav1.Time `json:"countsObservedAt,omitempty"`

	// declared says where the queues were declared.
	// +optional
	Declared *DeclaredRecord `json:"declared,omitempty"`

	// injectedPublishers are the workloads into which the publishing side was injected.
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=kind
	// +listMapKey=name
	// +optional
	InjectedPublishers []WorkloadReference `json:"injectedPublishers,omitempty"`
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
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []Topology `json:"items"`
}
