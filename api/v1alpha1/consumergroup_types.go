package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ConsumerGroupSpec says which workload consumes a Topology, and how.
// +kubebuilder:validation:XValidation:rule="self.topologyRef == oldSelf.topologyRef",message="topologyRef is immutable: create another ConsumerGroup for another Topology"
// +kubebuilder:validation:XValidation:rule="has(self.workloadRef) == has(oldSelf.workloadRef) && (!has(self.workloadRef) || self.workloadRef == oldSelf.workloadRef)",message="workloadRef is immutable, also from absent to set: create another ConsumerGroup for another workload"
// +kubebuilder:validation:XValidation:rule="(has(self.mode) ? self.mode : 'Library') == (has(oldSelf.mode) ? oldSelf.mode : 'Library')",message="mode is immutable: create another ConsumerGroup with the other mode"
// +kubebuilder:validation:XValidation:rule="!has(self.mode) || self.mode != 'Sidecar' || has(self.sidecar)",message="mode Sidecar needs sidecar: write it like {port: 8080, path: /messages}"
// +kubebuilder:validation:XValidation:rule="!has(self.replicas) || has(self.workloadRef)",message="replicas needs a workload to scale: name it in workloadRef, or remove replicas"
// +kubebuilder:validation:XValidation:rule="!has(self.scaling) || (has(self.scaling.mode) && self.scaling.mode == 'None') || has(self.replicas)",message="scaling works within replicas: set replicas like {min: 1, max: 8}, or remove scaling"
type ConsumerGroupSpec struct {
	// topologyRef names the Topology, in the same namespace. Immutable. All ConsumerGroups on one
	// Topology compete for its messages.
	// +required
	TopologyRef TopologyReference `json:"topologyRef,omitzero"`

	// workloadRef names the workload that gets the configuration injected, and is scaled if replicas is
	// set. Immutable. Absent means that only the ConfigMap and the Secret {name}-shove are rendered, for
	// people who mount them.
	// +optional
	WorkloadRef *WorkloadReference `json:"workloadRef,omitempty"`

	// credentials are what the pods of this group use, from a Secret in the same namespace. They win
	// over the Broker's workloadCredentials and credentials.
	// +optional
	Credentials *CredentialsSource `json:"credentials,omitempty"`

	// mode is Library or Sidecar. Immutable. Defaults to Library.
	// +optional
	Mode ConsumerMode `json:"mode,omitempty"`

	// sidecar configures the agent. Needed with mode Sidecar, without effect otherwise. It takes effect
	// with the agent, which is not in this release.
	// +optional
	Sidecar *Sidecar `json:"sidecar,omitempty"`

	// replicas are the bounds within which the workload is scaled. Absent means that the operator never
	// touches the scale. It takes effect with scaling, which is not in this release.
	// +optional
	Replicas *ReplicaBounds `json:"replicas,omitempty"`

	// scaling tunes how the workload is scaled within replicas. It takes effect with scaling, which is not
	// in this release.
	// +optional
	Scaling *Scaling `json:"scaling,omitempty"`

	// paused makes the pods stop fetching, without a restart, and freezes the scale. Defaults to false.
	// +optional
	Paused bool `json:"paused,omitempty"`

	ConsumerOptions `json:",inline"`
}

// TopologyReference names a Topology in the same namespace.
type TopologyReference struct {
	// name of the Topology.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +required
	Name string `json:"name,omitempty"`
}

// ConsumerMode says how a workload consumes.
// +kubebuilder:validation:Enum=Library;Sidecar
type ConsumerMode string

const (
	// ModeLibrary means that the workload links the Go runtime.
	ModeLibrary ConsumerMode = "Library"
	// ModeSidecar means that the agent consumes and calls the workload over HTTP.
	ModeSidecar ConsumerMode = "Sidecar"
)

