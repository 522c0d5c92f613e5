package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// HandlerTimeoutOutcome is the outcome of a handler call that did not return within its deadline.
// +kubebuilder:validation:Enum=Retry;Defer;Reject;Ack
type HandlerTimeoutOutcome string

const (
	// TimeoutRetry spends one retry and sends the message through the next hold queue.
	TimeoutRetry HandlerTimeoutOutcome = "Retry"
	// TimeoutDefer sends the message through the first hold queue without spending a retry. It needs a
	// hold queue on the Topology (condition TimeoutDeferWithoutHold) and is bounded by deferLimit only.
	TimeoutDefer HandlerTimeoutOutcome = "Defer"
	// TimeoutReject dead-letters the message at once.
	TimeoutReject HandlerTimeoutOutcome = "Reject"
	// TimeoutAck removes the message although its work may not have been done: work is lost.
	TimeoutAck HandlerTimeoutOutcome = "Ack"
)

// RetryStrategy says how a message waits between two attempts.
// +kubebuilder:validation:Enum=Republish;InPlace
type RetryStrategy string

const (
	// RetryRepublish writes a copy with the new count to a hold queue, then settles the original.
	RetryRepublish RetryStrategy = "Republish"
	// RetryInPlace writes no copy: the same message waits, un-acked, and comes back.
	RetryInPlace RetryStrategy = "InPlace"
)

