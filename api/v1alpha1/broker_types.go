package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// BrokerSpec says how a broker is reached, with which credentials, and who may use it.
// +kubebuilder:validation:XValidation:rule="[has(self.rabbitmq), has(self.kafka), has(self.nats), has(self.redis), has(self.sqs), has(self.embedded)].exists_one(set, set)",message="set exactly one of rabbitmq, kafka, nats, redis, sqs and embedded: a Broker is one broker; write a second Broker for another"
// +kubebuilder:validation:XValidation:rule="!has(self.kafka) || !has(self.kafka.sasl) || has(self.credentials)",message="kafka.sasl needs credentials: name the Secret in spec.credentials.secretRef, or remove kafka.sasl"
// +kubebuilder:validation:XValidation:rule="!has(self.embedded) || !has(self.tls)",message="an embedded broker has no TLS: remove tls, or run a server of your own and use nats"
// +kubebuilder:validation:XValidation:rule="has(self.embedded) == has(oldSelf.embedded)",message="embedded can be neither added nor removed, because the server and its messages belong to it: create another Broker"
type BrokerSpec struct {
	// rabbitmq connects to RabbitMQ 3.10 or later. Exactly one of rabbitmq, kafka, nats, redis, sqs and
	// embedded is set.
	// +optional
	RabbitMQ *RabbitMQBroker `json:"rabbitmq,omitempty"`

	// kafka connects to Apache Kafka 4, or a server that speaks its protocol. With tls, also an empty one,
	// connections are encrypted.
	// +optional
	Kafka *KafkaBroker `json:"kafka,omitempty"`

	// nats connects to NATS with JetStream, 2.10 or later; held messages move without a consumer from 2.12 on.
	// +optional
	NATS *NATSBroker `json:"nats,omitempty"`

	// redis connects to Redis 7.0 or later, or Valkey 7.2 or later, and uses its streams.
	// +optional
	Redis *RedisBroker `json:"redis,omitempty"`

	// sqs connects to Amazon SNS and SQS. It takes effect with the SQS backend, which is not in this release.
	// +optional
	SQS *SQSBroker `json:"sqs,omitempty"`

	// embedded makes the operator run a NATS JetStream server as a StatefulSet of one replica, with a
	// volume, a Service and generated credentials. It is for development and for data that may be late: one
	// server without a replica (condition SingleReplica). It can be neither added to nor taken from a Broker
	// that exists.
	// +optional
	Embedded *EmbeddedBroker `json:"embedded,omitempty"`

	// credentials are used by the operator, and by pods in the Broker's own namespace where neither
	// workloadCredentials nor the ConsumerGroup's credentials are set. They never leave this namespace.
	// Absent means that the broker is used without credentials (RabbitMQ: as guest); an embedded broker then
	// gets generated ones.
	// +optional
	Credentials *CredentialsSource `json:"credentials,omitempty"`

	// workloadCredentials are what pods use, usually with fewer rights than credentials. Workloads in
	// other namespaces get a copy of this Secret; without it they need credentials of their own
	// (condition CredentialsReady, reason WorkloadCredentialsMissing).
	// +optional
	WorkloadCredentials *CredentialsSource `json:"workloadCredentials,omitempty"`

	// tls says how the broker's certificate is verified and which certificate is shown to it. It switches
	// TLS on for Kafka, and not for RabbitMQ, where the URL does: amqps:// (condition TLSNotUsed).
	// +optional
	TLS *BrokerTLS `json:"tls,omitempty"`

	// allowedNamespaces says which namespaces may hold Topologies on this Broker, and which queues they
	// may claim. Absent means the Broker's own namespace, any queue.
	// +optional
	AllowedNamespaces *AllowedNamespaces `json:"allowedNamespaces,omitempty"`

	// consumerDefaults are options for every consumer on this Broker that does not set them itself.
	// +optional
	ConsumerDefaults *ConsumerOptions `json:"consumerDefaults,omitempty"`

	// resyncInterval is the time between two looks at the broker for what has drifted, jittered, as
	// whole milliseconds between 1s and 24h. Defaults to 5m.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="size(self) > 0 && self.matches('^([0-9]{1,6}([.][0-9]{1,3})?h)?([0-9]{1,7}([.][0-9]{1,3})?m)?([0-9]{1,9}([.][0-9]{1,3})?s)?([0-9]{1,12}ms)?$') && duration(self) >= duration('1s') && duration(self) <= duration('24h')",message="resyncInterval must be whole milliseconds between 1s and 24h: write it like 5m or 30s"
	// +optional
	ResyncInterval *metav1.Duration `json:"resyncInterval,omitempty"`
}