// Sidecar configures the agent that calls the workload over HTTP.
type Sidecar struct {
	// port on which the workload's container listens, between 1 and 65535.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	// +required
	Port int32 `json:"port,omitempty"`

	// path that gets the messages. Defaults to /messages.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	// +kubebuilder:validation:XValidation:rule="self.matches('^/[^?#]*$')",message="path must begin with / and have no query: write it like /messages"
	// +optional
	Path string `json:"path,omitempty"`

	// readinessPath is asked before messages are sent; while it does not answer 2xx, messages wait and
	// spend nothing. Absent means that the workload is taken for ready once its port accepts connections.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	// +kubebuilder:validation:XValidation:rule="self.matches('^/[^?#]*$')",message="readinessPath must begin with / and have no query: write it like /ready"
	// +optional
	ReadinessPath string `json:"readinessPath,omitempty"`

	// deadLetters makes the agent drain the dead-letter queue to {path}/dead. Defaults to false.
	// +optional
	DeadLetters bool `json:"deadLetters,omitempty"`

	// image of the agent. Defaults to the one that belongs to the operator.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	// +optional
	Image string `json:"image,omitempty"`

	// resources of the agent's container.
	// +optional
	Resources *SidecarResources `json:"resources,omitempty"`
}

// SidecarResources are what the agent's container asks for and is limited to, as in a pod.
type SidecarResources struct {
	// limits by resource name, such as memory: 128Mi.
	// +kubebuilder:validation:MaxProperties=16
	// +optional
	Limits map[string]resource.Quantity `json:"limits,omitempty"`

	// requests by resource name, such as cpu: 50m.
	// +kubebuilder:validation:MaxProperties=16
	// +optional
	Requests map[string]resource.Quantity `json:"requests,omitempty"`
}

// ReplicaBounds bound the scale of a workload.
// +kubebuilder:validation:XValidation:rule="!has(self.min) || self.min <= self.max",message="replicas.min must not exceed replicas.max: raise max or lower min"
type ReplicaBounds struct {
	// min is the smallest number of replicas, between 0 and 10000. 0 allows scaling to zero, which
	// happens only when the backlog, messages in flight included, is known to be empty. Defaults to 1.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10000
	// +optional
	Min *int32 `json:"min,omitempty"`

	// max is the largest number of replicas, between 1 and 10000, not below min.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	// +required
	Max int32 `json:"max,omitempty"`
}

// ScalingMode says who scales the workload.
// +kubebuilder:validation:Enum=Builtin;KEDA;None
type ScalingMode string

const (
	// ScalingBuiltin lets the operator scale.
	ScalingBuiltin ScalingMode = "Builtin"
	// ScalingKEDA renders a ScaledObject and lets KEDA scale.
	ScalingKEDA ScalingMode = "KEDA"
	// ScalingNone scales nothing.
	ScalingNone ScalingMode = "None"
)

