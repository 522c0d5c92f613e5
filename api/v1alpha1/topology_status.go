package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// QueueRole is the part that a queue plays in a Topology.
// +kubebuilder:validation:Enum=Main;Hold;DeadLetter;Shard;State;Retired
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
	// QueueRoleState holds what a shard remembers about messages that wait in place.
	QueueRoleState QueueRole = "State"
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

	// role of the queue: Main, Hold, DeadLetter, Shard, State or Retired.
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
	// +kubebuilder:validation:MaxItems=8192
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
