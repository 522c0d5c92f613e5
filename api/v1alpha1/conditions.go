package v1alpha1

// Conditions that every kind has. They follow kstatus: "kubectl wait", Flux, Argo CD and others read them
// without knowing the kind.
//
// No condition's message holds a counter, a time or a secret; it changes only when the situation does.
const (
	// ConditionReady is True when the object does what its spec says, for the generation in
	// status.observedGeneration. Always present after the first reconciliation. When it is False its
	// reason is the one of the condition that explains it best, and its message says what to do.
	ConditionReady = "Ready"

	// ConditionReconciling is True while the operator is working towards the spec and expects to get
	// there by itself. Abnormal-true: absent otherwise.
	ConditionReconciling = "Reconciling"

	// ConditionStalled is True when nothing will change until a person acts: the operator has stopped
	// trying. Abnormal-true: absent otherwise. Never True together with Reconciling.
	ConditionStalled = "Stalled"
)

// Reasons that every kind uses.
const (
	// ReasonReady goes with Ready=True.
	ReasonReady = "Ready"
	// ReasonProgressing goes with Reconciling=True, and with Ready=False while nothing is wrong yet.
	ReasonProgressing = "Progressing"
	// ReasonPaused goes with conditions whose work spec.paused has stopped.
	ReasonPaused = "Paused"
	// ReasonDeleting goes with Ready=False while a finalizer does its work.
	ReasonDeleting = "Deleting"
	// ReasonInvalidSpec: the spec is one that the API server should have refused, or the names that derive
	// from it are too long for the broker. The message names the field and what to write instead.
	ReasonInvalidSpec = "InvalidSpec"
	// ReasonConflict: another, older object has claimed the same thing. The message names it.
	ReasonConflict = "Conflict"
)

// ConditionPaused is True while spec.paused is. Abnormal-true: absent otherwise.
// Used by Topology (nothing is written to the broker) and ConsumerGroup (pods do not fetch).
const ConditionPaused = "Paused"

// ConditionConflict is True when an older object has claimed a queue of this Topology, or when an older one
// and this ConsumerGroup cannot both have what they ask for. The younger Topology does nothing, the younger
// ConsumerGroup is not served (or, where the conflict is about scale, does not scale) until one of the two
// is changed or deleted. Abnormal-true: absent otherwise. Its reason is one of these.
const (
	ConditionConflict = "Conflict"

	// ReasonQueueClaimed: another Topology holds a name that this one derives. Choose another queue, or
	// delete one of the two.
	ReasonQueueClaimed = "QueueClaimed"
	// ReasonWorkloadScaledByOther: another ConsumerGroup scales the same workload. Remove replicas from one.
	ReasonWorkloadScaledByOther = "WorkloadScaledByOther"
	// ReasonTopologyScaledByOther: another ConsumerGroup scales on the same Topology. Remove replicas from one.
	ReasonTopologyScaledByOther = "TopologyScaledByOther"
	// ReasonTopologyConsumedByOther: another ConsumerGroup has the same workload consume the same Topology.
	// Delete one of them.
	ReasonTopologyConsumedByOther = "TopologyConsumedByOther"
	// ReasonWorkloadModeConflict: another ConsumerGroup, or a Topology's publishers, use the same workload
	// with another mode, container, agent image or agent resources. One pod holds one runtime.
	ReasonWorkloadModeConflict = "WorkloadModeConflict"
)

// Conditions of a Broker.
const (
	// ConditionConnected is True while the operator's connection to the broker is up, False while it is
	// down, Unknown before the first attempt. Its reasons are the ones below. Topologies wait while it is
	// not True and do not call the broker.
	ConditionConnected = "Connected"

	// ReasonConnected goes with Connected=True.
	ReasonConnected = "Connected"
	// ReasonUnreachable: no connection can be made, or it was lost. The operator goes on trying.
	ReasonUnreachable = "Unreachable"
	// ReasonAuthenticationFailed: the broker refused the credentials. Correct the Secret; its change is
	// noticed.
	ReasonAuthenticationFailed = "AuthenticationFailed"
	// ReasonAccessRefused: the user is known and lacks a right; the message names it. Also used by a
	// Topology's Declared.
	ReasonAccessRefused = "AccessRefused"
	// ReasonVHostNotFound: the virtual host of the URL does not exist. Create it or correct the URL.
	ReasonVHostNotFound = "VHostNotFound"
	// ReasonTLSFailed: the TLS handshake failed. Check tls.caSecretRef, tls.serverName and the client
	// certificate.
	ReasonTLSFailed = "TLSFailed"
	// ReasonSecretNotFound: a Secret that the spec names does not exist. Create it.
	ReasonSecretNotFound = "SecretNotFound"
	// ReasonSecretKeyMissing: a Secret lacks a key. The message names the keys that are accepted.
	ReasonSecretKeyMissing = "SecretKeyMissing"
	// ReasonSecretForbidden: the operator may not read Secrets in this namespace. Add the namespace to the
	// chart's list of namespaces.
	ReasonSecretForbidden = "SecretForbidden"
	// ReasonBackendNotAvailable: this release has no backend for that kind of broker.
	ReasonBackendNotAvailable = "BackendNotAvailable"
	// ReasonUnsupportedVersion: the server is older than the backend supports.
	ReasonUnsupportedVersion = "UnsupportedVersion"
)