// Scaling tunes the scaling of a workload. Capacity is replicas × prefetch; backlog is ready + in flight
// + held and due.
// +kubebuilder:validation:XValidation:rule="(has(self.scaleUpMultiplier) && !self.scaleUpMultiplier.matches('^[0-9]{1,4}([.][0-9]{1,4})?$')) || (has(self.scaleDownMultiplier) && !self.scaleDownMultiplier.matches('^[0-9]{1,4}([.][0-9]{1,4})?$')) || (has(self.scaleDownMultiplier) ? double(self.scaleDownMultiplier) : 0.5) < (has(self.scaleUpMultiplier) ? double(self.scaleUpMultiplier) : 2.0)",message="scaleDownMultiplier (default 0.5) must be below scaleUpMultiplier (default 2.0): lower the first or raise the second"
type Scaling struct {
	// mode is Builtin, KEDA or None. Defaults to Builtin.
	// +optional
	Mode ScalingMode `json:"mode,omitempty"`

	// scaleUpMultiplier is the decimal number that capacity is multiplied with: a larger backlog calls for
	// more replicas. Greater than scaleDownMultiplier. Defaults to "2.0".
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=16
	// +kubebuilder:validation:XValidation:rule="self.matches('^[0-9]{1,4}([.][0-9]{1,4})?$') && double(self) > 0.0",message="scaleUpMultiplier must be a decimal number above zero in quotes: write it like '2.0'"
	// +optional
	ScaleUpMultiplier string `json:"scaleUpMultiplier,omitempty"`

	// scaleDownMultiplier is the decimal number that capacity is multiplied with: a smaller backlog allows
	// fewer replicas. Defaults to "0.5".
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=16
	// +kubebuilder:validation:XValidation:rule="self.matches('^[0-9]{1,4}([.][0-9]{1,4})?$')",message="scaleDownMultiplier must be a decimal number in quotes: write it like '0.5'"
	// +optional
	ScaleDownMultiplier string `json:"scaleDownMultiplier,omitempty"`

	// pollInterval is the time between two looks at the backlog, between 1s and 1h. Defaults to 5s.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="size(self) > 0 && self.matches('^([0-9]{1,6}([.][0-9]{1,3})?h)?([0-9]{1,7}([.][0-9]{1,3})?m)?([0-9]{1,9}([.][0-9]{1,3})?s)?([0-9]{1,12}ms)?$') && duration(self) >= duration('1s') && duration(self) <= duration('1h')",message="pollInterval must be whole milliseconds between 1s and 1h: write it like 5s or 1m"
	// +optional
	PollInterval *metav1.Duration `json:"pollInterval,omitempty"`

	// hysteresis is how long a reason to scale has to last, between 0s and 24h. Defaults to 10s.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="size(self) > 0 && self.matches('^([0-9]{1,6}([.][0-9]{1,3})?h)?([0-9]{1,7}([.][0-9]{1,3})?m)?([0-9]{1,9}([.][0-9]{1,3})?s)?([0-9]{1,12}ms)?$') && duration(self) >= duration('0s') && duration(self) <= duration('24h')",message="hysteresis must be whole milliseconds between 0s and 24h: write it like 10s or 1m"
	// +optional
	Hysteresis *metav1.Duration `json:"hysteresis,omitempty"`

	// cooldown is the time after a change of scale in which there is no other, between 0s and 24h.
	// Defaults to 30s.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="size(self) > 0 && self.matches('^([0-9]{1,6}([.][0-9]{1,3})?h)?([0-9]{1,7}([.][0-9]{1,3})?m)?([0-9]{1,9}([.][0-9]{1,3})?s)?([0-9]{1,12}ms)?$') && duration(self) >= duration('0s') && duration(self) <= duration('24h')",message="cooldown must be whole milliseconds between 0s and 24h: write it like 30s or 5m"
	// +optional
	Cooldown *metav1.Duration `json:"cooldown,omitempty"`

	// maxStep is the largest number of replicas that one decision adds or removes, between 1 and 10000.
	// Absent means no limit but replicas.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	// +optional
	MaxStep *int32 `json:"maxStep,omitempty"`
}

// OptionLayer says where the value of an option comes from.
// +kubebuilder:validation:Enum=ConsumerGroup;Broker;Default;BrokerLimit
type OptionLayer string

const (
	// LayerConsumerGroup is a field of the ConsumerGroup.
	LayerConsumerGroup OptionLayer = "ConsumerGroup"
	// LayerBroker is the Broker's consumerDefaults.
	LayerBroker OptionLayer = "Broker"
	// LayerDefault is the product's default. In library mode an option given in Go code replaces it, and
	// replaces LayerBroker too; the operator cannot see it.
	LayerDefault OptionLayer = "Default"
	// LayerBrokerLimit is a value that was lowered because the broker would not bear the wanted one.
	LayerBrokerLimit OptionLayer = "BrokerLimit"
)

// EffectiveOption is the resolved value of one option.
type EffectiveOption struct {
	// value as one would write it in a manifest; "unlimited" or "none" where nothing is limited.
	// +kubebuilder:validation:MaxLength=253
	// +required
	Value string `json:"value"`

	// layer that the value comes from.
	// +required
	Layer OptionLayer `json:"layer,omitempty"`
}

// EffectiveOptions are the resolved options of a consumer, each with the layer it comes from.
type EffectiveOptions struct {
	// prefetch in effect.
	// +optional
	Prefetch *EffectiveOption `json:"prefetch,omitempty"`
	// concurrency in effect.
	// +optional
	Concurrency *EffectiveOption `json:"concurrency,omitempty"`
	// maxRetries in effect.
	// +optional
	MaxRetries *EffectiveOption `json:"maxRetries,omitempty"`
	// maxReconnectAttempts in effect.
	// +optional
	MaxReconnectAttempts *EffectiveOption `json:"maxReconnectAttempts,omitempty"`
	// handlerTimeout in effect.
	// +optional
	HandlerTimeout *EffectiveOption `json:"handlerTimeout,omitempty"`
	// handlerTimeoutOutcome in effect.
	// +optional
	HandlerTimeoutOutcome *EffectiveOption `json:"handlerTimeoutOutcome,omitempty"`
	// retryStrategy in effect.
	// +optional
	RetryStrategy *EffectiveOption `json:"retryStrategy,omitempty"`
	// maxMessageSize in effect.
	// +optional
	MaxMessageSize *EffectiveOption `json:"maxMessageSize,omitempty"`
	// drainTimeout in effect.
	// +optional
	DrainTimeout *EffectiveOption `json:"drainTimeout,omitempty"`
	// deferLimit in effect, such as "maxDefers=100,maxAge=24h".
	// +optional
	DeferLimit *EffectiveOption `json:"deferLimit,omitempty"`
	// crashLimit in effect.
	// +optional
	CrashLimit *EffectiveOption `json:"crashLimit,omitempty"`
	// exactlyOnce in effect.
	// +optional
	ExactlyOnce *EffectiveOption `json:"exactlyOnce,omitempty"`
}

