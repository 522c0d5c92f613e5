package config

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// Defaults of consumer options (T).
const (
	DefaultPrefetch       = 100
	DefaultConcurrency    = 10
	DefaultMaxRetries     = 10
	DefaultHandlerTimeout = 30 * time.Second
	DefaultMaxMessageSize = 10 << 20
	DefaultDrainTimeout   = 30 * time.Second
	DefaultCrashLimit     = 20
	maxPrefetch           = 65535
	maxConcurrency        = 10000
)

// Options are the options of one consumer, as one layer gives them; nil means that the layer does not say.
type Options struct {
	// Prefetch bounds the unsettled messages of one pod, 1 to 65535.
	Prefetch *int `json:"prefetch,omitempty"`
	// Concurrency is how many handlers run at once in one pod, 1 to 10000.
	Concurrency *int `json:"concurrency,omitempty"`
	// MaxRetries is the retry budget; the handler runs at most MaxRetries+1 times.
	MaxRetries *uint32 `json:"maxRetries,omitempty"`
	// MaxReconnectAttempts ends the consumer after so many failed attempts in a row; nil at every layer: unlimited.
	MaxReconnectAttempts *int `json:"maxReconnectAttempts,omitempty"`
	// HandlerTimeout is the deadline of decode and handler; 0s: none.
	HandlerTimeout *Duration `json:"handlerTimeout,omitempty"`
	// HandlerTimeoutOutcome is Retry, Defer, Reject or Ack.
	HandlerTimeoutOutcome *string `json:"handlerTimeoutOutcome,omitempty"`
	// RetryStrategy is Republish or InPlace.
	RetryStrategy *string `json:"retryStrategy,omitempty"`
	// MaxMessageSize in bytes; a larger body is dead-lettered unseen.
	MaxMessageSize *int64 `json:"maxMessageSize,omitempty"`
	// DrainTimeout is how long running handlers may finish at shutdown.
	DrainTimeout *Duration `json:"drainTimeout,omitempty"`
	// DeferLimit bounds deferrals.
	DeferLimit *DeferLimit `json:"deferLimit,omitempty"`
	// CrashLimit dead-letters a message after so many crashes of its process; 0: never.
	CrashLimit *uint32 `json:"crashLimit,omitempty"`
	// ExactlyOnce makes copy and acknowledgement one step, where the broker can.
	ExactlyOnce *bool `json:"exactlyOnce,omitempty"`
}

// DeferLimit bounds deferrals by number and age; a zero bound does not bind.
type DeferLimit struct {
	MaxDefers uint32   `json:"maxDefers,omitempty"`
	MaxAge    Duration `json:"maxAge,omitempty"`
}

// Layer is Options and where they come from, such as "ConsumerGroup", "Code" or "Broker".
type Layer struct {
	Name    string
	Options Options
}

// Names of the layers, first one set wins (H2).
const (
	LayerConsumerGroup = "ConsumerGroup"
	LayerCode          = "Code"
	LayerBroker        = "Broker"
	LayerDefault       = "Default"
)

// Effective is every option resolved.
type Effective struct {
	Prefetch, Concurrency int
	MaxRetries            uint32
	// MaxReconnectAttempts is 0 when unlimited.
	MaxReconnectAttempts int
	// HandlerTimeout is 0 when there is no deadline.
	HandlerTimeout time.Duration
	// TimeoutOutcome is VerdictUnset when no layer set it: Retry, except on Redis (H3, H8).
	TimeoutOutcome settle.Verdict
	Strategy       settle.Strategy
	MaxMessageSize int64
	DrainTimeout   time.Duration
	DeferLimit     DeferLimit
	CrashLimit     uint32
	ExactlyOnce    bool
	// From names the layer of every option, by its JSON name.
	From map[string]string
}

// Traits are the facts about topology and broker that defaults depend on.
type Traits struct {
	External bool
	// CrashLimitDefault is the broker's capability of that name.
	CrashLimitDefault bool
	// TimeoutLeavesPending is the broker's capability of that name. A timeout that is left pending counts as another
	// delivery, so that there is no crash limit then unless one is set (C10).
	TimeoutLeavesPending bool
}