const (
	// ConditionManagementReady says whether the management API of RabbitMQ answers. Present on RabbitMQ
	// Brokers only. It does not make the Broker unready: without it unacked counts, arguments and bindings
	// are unknown, and DeleteIfEmpty has no proof.
	ConditionManagementReady = "ManagementReady"

	// ReasonManagementReachable goes with ManagementReady=True.
	ReasonManagementReachable = "ManagementReachable"
	// ReasonManagementNotConfigured: rabbitmq.management is not set; the status is False.
	ReasonManagementNotConfigured = "ManagementNotConfigured"
	// ReasonManagementUnreachable: the API does not answer. Check the URL and the network policy.
	ReasonManagementUnreachable = "ManagementUnreachable"
	// ReasonManagementForbidden: the user lacks the tag "monitoring" (or a higher one).
	ReasonManagementForbidden = "ManagementForbidden"
)

// ConditionServerWarning is True while the server is set up in a way that endangers messages; the message says
// what to change. It does not make the Broker unready. Abnormal-true: absent otherwise; its name is its reason.
const ConditionServerWarning = "ServerWarning"

const (
	// ConditionInUse is True while a deleted Broker waits for the Topologies that refer to it; the message
	// names some of them. Abnormal-true: absent otherwise. The wait is bounded; then the Broker goes and
	// its Topologies delete from their stored status.
	ConditionInUse = "InUse"

	// ReasonHasDependents goes with InUse=True.
	ReasonHasDependents = "HasDependents"
)

// Conditions of a Broker with spec.embedded.
const (
	// ConditionServerReady says whether the server that the operator runs for the Broker is up. While it is not
	// True the Broker is not Ready.
	ConditionServerReady = "ServerReady"

	// ReasonServerReady goes with ServerReady=True.
	ReasonServerReady = "ServerReady"
	// ReasonServerStarting: the server's pod is not ready. The message says what is known: that it waits for
	// its volume, is pulling its image, or ends again and again.
	ReasonServerStarting = "ServerStarting"
	// ReasonServerImageMissing: the operator does not know which image to run. Give it --embedded-image.
	ReasonServerImageMissing = "ServerImageMissing"
	// ReasonServerRefused: the API server refused one of the objects that make the server; the message has its
	// words. ObjectNotOurs and the reasons about Secrets occur here as well.
	ReasonServerRefused = "ServerRefused"
)

// ConditionSingleReplica says what an embedded broker is not: it is one server without a replica, so that nothing is
// delivered while it is down, and what is lost with its volume is lost. Always True on an embedded Broker, absent on
// others; its name is its reason.
const ConditionSingleReplica = "SingleReplica"

// ConditionUpdateAvailable is True while the pod of an embedded broker is an older one than the operator would make
// now: of another image, or with another limit. The operator never restarts it; delete the pod to update it.
// Abnormal-true: absent otherwise; its name is its reason.
const ConditionUpdateAvailable = "UpdateAvailable"