// ConsumerGroupStatus is what the operator found and rendered.
type ConsumerGroupStatus struct {
	// observedGeneration is the generation of the spec that this status is about; -1 before the first
	// reconciliation.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// conditions of the ConsumerGroup, see the documentation of each.
	// +kubebuilder:validation:MaxItems=32
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// replicas of the workload. Absent means unknown, or no workload.
	// +optional
	Replicas *int32 `json:"replicas,omitempty"`

	// readyReplicas of the workload. Absent means unknown, or no workload.
	// +optional
	ReadyReplicas *int32 `json:"readyReplicas,omitempty"`

	// backlog of the Topology, refreshed at most every 30 s, and only when a number crosses zero or moves
	// by more than 10 %.
	// +optional
	Backlog *MessageCounts `json:"backlog,omitempty"`

	// countsObservedAt is when the backlog was read.
	// +optional
	CountsObservedAt *metav1.Time `json:"countsObservedAt,omitempty"`

	// effective is every option with its resolved value and the layer that it comes from.
	// +optional
	Effective *EffectiveOptions `json:"effective,omitempty"`

	// configGeneration identifies the rendered RuntimeConfig that pods should run; they report the one
	// that they do run.
	// +kubebuilder:validation:MaxLength=128
	// +optional
	ConfigGeneration string `json:"configGeneration,omitempty"`

	// topologyGeneration is the generation of the Topology from which that RuntimeConfig was rendered.
	// +optional
	TopologyGeneration int64 `json:"topologyGeneration,omitempty"`

	// injected is the workload that was injected into, so that it can be taken back.
	// +optional
	Injected *WorkloadReference `json:"injected,omitempty"`
}

// ConsumerGroup is a workload that consumes a Topology.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=cgrp,categories=shove
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Topology",type=string,JSONPath=`.spec.topologyRef.name`
// +kubebuilder:printcolumn:name="Workload",type=string,JSONPath=`.spec.workloadRef.name`
// +kubebuilder:printcolumn:name="Replicas",type=integer,JSONPath=`.status.replicas`
// +kubebuilder:printcolumn:name="Backlog",type=integer,JSONPath=`.status.backlog.ready`,description="Messages that wait for a consumer"
// +kubebuilder:printcolumn:name="In flight",type=integer,JSONPath=`.status.backlog.inFlight`,priority=1
// +kubebuilder:printcolumn:name="Held",type=integer,JSONPath=`.status.backlog.held`,priority=1
// +kubebuilder:printcolumn:name="Dead",type=integer,JSONPath=`.status.backlog.dead`,priority=1
// +kubebuilder:printcolumn:name="Status",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].message`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="size(self.metadata.name) <= 247",message="metadata.name must have at most 247 characters, so that {name}-shove can name a ConfigMap: choose a shorter name"
type ConsumerGroup struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the standard object metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec is what is wanted.
	// +required
	Spec ConsumerGroupSpec `json:"spec,omitzero"`

	// status is what the operator found.
	// +kubebuilder:default={"observedGeneration":-1}
	// +optional
	Status ConsumerGroupStatus `json:"status,omitzero"`
}

// GetConditions returns the conditions in the status. The slice is shared, not copied.
func (g *ConsumerGroup) GetConditions() []metav1.Condition { return g.Status.Conditions }

// SetConditions replaces the conditions in the status.
func (g *ConsumerGroup) SetConditions(c []metav1.Condition) { g.Status.Conditions = c }

// ConsumerGroupList is a list of ConsumerGroups.
//
// +kubebuilder:object:root=true
type ConsumerGroupList struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the standard list metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitzero"`

	// items are the ConsumerGroups.
	// +required
	Items []ConsumerGroup `json:"items"`
}
