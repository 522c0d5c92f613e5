package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// BrokerKind names the family a broker belongs to, written like the block of the Broker's spec.
type BrokerKind string

const (
	// BrokerRabbitMQ is RabbitMQ 3.10 or later, over AMQP 0-9-1.
	BrokerRabbitMQ BrokerKind = "rabbitmq"
	// BrokerKafka is Apache Kafka or a compatible server.
	BrokerKafka BrokerKind = "kafka"
	// BrokerNATS is NATS with JetStream.
	BrokerNATS BrokerKind = "nats"
	// BrokerRedis is Redis Streams.
	BrokerRedis BrokerKind = "redis"
	// BrokerSQS is Amazon SNS and SQS.
	BrokerSQS BrokerKind = "sqs"
	// BrokerEmbedded is the NATS JetStream server that the operator runs itself.
	BrokerEmbedded BrokerKind = "embedded"
)

// SecretReference names a Secret in the namespace of the object that holds the reference.
// +structType=atomic
type SecretReference struct {
	// name of the Secret.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +required
	Name string `json:"name,omitempty"`
}

// CredentialsSource says where credentials are read from. The Secret holds one of these sets of keys:
// "username" and "password"; "token"; "nkey"; "creds"; "accessKeyId" and "secretAccessKey", with
// "sessionToken" where the credentials are temporary. A change of the Secret is picked up without a
// restart: new connections are made with the new values and the old ones are drained.
type CredentialsSource struct {
	// secretRef names the Secret that holds the credentials.
	// +required
	SecretRef SecretReference `json:"secretRef,omitzero"`
}

// WorkloadKind is a kind of workload that shove injects into and scales.
// +kubebuilder:validation:Enum=Deployment;StatefulSet
type WorkloadKind string

const (
	// WorkloadDeployment is an apps/v1 Deployment.
	WorkloadDeployment WorkloadKind = "Deployment"
	// WorkloadStatefulSet is an apps/v1 StatefulSet.
	WorkloadStatefulSet WorkloadKind = "StatefulSet"
)

// WorkloadReference names one container of a workload in the namespace of the object that holds the
// reference. The workload has to opt in with the annotation shove.dev/inject: "true".
type WorkloadReference struct {
	// kind of the workload: Deployment or StatefulSet.
	// +required
	Kind WorkloadKind `json:"kind,omitempty"`

	// name of the workload.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +required
	Name string `json:"name,omitempty"`

	// container that gets the configuration. May be absent when the pod template has exactly one
	// container (init containers not counted); with several, its absence is the reason
	// ContainerAmbiguous of the condition Injected.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +optional
	Container string `json:"container,omitempty"`
}

// MessageCounts are numbers of messages on the broker. An absent number is unknown, which is not zero:
// RabbitMQ without a management URL, for example, does not tell how many messages are in flight.
type MessageCounts struct {
	// ready counts messages in the main queue (and shards) that wait for a consumer.
	// +optional
	Ready *int64 `json:"ready,omitempty"`

	// inFlight counts messages that a consumer has received and not settled yet.
	// +optional
	InFlight *int64 `json:"inFlight,omitempty"`

	// held counts messages in hold queues, retired ones included.
	// +optional
	Held *int64 `json:"held,omitempty"`

	// dead counts messages in the dead-letter queue.
	// +optional
	Dead *int64 `json:"dead,omitempty"`
}

// ObjectIdentity identifies one object beyond its name: an object that was deleted and created again has
// another uid.
type ObjectIdentity struct {
	// namespace of the object.
	// +kubebuilder:validation:MaxLength=63
	// +optional
	Namespace string `json:"namespace,omitempty"`

	// name of the object.
	// +kubebuilder:validation:MaxLength=253
	// +optional
	Name string `json:"name,omitempty"`

	// uid of the object.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=64
	// +optional
	UID types.UID `json:"uid,omitempty"`
}

// ConditionedObject is implemented by every kind of this package.
// +kubebuilder:object:generate=false
type ConditionedObject interface {
	metav1.Object
	// GetConditions returns the conditions in the object's status. The slice is shared, not copied.
	GetConditions() []metav1.Condition
	// SetConditions replaces the conditions in the object's status.
	SetConditions([]metav1.Condition)
}