// ConsumerOptions are the options of a consumer. They appear in a ConsumerGroup's spec and, as defaults
// for all its ConsumerGroups, in a Broker's spec.consumerDefaults.
//
// The first one that is set wins: the ConsumerGroup's field, then (in library mode) the option given in
// Go, then the Broker's consumerDefaults, then the default named at the field. None of them has a default
// in the API, because a persisted default could not be told from a choice; the resolved value of each
// and the layer it came from are in the ConsumerGroup's status.effective.
type ConsumerOptions struct {
	// prefetch is the upper bound of unsettled messages in one pod, between 1 and 65535 (the largest
	// value AMQP can carry). On RabbitMQ the effective value may be lower, so that no message waits in
	// a pod for longer than the broker's consumer timeout. Defaults to 100.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	// +optional
	Prefetch *int32 `json:"prefetch,omitempty"`

	// concurrency is the number of handlers that run at once in one pod, between 1 and 10000. More than
	// prefetch has no effect, because a handler needs a message. Defaults to 10.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	// +optional
	Concurrency *int32 `json:"concurrency,omitempty"`

	// maxRetries is the number of retries after the first call, between 0 and 10000: a message that
	// always fails is handled maxRetries+1 times and then dead-lettered. 0 allows one call. Defaults
	// to 10.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10000
	// +optional
	MaxRetries *int32 `json:"maxRetries,omitempty"`

	// maxReconnectAttempts is the number of consecutive failures to connect, between 1 and 1000000,
	// after which the consumer ends with an error. The count starts again after 60 s of health. It has
	// nothing to do with maxRetries. Absent means unlimited.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000
	// +optional
	MaxReconnectAttempts *int32 `json:"maxReconnectAttempts,omitempty"`

	// handlerTimeout is the deadline of one handler call, decoding included, as whole milliseconds up
	// to 24h. 0s means no deadline. On RabbitMQ it must stay below the broker's consumer timeout
	// (condition HandlerTimeoutAboveBrokerLimit). Defaults to 30s.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="size(self) > 0 && self.matches('^([0-9]{1,6}([.][0-9]{1,3})?h)?([0-9]{1,7}([.][0-9]{1,3})?m)?([0-9]{1,9}([.][0-9]{1,3})?s)?([0-9]{1,12}ms)?$') && duration(self) >= duration('0s') && duration(self) <= duration('24h')",message="handlerTimeout must be whole milliseconds between 0s (no deadline) and 24h: write it like 30s, 1m30s or 250ms"
	// +optional
	HandlerTimeout *metav1.Duration `json:"handlerTimeout,omitempty"`

	// handlerTimeoutOutcome is what becomes of a message whose handler did not return within
	// handlerTimeout: Retry, Defer, Reject or Ack. It has no effect on a panic, which is always Retry, nor
	// without a deadline. Defaults to Retry; on Redis to leaving the entry pending until it is
	// reclaimed, which spends no retry.
	// +optional
	HandlerTimeoutOutcome *HandlerTimeoutOutcome `json:"handlerTimeoutOutcome,omitempty"`

	// retryStrategy is Republish or InPlace. A running pod keeps the strategy that it started with
	// (condition RestartRequired). Defaults to Republish, and to InPlace on an external Topology, where
	// an explicit Republish is refused (condition RepublishOnExternal).
	// +optional
	RetryStrategy *RetryStrategy `json:"retryStrategy,omitempty"`

	// maxMessageSize is the largest body that reaches a handler, as a quantity of whole bytes between 1
	// and 1Gi. A larger message is dead-lettered with reason "oversize" before it is decoded. Defaults to
	// 10Mi.
	// +kubebuilder:validation:XValidation:rule="isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('1')) >= 0 && quantity(string(self)).compareTo(quantity('1Gi')) <= 0 && double(int(quantity(string(self)).asApproximateFloat())) == quantity(string(self)).asApproximateFloat()",message="maxMessageSize must be a whole number of bytes of at least 1 and at most 1Gi: write it like 10Mi, 512Ki or 65536"
	// +optional
	MaxMessageSize *resource.Quantity `json:"maxMessageSize,omitempty"`

	// drainTimeout is how long running handlers may go on after SIGTERM, as whole milliseconds up to
	// 24h. 0s gives running handlers up at once; the broker delivers their messages again. The pod's
	// grace period has to be longer (condition GracePeriodTooShort). Defaults to 30s.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="size(self) > 0 && self.matches('^([0-9]{1,6}([.][0-9]{1,3})?h)?([0-9]{1,7}([.][0-9]{1,3})?m)?([0-9]{1,9}([.][0-9]{1,3})?s)?([0-9]{1,12}ms)?$') && duration(self) >= duration('0s') && duration(self) <= duration('24h')",message="drainTimeout must be whole milliseconds between 0s (give up at once) and 24h: write it like 30s or 2m"
	// +optional
	DrainTimeout *metav1.Duration `json:"drainTimeout,omitempty"`

	// deferLimit bounds how often and for how long one message may be deferred. A deferLimit replaces
	// the whole deferLimit of a lower layer. Absent means no limit.
	// +optional
	DeferLimit *DeferLimit `json:"deferLimit,omitempty"`

	// crashLimit is the number of deliveries that ended without an outcome, because the process died,
	// after which a message is dead-lettered with reason "crash_loop": between 0 and 10000, 0 switches
	// the limit off. It takes effect where the broker counts deliveries: RabbitMQ quorum queues, not
	// classic ones. Keep it generous: brokers also count what a shutdown hands back. Defaults to 20.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10000
	// +optional
	CrashLimit *int32 `json:"crashLimit,omitempty"`

	// exactlyOnce routes a copy and the acknowledgement of its original in one broker transaction, so
	// that a crash between them leaves no duplicate. It takes effect with exactly-once routing, which is
	// not in this release. A running pod keeps the value that it started with (condition
	// RestartRequired). Defaults to false.
	// +optional
	ExactlyOnce *bool `json:"exactlyOnce,omitempty"`
}

// DeferLimit bounds deferrals of one message. A message beyond either bound is dead-lettered with reason
// "defer_limit_exceeded".
// +kubebuilder:validation:XValidation:rule="has(self.maxDefers) || has(self.maxAge)",message="deferLimit must set maxDefers, maxAge or both: remove deferLimit for no limit"
type DeferLimit struct {
	// maxDefers is the number of times a message may be deferred, between 1 and 1000000.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000
	// +optional
	MaxDefers *int32 `json:"maxDefers,omitempty"`

	// maxAge is how long after it was first seen a message may still be deferred, as whole milliseconds
	// up to 8760h (a year).
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="size(self) > 0 && self.matches('^([0-9]{1,6}([.][0-9]{1,3})?h)?([0-9]{1,7}([.][0-9]{1,3})?m)?([0-9]{1,9}([.][0-9]{1,3})?s)?([0-9]{1,12}ms)?$') && duration(self) >= duration('1ms') && duration(self) <= duration('8760h')",message="maxAge must be whole milliseconds between 1ms and 8760h: write it like 24h or 90m"
	// +optional
	MaxAge *metav1.Duration `json:"maxAge,omitempty"`
}