// Resolve takes every option from the first layer that sets it, else from the defaults (H2, T), and validates the
// result. The error joins one *topology.FieldError per bad option.
func Resolve(traits Traits, layers ...Layer) (Effective, error) {
	e := Effective{
		Prefetch: DefaultPrefetch, Concurrency: DefaultConcurrency, MaxRetries: DefaultMaxRetries, HandlerTimeout: DefaultHandlerTimeout,
		MaxMessageSize: DefaultMaxMessageSize, DrainTimeout: DefaultDrainTimeout, From: map[string]string{},
	}
	if traits.External {
		e.Strategy = settle.InPlace
	}
	if traits.CrashLimitDefault {
		e.CrashLimit = DefaultCrashLimit
	}
	var outcome, strategy string
	var timeout, drain Duration = Duration(e.HandlerTimeout), Duration(e.DrainTimeout)
	for _, l := range layers {
		o, set := l.Options, setter{e.From, l.Name}
		pick(set, "prefetch", &e.Prefetch, o.Prefetch)
		pick(set, "concurrency", &e.Concurrency, o.Concurrency)
		pick(set, "maxRetries", &e.MaxRetries, o.MaxRetries)
		pick(set, "maxReconnectAttempts", &e.MaxReconnectAttempts, o.MaxReconnectAttempts)
		pick(set, "handlerTimeout", &timeout, o.HandlerTimeout)
		pick(set, "handlerTimeoutOutcome", &outcome, o.HandlerTimeoutOutcome)
		pick(set, "retryStrategy", &strategy, o.RetryStrategy)
		pick(set, "maxMessageSize", &e.MaxMessageSize, o.MaxMessageSize)
		pick(set, "drainTimeout", &drain, o.DrainTimeout)
		pick(set, "deferLimit", &e.DeferLimit, o.DeferLimit)
		pick(set, "crashLimit", &e.CrashLimit, o.CrashLimit)
		pick(set, "exactlyOnce", &e.ExactlyOnce, o.ExactlyOnce)
	}
	if _, set := e.From["crashLimit"]; !set && traits.TimeoutLeavesPending && outcome == "" {
		e.CrashLimit = 0
	}
	for _, name := range optionNames {
		if _, ok := e.From[name]; !ok {
			e.From[name] = LayerDefault
		}
	}
	e.HandlerTimeout, e.DrainTimeout = time.Duration(timeout), time.Duration(drain)
	return e, e.finish(traits, outcome, strategy)
}

var optionNames = []string{"prefetch", "concurrency", "maxRetries", "maxReconnectAttempts", "handlerTimeout", "handlerTimeoutOutcome",
	"retryStrategy", "maxMessageSize", "drainTimeout", "deferLimit", "crashLimit", "exactlyOnce"}

type setter struct {
	from  map[string]string
	layer string
}

func pick[T any](s setter, name string, dst, v *T) {
	if _, done := s.from[name]; v != nil && !done {
		*dst, s.from[name] = *v, s.layer
	}
}

func (e *Effective) finish(traits Traits, outcome, strategy string) error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, &topology.FieldError{Field: field, Problem: fmt.Sprintf(format, args...)})
	}
	inRange := func(field string, v, lo, hi int64) {
		if v < lo || v > hi {
			bad(field, "%d: use %d to %d", v, lo, hi)
		}
	}
	inRange("prefetch", int64(e.Prefetch), 1, maxPrefetch)
	inRange("concurrency", int64(e.Concurrency), 1, maxConcurrency)
	if e.From["maxReconnectAttempts"] != LayerDefault {
		inRange("maxReconnectAttempts", int64(e.MaxReconnectAttempts), 1, math.MaxInt32)
	}
	inRange("maxMessageSize", e.MaxMessageSize, 1, math.MaxInt32)
	for field, d := range map[string]time.Duration{"handlerTimeout": e.HandlerTimeout, "drainTimeout": e.DrainTimeout, "deferLimit.maxAge": time.Duration(e.DeferLimit.MaxAge)} {
		if d < 0 {
			bad(field, "%s: a duration is not negative", d)
		}
	}
	switch outcome {
	case "":
	case "Retry":
		e.TimeoutOutcome = settle.VerdictRetry
	case "Defer":
		e.TimeoutOutcome = settle.VerdictDefer
	case "Reject":
		e.TimeoutOutcome = settle.VerdictReject
	case "Ack":
		e.TimeoutOutcome = settle.VerdictAck
	default:
		bad("handlerTimeoutOutcome", "%q: use Retry, Defer, Reject or Ack", outcome)
	}
	switch strategy {
	case "":
	case "InPlace":
		e.Strategy = settle.InPlace
	case "Republish":
		if traits.External {
			bad("retryStrategy", "Republish would write into an external topology: leave it out, or use InPlace")
		}
		e.Strategy = settle.Republish
	default:
		bad("retryStrategy", "%q: use Republish or InPlace", strategy)
	}
	return errors.Join(errs...)
}

// Policy is what Decide goes by for a topology consumed with these options.
func (e Effective) Policy(t topology.Topology) settle.Policy {
	p := settle.Policy{
		Holds: t.Delays(), DeadLetter: t.DeadLetter != "", MaxRetries: e.MaxRetries, Strategy: e.Strategy,
		MaxDefers: e.DeferLimit.MaxDefers, MaxDeferAge: time.Duration(e.DeferLimit.MaxAge), CrashLimit: e.CrashLimit,
	}
	if s := t.Sequenced; s != nil {
		p.Sequenced, p.HoldDeferred, p.FailAll = true, s.OnDefer == topology.DeferHold, s.OnFailure == topology.FailAll
	}
	return p
}