// RabbitMQBroker says how RabbitMQ is reached.
// +kubebuilder:validation:XValidation:rule="!self.url.contains('@')",message="url must not hold user name or password: put them into a Secret and name it in spec.credentials.secretRef (an @ in a virtual host is written %40)",fieldPath=".url"
// +kubebuilder:validation:XValidation:rule="self.url.contains('@') || (isURL(self.url) && self.url.matches('^amqps?://([A-Za-z0-9._-]+|[[][0-9A-Fa-f:.]+[]])(:[0-9]{1,5})?(/[^/?#]*)?$'))",message="url must be an AMQP address without query: write it like amqp://rabbit.shop.svc:5672/ or amqps://rabbit.shop.svc:5671/my-vhost (a / in a virtual host is written %2F)",fieldPath=".url"
type RabbitMQBroker struct {
	// url is the AMQP address, such as amqp://rabbit.shop.svc:5672/ or amqps://rabbit.shop.svc:5671/my-vhost.
	// The path is the virtual host, percent-encoded; an empty path or / is the virtual host "/". User
	// information in the URL is refused: it belongs into the Secret that credentials names.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	// +required
	URL string `json:"url,omitempty"`

	// management is the HTTP API of the management plugin. Without it the operator cannot see unacked
	// counts, arguments and bindings: the condition Drift is Unknown, nothing scales to zero, and
	// deletionPolicy DeleteIfEmpty has no proof and leaves queues behind. It never leaves the Broker's
	// namespace.
	// +optional
	Management *RabbitMQManagement `json:"management,omitempty"`

	// consumerTimeout is the server's consumer_timeout, up to 8760h: RabbitMQ closes the channel of a
	// consumer that holds one message for longer. Effective prefetch is chosen so that this does not
	// happen. 0s means that the server has none. Defaults to 30m, the server's own default.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="size(self) > 0 && self.matches('^([0-9]{1,6}([.][0-9]{1,3})?h)?([0-9]{1,7}([.][0-9]{1,3})?m)?([0-9]{1,9}([.][0-9]{1,3})?s)?([0-9]{1,12}ms)?$') && duration(self) >= duration('0s') && duration(self) <= duration('8760h')",message="consumerTimeout must be whole milliseconds between 0s (the server has none) and 8760h: write it like 30m or 2h"
	// +optional
	ConsumerTimeout *metav1.Duration `json:"consumerTimeout,omitempty"`
}

// RabbitMQManagement says how the management HTTP API is reached.
// +kubebuilder:validation:XValidation:rule="!self.url.contains('@')",message="management.url must not hold user name or password: the Secret in spec.credentials.secretRef is used",fieldPath=".url"
// +kubebuilder:validation:XValidation:rule="self.url.contains('@') || (isURL(self.url) && self.url.matches('^https?://([A-Za-z0-9._-]+|[[][0-9A-Fa-f:.]+[]])(:[0-9]{1,5})?(/[^?#]*)?$'))",message="management.url must be an HTTP address without query: write it like http://rabbit.shop.svc:15672",fieldPath=".url"
type RabbitMQManagement struct {
	// url is the root of the API, such as http://rabbit.shop.svc:15672. User information in the URL is
	// refused; the Broker's credentials are used.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	// +required
	URL string `json:"url,omitempty"`
}

// HostPort is the address of a server, written host:port.
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=300
type HostPort string