// ConditionVolumeDiffers is True while the volume of an embedded broker is not what spec.embedded.storage says. It
// does not make the Broker unready. Abnormal-true: absent otherwise. Its reason is one of these.
const (
	ConditionVolumeDiffers = "VolumeDiffers"

	// ReasonVolumeCannotShrink: the spec asks for less than the volume has. Nothing happens; write the size that
	// there is.
	ReasonVolumeCannotShrink = "VolumeCannotShrink"
	// ReasonVolumeGrowing: the claim asks for more and the volume does not have it yet.
	ReasonVolumeGrowing = "VolumeGrowing"
	// ReasonVolumeGrowthRefused: the claim cannot be made larger, usually because its StorageClass does not allow
	// that. The message has the API server's words.
	ReasonVolumeGrowthRefused = "VolumeGrowthRefused"
	// ReasonStorageClassFixed: the volume is of another StorageClass than the spec names. It is chosen when the
	// volume is made.
	ReasonStorageClassFixed = "StorageClassFixed"
)

// ConditionTLSNotUsed is a warning: the Broker has tls, but its URL is amqp://, so connections are not
// encrypted. Write amqps:// or remove tls. Abnormal-true: absent otherwise; its reason is its own name.
const ConditionTLSNotUsed = "TLSNotUsed"

// Conditions of a Topology.
const (
	// ConditionBrokerReady is True when the Broker exists, allows this Topology and is connected.
	ConditionBrokerReady = "BrokerReady"

	// ReasonBrokerReady goes with BrokerReady=True.
	ReasonBrokerReady = "BrokerReady"
	// ReasonBrokerNotFound: brokerRef names no Broker. Create it or correct the reference.
	ReasonBrokerNotFound = "BrokerNotFound"
	// ReasonBrokerNotReady: the Broker is not Ready; its conditions say why. The Topology waits.
	ReasonBrokerNotReady = "BrokerNotReady"
	// ReasonNamespaceNotAllowed: the Broker's allowedNamespaces do not include this namespace. Ask its
	// owner.
	ReasonNamespaceNotAllowed = "NamespaceNotAllowed"
	// ReasonQueueNotAllowed: a name matches none of the Broker's allowedNamespaces.queues. The message
	// names the queue and the patterns.
	ReasonQueueNotAllowed = "QueueNotAllowed"
	// ReasonBrokerKindMismatch: the spec needs another kind of broker: source on RabbitMQ, for example.
	ReasonBrokerKindMismatch = "BrokerKindMismatch"
)

const (
	// ConditionDeclared is True when every queue exists on the broker as the spec says, or, for an
	// external Topology, when the main queue was found.
	ConditionDeclared = "Declared"

	// ReasonDeclared goes with Declared=True on an owned Topology.
	ReasonDeclared = "Declared"
	// ReasonVerified goes with Declared=True on an external Topology.
	ReasonVerified = "Verified"
	// ReasonDeclareFailed: the broker refused or failed for a reason that may pass; it is tried again.
	ReasonDeclareFailed = "DeclareFailed"
	// ReasonImmutableField: a queue exists with another value of an argument that the broker cannot
	// change. The message names queue, argument and both values. Drain and delete the queue by hand,
	// choose another name, or set external: true. Not tried again until something changes.
	ReasonImmutableField = "ImmutableField"
	// ReasonExternalNotFound: the queue of an external Topology does not exist. Have its owner create it.
	ReasonExternalNotFound = "ExternalNotFound"
	// ReasonSourceNotFound: the topic or stream that source names does not exist.
	ReasonSourceNotFound = "SourceNotFound"
	// ReasonExchangeNotFound: a binding names an exchange that does not exist. Create it, or remove the
	// binding.
	ReasonExchangeNotFound = "ExchangeNotFound"
	// ReasonUnsupported: this broker, or this release, cannot do what the spec asks; the message says
	// what, for example sequenced.
	ReasonUnsupported = "Unsupported"
)

const (
	// ConditionDrift is True when the broker differs from the spec in a way that the operator did not or
	// could not repair, False when the last look found it equal (or repaired it, with an event), Unknown
	// when the broker does not show enough, such as RabbitMQ without a management URL.
	ConditionDrift = "Drift"

	// ReasonInSync goes with Drift=False.
	ReasonInSync = "InSync"
	// ReasonRepaired goes with Drift=False until the next look: the broker differed and was repaired. The
	// message names what differed.
	ReasonRepaired = "Repaired"
	// ReasonDrifted goes with Drift=True. The message names what differs.
	ReasonDrifted = "Drifted"
	// ReasonDriftUnknown goes with Drift=Unknown.
	ReasonDriftUnknown = "DriftUnknown"
)