// KafkaBroker says how Kafka is reached.
type KafkaBroker struct {
	// bootstrapServers are one to 32 addresses, host:port, from which the rest of the cluster is found.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	// +listType=set
	// +kubebuilder:validation:XValidation:rule="self.all(a, a.matches('^([A-Za-z0-9._-]+|[[][0-9A-Fa-f:.]+[]]):[0-9]{1,5}$'))",message="bootstrapServers must be host:port without a scheme and without credentials: write them like kafka.shop.svc:9092"
	// +required
	BootstrapServers []HostPort `json:"bootstrapServers,omitempty"`

	// sasl switches authentication on; the Broker's credentials are used. Absent means none, or a client
	// certificate (tls.clientCertSecretRef).
	// +optional
	SASL *KafkaSASL `json:"sasl,omitempty"`
}

// SASLMechanism is a way to authenticate to Kafka.
// +kubebuilder:validation:Enum=PLAIN;SCRAM-SHA-256;SCRAM-SHA-512;OAUTHBEARER
type SASLMechanism string

const (
	// SASLPlain sends username and password as they are; use it with TLS only.
	SASLPlain SASLMechanism = "PLAIN"
	// SASLScramSHA256 is SCRAM with SHA-256.
	SASLScramSHA256 SASLMechanism = "SCRAM-SHA-256"
	// SASLScramSHA512 is SCRAM with SHA-512.
	SASLScramSHA512 SASLMechanism = "SCRAM-SHA-512"
	// SASLOAuthBearer sends the key "token" of the Secret.
	SASLOAuthBearer SASLMechanism = "OAUTHBEARER"
)

// KafkaSASL is how clients authenticate to Kafka.
type KafkaSASL struct {
	// mechanism is PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER.
	// +required
	Mechanism SASLMechanism `json:"mechanism,omitempty"`
}

// NATSServer is the address of a NATS server, such as nats://nats.shop.svc:4222.
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=300
type NATSServer string

// NATSBroker says how NATS is reached.
type NATSBroker struct {
	// servers are one to 32 addresses: nats://host:4222, or tls://host:4222 where the server wants TLS.
	// User information in them is refused.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	// +listType=set
	// +kubebuilder:validation:XValidation:rule="self.all(a, a.matches('^((nats|tls|ws|wss)://)?([A-Za-z0-9._-]+|[[][0-9A-Fa-f:.]+[]])(:[0-9]{1,5})?/?$'))",message="servers must be addresses without credentials: write them like nats://nats.shop.svc:4222 or tls://nats.shop.svc:4222, and name the Secret in spec.credentials.secretRef"
	// +required
	Servers []NATSServer `json:"servers,omitempty"`
}

// RedisMode is the way a Redis installation is laid out.
// +kubebuilder:validation:Enum=Standalone;Cluster;Sentinel
type RedisMode string

const (
	// RedisStandalone is one server.
	RedisStandalone RedisMode = "Standalone"
	// RedisCluster is a Redis Cluster; any of its nodes are the addresses.
	RedisCluster RedisMode = "Cluster"
	// RedisSentinel is a primary found through sentinels; these are the addresses.
	RedisSentinel RedisMode = "Sentinel"
)

// RedisBroker says how Redis is reached.
// +kubebuilder:validation:XValidation:rule="(has(self.mode) && self.mode == 'Sentinel') == has(self.masterName)",message="masterName goes with mode: Sentinel: set both, or remove masterName"
// +kubebuilder:validation:XValidation:rule="(has(self.mode) && self.mode != 'Standalone') || size(self.addresses) == 1",message="mode Standalone is one server: write one address, or set mode to Cluster or Sentinel"
type RedisBroker struct {
	// addresses are one to 32 servers, host:port: the one server (Standalone), nodes (Cluster) or
	// sentinels (Sentinel).
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	// +listType=set
	// +kubebuilder:validation:XValidation:rule="self.all(a, a.matches('^([A-Za-z0-9._-]+|[[][0-9A-Fa-f:.]+[]]):[0-9]{1,5}$'))",message="addresses must be host:port without a scheme and without credentials: write them like redis.shop.svc:6379"
	// +required
	Addresses []HostPort `json:"addresses,omitempty"`

	// mode is Standalone, Cluster or Sentinel. Defaults to Standalone.
	// +optional
	Mode RedisMode `json:"mode,omitempty"`

	// masterName is the name under which the sentinels know the primary. Needed with mode Sentinel, and
	// refused otherwise.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +optional
	MasterName string `json:"masterName,omitempty"`
}

// SQSBroker says which SQS is used.
// +kubebuilder:validation:XValidation:rule="!has(self.endpoint) || (isURL(self.endpoint) && self.endpoint.matches('^https?://([A-Za-z0-9._-]+|[[][0-9A-Fa-f:.]+[]])(:[0-9]{1,5})?(/[^?#@]*)?$'))",message="endpoint must be an HTTP address without credentials and query: write it like http://localhost:9324",fieldPath=".endpoint"
type SQSBroker struct {
	// region is the AWS region, such as eu-central-1.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-z]{2,4}(-[a-z]+)+-[0-9]+$')",message="region must be the name of an AWS region: write it like eu-central-1"
	// +required
	Region string `json:"region,omitempty"`

	// endpoint replaces the region's public endpoint: the URL of a VPC endpoint or of an emulator.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	// +optional
	Endpoint string `json:"endpoint,omitempty"`
}

// EmbeddedBroker is a NATS JetStream server that the operator runs.
type EmbeddedBroker struct {
	// storage is the volume of the server.
	// +required
	Storage EmbeddedStorage `json:"storage,omitzero"`
}

// EmbeddedStorage is the volume of an embedded broker.
type EmbeddedStorage struct {
	// size of the volume, at least 1Mi and at most 1Pi, such as 1Gi. Messages may take nine tenths of it. It
	// can grow where the StorageClass allows that, and not shrink (condition VolumeDiffers).
	// +kubebuilder:validation:XValidation:rule="isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('1Mi')) >= 0 && quantity(string(self)).compareTo(quantity('1Pi')) <= 0 && double(int(quantity(string(self)).asApproximateFloat())) == quantity(string(self)).asApproximateFloat()",message="size must be a whole number of bytes of at least 1Mi and at most 1Pi: write it like 1Gi or 500Mi"
	// +required
	Size *resource.Quantity `json:"size,omitempty"`

	// storageClassName is the StorageClass of the volume. Absent means the cluster's default. It matters when
	// the volume is made; a later change has no effect (condition VolumeDiffers).
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +optional
	StorageClassName string `json:"storageClassName,omitempty"`
}

// BrokerTLS configures connections that use TLS. All Secrets are in the Broker's namespace.
// +kubebuilder:validation:XValidation:rule="has(self.caSecretRef) || has(self.clientCertSecretRef) || has(self.serverName)",message="tls must set at least one of caSecretRef, clientCertSecretRef and serverName: remove tls if the defaults are right"
type BrokerTLS struct {
	// caSecretRef names the Secret whose key "ca.crt" holds the certificate authorities that are
	// trusted. Absent means the ones of the image.
	// +optional
	CASecretRef *SecretReference `json:"caSecretRef,omitempty"`

	// clientCertSecretRef names the Secret with the keys "tls.crt" and "tls.key" that hold the client
	// certificate.
	// +optional
	ClientCertSecretRef *SecretReference `json:"clientCertSecretRef,omitempty"`

	// serverName is the name expected in the server's certificate. Defaults to the host that is
	// connected to.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +optional
	ServerName string `json:"serverName,omitempty"`
}

// NamespacesFrom says from which namespaces a Broker may be used.
// +kubebuilder:validation:Enum=Same;All;Selector
type NamespacesFrom string

const (
	// NamespacesSame allows the Broker's own namespace only.
	NamespacesSame NamespacesFrom = "Same"
	// NamespacesAll allows every namespace.
	NamespacesAll NamespacesFrom = "All"
	// NamespacesSelector allows the namespaces that the selector matches, and the Broker's own.
	NamespacesSelector NamespacesFrom = "Selector"
)

// QueuePattern is a queue name in which * stands for any characters and {namespace} for the namespace of
// the Topology.
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=255
// +kubebuilder:validation:XValidation:rule="self.replace('{namespace}', 'x').matches('^[A-Za-z0-9._*-]+$')",message="a pattern must be letters, digits, dots, underscores, hyphens, * and {namespace}: write it like {namespace}.* or orders-*"
type QueuePattern string