// Warnings of a Topology. Each is abnormal-true, absent otherwise, and has its own name as its reason.
const (
	// ConditionHoldWithoutDeadLetter: there are hold queues but no dead-letter queue, so a message whose
	// retries are used up is discarded. Add deadLetter: {}.
	ConditionHoldWithoutDeadLetter = "HoldWithoutDeadLetter"
	// ConditionDeadLetterWithoutHold: there is a dead-letter queue but no hold queue, so retries follow
	// each other without a pause. Add holdQueues.
	ConditionDeadLetterWithoutHold = "DeadLetterWithoutHold"
	// ConditionRetiredQueues: hold queues that left the spec still exist; the message names them and what
	// is waited for: pods that do not report the new generation yet, messages, or proof of emptiness.
	ConditionRetiredQueues = "RetiredQueues"
	// ConditionMessagesAtRisk: something on the broker endangers messages, such as a RabbitMQ policy that sets
	// overflow or a length limit on a queue and thereby turns at-least-once dead-lettering off. The message
	// names queue and cause, and says what to change.
	ConditionMessagesAtRisk = "MessagesAtRisk"
	// ConditionHeldMessagesStuck: expired messages cannot leave a hold queue, because their target is
	// missing or refuses them. They are not lost; RabbitMQ tries again every 3 minutes.
	ConditionHeldMessagesStuck = "HeldMessagesStuck"
)

// Conditions about injection, of a ConsumerGroup and (for publishers) of a Topology.
const (
	// ConditionInjected is True when the workload's pod template carries the configuration. On a Topology
	// it is about all spec.publishers and absent without any.
	ConditionInjected = "Injected"

	// ReasonInjected goes with Injected=True.
	ReasonInjected = "Injected"
	// ReasonRenderedOnly goes with Injected=True and says that there is no workloadRef: ConfigMap and Secret
	// are rendered, and somebody else mounts them.
	ReasonRenderedOnly = "RenderedOnly"
	// ReasonWorkloadNotFound: the workload does not exist (yet).
	ReasonWorkloadNotFound = "WorkloadNotFound"
	// ReasonInjectionNotAllowed: the workload lacks the annotation shove.dev/inject: "true".
	ReasonInjectionNotAllowed = "InjectionNotAllowed"
	// ReasonContainerNotFound: the workload has no container of that name. The message lists its containers.
	ReasonContainerNotFound = "ContainerNotFound"
	// ReasonContainerAmbiguous: the workload has several containers and the reference names none.
	ReasonContainerAmbiguous = "ContainerAmbiguous"
	// ReasonFieldOwnedByOther: somebody else owns a field of the pod template that injection needs, such
	// as the environment variable SHOVE_CONFIG. Nothing is forced; the message names field and owner.
	ReasonFieldOwnedByOther = "FieldOwnedByOther"
	// ReasonInjectionRefused: the API server refused the injected pod template; the message has its words.
	ReasonInjectionRefused = "InjectionRefused"
	// ReasonObjectNotOurs: the ConfigMap or Secret to render exists and was not made by the operator. Delete or
	// rename it; the message names it.
	ReasonObjectNotOurs = "ObjectNotOurs"
	// ReasonSidecarImageMissing: mode is Sidecar, sidecar.image is not set, and the operator has no default.
	ReasonSidecarImageMissing = "SidecarImageMissing"
)

// Conditions of a ConsumerGroup.
const (
	// ConditionTopologyReady is True when the Topology exists and is Ready.
	ConditionTopologyReady = "TopologyReady"

	// ReasonTopologyReady goes with TopologyReady=True.
	ReasonTopologyReady = "TopologyReady"
	// ReasonTopologyNotFound: topologyRef names no Topology in this namespace.
	ReasonTopologyNotFound = "TopologyNotFound"
	// ReasonTopologyNotReady: the Topology is not Ready; its conditions say why.
	ReasonTopologyNotReady = "TopologyNotReady"
)

const (
	// ConditionCredentialsReady is True when the pods have credentials, or need none.
	ConditionCredentialsReady = "CredentialsReady"

	// ReasonCredentialsReady goes with CredentialsReady=True.
	ReasonCredentialsReady = "CredentialsReady"
	// ReasonWorkloadCredentialsMissing: the Broker is in another namespace and offers no
	// workloadCredentials, and its own never leave its namespace. Set credentials here, or have its owner
	// set workloadCredentials. SecretNotFound, SecretKeyMissing and SecretForbidden occur here as well.
	ReasonWorkloadCredentialsMissing = "WorkloadCredentialsMissing"
)