// AllowedNamespaces says who may use a Broker.
// +kubebuilder:validation:XValidation:rule="(has(self.from) && self.from == 'Selector') == has(self.selector)",message="selector goes with from: Selector: set both, or remove selector"
type AllowedNamespaces struct {
	// from is Same, All or Selector. Defaults to Same.
	// +optional
	From NamespacesFrom `json:"from,omitempty"`

	// selector picks namespaces by their labels. Needed with from: Selector, and refused otherwise.
	// +optional
	Selector *metav1.LabelSelector `json:"selector,omitempty"`

	// queues are one to 64 patterns; every queue that a Topology of another namespace claims, derived
	// ones and a given dead-letter queue included, has to match one of them. * stands for any characters,
	// {namespace} for the Topology's namespace. Defaults to ["*"] with from: Same, else to
	// ["{namespace}.*"]. Topologies in the Broker's own namespace are not bound by it unless it is set
	// with from: Same.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +listType=set
	// +optional
	Queues []QueuePattern `json:"queues,omitempty"`
}

// BrokerStatus is what the operator knows about a broker.
type BrokerStatus struct {
	// observedGeneration is the generation of the spec that this status is about; -1 before the first
	// reconciliation.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// conditions of the Broker: Ready, Reconciling, Stalled, Connected, ManagementReady, InUse; of an embedded
	// one also ServerReady, SingleReplica, UpdateAvailable, VolumeDiffers.
	// +kubebuilder:validation:MaxItems=32
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// kind of the broker: rabbitmq, kafka, nats, redis, sqs or embedded.
	// +kubebuilder:validation:MaxLength=32
	// +optional
	Kind BrokerKind `json:"kind,omitempty"`

	// serverVersion is what the server calls its version.
	// +kubebuilder:validation:MaxLength=128
	// +optional
	ServerVersion string `json:"serverVersion,omitempty"`

	// serverID identifies the server or cluster: RabbitMQ's cluster name. Brokers with the same serverID
	// share one table of claims.
	// +kubebuilder:validation:MaxLength=512
	// +optional
	ServerID string `json:"serverID,omitempty"`

	// secretHash is a hash over name, uid and resourceVersion of every Secret in use, never over their
	// content. It changes when one of them is rotated.
	// +kubebuilder:validation:MaxLength=128
	// +optional
	SecretHash string `json:"secretHash,omitempty"`

	// dependents is the number of Topologies that refer to this Broker. Absent means not counted yet.
	// +optional
	Dependents *int32 `json:"dependents,omitempty"`
}

// Broker is one message broker and the rules for its use.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=brk,categories=shove
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Kind",type=string,JSONPath=`.status.kind`
// +kubebuilder:printcolumn:name="Version",type=string,JSONPath=`.status.serverVersion`
// +kubebuilder:printcolumn:name="Dependents",type=integer,JSONPath=`.status.dependents`,priority=1
// +kubebuilder:printcolumn:name="Status",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].message`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type Broker struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the standard object metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec is what is wanted.
	// +required
	Spec BrokerSpec `json:"spec,omitzero"`

	// status is what the operator found.
	// +kubebuilder:default={"observedGeneration":-1}
	// +optional
	Status BrokerStatus `json:"status,omitzero"`
}

// GetConditions returns the conditions in the status. The slice is shared, not copied.
func (b *Broker) GetConditions() []metav1.Condition { return b.Status.Conditions }

// SetConditions replaces the conditions in the status.
func (b *Broker) SetConditions(c []metav1.Condition) { b.Status.Conditions = c }

// Kind returns the broker's kind by the block that is set, or "" when none is. With more than one, which
// the API server refuses, the first in the order of the spec wins.
func (s *BrokerSpec) Kind() BrokerKind {
	switch {
	case s.RabbitMQ != nil:
		return BrokerRabbitMQ
	case s.Kafka != nil:
		return BrokerKafka
	case s.NATS != nil:
		return BrokerNATS
	case s.Redis != nil:
		return BrokerRedis
	case s.SQS != nil:
		return BrokerSQS
	case s.Embedded != nil:
		return BrokerEmbedded
	default:
		return ""
	}
}

// BrokerList is a list of Brokers.
//
// +kubebuilder:object:root=true
type BrokerList struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the standard list metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitzero"`

	// items are the Brokers.
	// +required
	Items []Broker `json:"items"`
}