const (
	// ConditionConfigDelivered is True when every running pod reports the rendered configuration, False
	// while some do not, Unknown when pods do not report (no workloadRef).
	ConditionConfigDelivered = "ConfigDelivered"

	// ReasonDelivered goes with ConfigDelivered=True.
	ReasonDelivered = "Delivered"
	// ReasonWaitingForPods: the configuration was rendered and some pods run an older one still.
	ReasonWaitingForPods = "WaitingForPods"
	// ReasonConfigRejected: a pod refused the new configuration and runs its last good one; the message
	// names the pod and its error.
	ReasonConfigRejected = "ConfigRejected"
	// ReasonNotReported goes with ConfigDelivered=Unknown.
	ReasonNotReported = "NotReported"
)

// Warnings of a ConsumerGroup. Each is abnormal-true, absent otherwise, and has its own name as its reason.
const (
	// ConditionGracePeriodTooShort: the pods' terminationGracePeriodSeconds is set by somebody else and
	// shorter than drainTimeout needs. The message says the number to set.
	ConditionGracePeriodTooShort = "GracePeriodTooShort"
	// ConditionRestartRequired: exactlyOnce, retryStrategy or the kind of the broker changed, which running
	// pods cannot take over. The message names pods; restart them (kubectl rollout restart). The operator
	// never does.
	ConditionRestartRequired = "RestartRequired"
	// ConditionHandlerTimeoutAboveBrokerLimit: handlerTimeout is off, or too long for the broker's limit on
	// how long a consumer may hold a message (RabbitMQ: rabbitmq.consumerTimeout less 60 s). Lower
	// handlerTimeout, or raise the limit on the server and in the Broker.
	ConditionHandlerTimeoutAboveBrokerLimit = "HandlerTimeoutAboveBrokerLimit"
	// ConditionTimeoutDeferWithoutHold: handlerTimeoutOutcome is Defer and the Topology has no hold queue.
	// The group is not served until the Topology has one or the outcome is another.
	ConditionTimeoutDeferWithoutHold = "TimeoutDeferWithoutHold"
	// ConditionInvalidOptions: an option of this group, or of its Broker's consumerDefaults, has a value that
	// the API server should have refused. The message names the option. The group is not served.
	ConditionInvalidOptions = "InvalidOptions"
	// ConditionRepublishOnExternal: retryStrategy is Republish and the Topology is external, where nothing
	// is ever written. The group is not served until retryStrategy is removed or InPlace.
	ConditionRepublishOnExternal = "RepublishOnExternal"
	// ConditionHandlerTimeoutsDiffer: handler timeouts of the groups on one Redis stream differ by more
	// than a factor of two, so that one could reclaim what another is working on. Bring them closer.
	ConditionHandlerTimeoutsDiffer = "HandlerTimeoutsDiffer"
	// ConditionTimeoutAckLosesWork: handlerTimeoutOutcome is Ack, so a slow message is removed although
	// its work may not be done. Allowed; a warning only.
	ConditionTimeoutAckLosesWork = "TimeoutAckLosesWork"
)

const (
	// ConditionScalingActive is True while the operator scales the workload, False while it is not meant
	// to, Unknown when the backlog cannot be read; then the replicas stay as they are. Absent without
	// replicas. It takes effect with scaling, which is not in this release.
	ConditionScalingActive = "ScalingActive"

	// ReasonScalingActive goes with ScalingActive=True.
	ReasonScalingActive = "ScalingActive"
	// ReasonScalingNotAvailable: this release does not scale.
	ReasonScalingNotAvailable = "ScalingNotAvailable"
	// ReasonBacklogUnknown goes with ScalingActive=Unknown.
	ReasonBacklogUnknown = "BacklogUnknown"
)

// Annotations and finalizers of this API group.
const (
	// AnnotationInject, with the value "true" on a workload, allows injection into it.
	AnnotationInject = "shove.dev/inject"
	// AnnotationConfigGeneration is set on running pods so that kubelet brings them the new configuration
	// at once.
	AnnotationConfigGeneration = "shove.dev/config-generation"
	// FinalizerBroker keeps a Broker while Topologies refer to it, for a bounded time.
	FinalizerBroker = "shove.dev/broker-in-use"
	// FinalizerTopology runs a deletionPolicy other than Retain, for a bounded time.
	FinalizerTopology = "shove.dev/topology"
)
