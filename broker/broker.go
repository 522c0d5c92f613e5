// Package broker is the seam between shove and a message broker. The runtime consumes and publishes through a Client,
// the operator declares and observes through an Admin; a Driver makes both. One package per broker implements it, and
// brokertest holds every one of them to the same rules.
//
// The seam may change between releases: use the drivers, do not implement it outside this repository.
package broker

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"log/slog"
	"time"

	"github.com/shove-dev/shove/topology"
)

// Driver is one broker technology.
type Driver struct {
	Kind topology.Kind
	// OpenClient connects for consuming and publishing. It may return before a connection stands; Subscribe and
	// Publish then report ErrUnavailable.
	OpenClient func(context.Context, Config) (Client, error)
	// OpenAdmin connects for declaring and observing. It returns ErrUnavailable or ErrUnauthorized (wrapped) when
	// the broker cannot be reached or refuses the credentials.
	OpenAdmin func(context.Context, Config) (Admin, error)
	// Objects lists what a declaration leads to on the broker, without asking the broker, in the order in which it
	// is created. An error is a *topology.FieldError or wraps ErrUnsupported: the person who wrote it must act.
	Objects func(Declaration) ([]Object, error)
	// Capabilities says what the broker can do for a topology with these options (Declaration.Options).
	Capabilities func(options json.RawMessage) Capabilities
	// LeaseLimit is the longest time that a delivery may stay unsettled on this endpoint when the lease cannot be
	// renewed (RabbitMQ's consumer timeout); zero: it is renewed, or there is none (H11). Nil: zero on every
	// endpoint.
	LeaseLimit func(endpoint json.RawMessage) (time.Duration, error)
}

// Config says how to reach a broker.
type Config struct {
	// Endpoint is the driver's own section of a Broker's spec, as JSON ({"url": …} for rabbitmq).
	Endpoint json.RawMessage
	// Credentials is asked at every connection attempt, so that a rotated secret is used without a restart. Nil:
	// the broker's default credentials, or none.
	Credentials func(context.Context) (Credentials, error)
	// TLS is asked at every connection attempt. Nil: plain text unless the endpoint demands TLS.
	TLS func() (*tls.Config, error)
	// Name is shown by the broker as the connection's name.
	Name string
	// Logger defaults to a discarding one.
	Logger *slog.Logger
}

// Credentials are secrets. They never reach a log, an error or a metric; String keeps them out of %v.
type Credentials struct {
	Username, Password                         string
	Token, NKey, Creds                         string
	AccessKeyID, SecretAccessKey, SessionToken string
}

// String hides the secrets from %v.
func (Credentials) String() string { return "(credentials)" }

// GoString hides the secrets from %#v.
func (Credentials) GoString() string { return "(credentials)" }

// Declaration is a topology together with what only one driver understands.
type Declaration struct {
	Topology topology.Topology
	// Options is the driver's own section of a Topology's spec, as JSON; nil: defaults.
	Options json.RawMessage
	// Retired are hold queues that left the spec and still exist; they are observed, never declared.
	Retired []topology.Queue
}

// Object is one thing on a broker that a declaration leads to.
type Object struct {
	// Kind is the broker's word for it: queue, exchange, binding, topic, stream …
	Kind string `json:"kind"`
	// Name is its physical name.
	Name string        `json:"name"`
	Role topology.Role `json:"role,omitempty"`
	// Properties are its arguments and settings, in the broker's own words.
	Properties map[string]any `json:"properties,omitempty"`
}

// Client consumes and publishes over one connection (or as few as the broker needs). It is safe for concurrent use.
type Client interface {
	// Subscribe starts a subscription. A lost connection is made anew by the call where possible. Errors wrap
	// ErrUnavailable (try again), ErrNotFound (the queue is missing), ErrUnauthorized or ErrUnsupported.
	Subscribe(context.Context, Subscribe) (Subscription, error)
	// Publisher opens the publishing side of a topology's main queue.
	Publisher(context.Context, Declaration) (Publisher, error)
	// Close ends every subscription and publisher and the connection. Safe to call twice.
	Close(context.Context) error
}

// Role of a subscription: which of a topology's queues it reads.
type Role uint8

const (
	// ReadMain reads the topology's messages: the main queue, its shards, or its source.
	ReadMain Role = iota
	// ReadDeadLetter reads the dead-letter queue. Of the actions only Done, Requeue and GiveBack occur there.
	ReadDeadLetter
)

// Subscribe says what to consume and how.
type Subscribe struct {
	Declaration
	Role Role
	// Prefetch bounds the unsettled deliveries of this subscription. At least 1.
	Prefetch int
	// Concurrency is how many handlers the caller runs at once, at most Prefetch.
	Concurrency int
	// Lease is the longest time from receiving a delivery to settling it, without waiting in place; the backend
	// sets what the broker calls ack wait, visibility or idle time from it and from Extend (H11). Zero: unbounded.
	Lease time.Duration
	// InPlace says that the caller asks for WaitInPlace, so that a broker that carries it out (WaitsInBroker) knows
	// that a delivery which comes back need not be one that ended without an outcome.
	InPlace bool
	// Consumer names this consumer to the broker and to people, such as the pod's name.
	Consumer string
	Logger   *slog.Logger
	// Lost is told how many messages the backend found to be gone from the broker although nobody settled them, because
	// somebody deleted or trimmed them away. It may be called from any goroutine. Nil: nobody wants to know.
	Lost func(n int)
}

// Subscription is one run of consuming. When its connection is lost it is over: Receive returns ErrLost, everything
// unsettled comes back from the broker, and a late Settle never touches a newer subscription's deliveries (M3).
type Subscription interface {
	// Receive blocks until at least one delivery is there and returns what is there, never more than Prefetch
	// unsettled ones in all. It is called by one goroutine at a time. It returns ErrClosed after Stop or Close,
	// ErrLost when the connection is gone, and the context's error.
	Receive(context.Context) ([]*Delivery, error)
	// Settle carries out actions. It is safe to call from several goroutines, each with other deliveries, and also
	// after Stop. Nil means all of it is done: every copy confirmed, every acknowledgement sent. Else the error is
	// a *SettleError naming each delivery that is not settled, and why; those stay unsettled and may be settled
	// again, except where the item's error is ErrLost: the broker redelivers them.
	Settle(context.Context, []Settlement) error
	// Stop ends fetching. Deliveries that Receive did not return yet go back to the broker, uncounted where it can;
	// Receive then returns ErrClosed. Those already received can still be settled.
	Stop(context.Context) error
	// Close ends the subscription; what is unsettled goes back to the broker. Safe to call twice, and without Stop.
	Close(context.Context) error
}

// Extender is implemented by subscriptions whose deliveries have a lease that can be renewed (H11).
type Extender interface {
	// Extend renews the lease of unsettled deliveries, to at least d from now.
	Extend(ctx context.Context, deliveries []*Delivery, d time.Duration) error
}

// Revoker is implemented by subscriptions that can lose some of their deliveries while they go on (partitions of a log
// that move to another consumer).
type Revoker interface {
	// NotifyRevoke sets a function that is called when deliveries begin to be taken away: what no handler has begun of
	// those whose Native is Revocable and says so should be given back now. It is called before the first Receive; the
	// function must not block.
	NotifyRevoke(func())
}

// Revocable is implemented by the Native of deliveries of a Revoker.
type Revocable interface {
	// Revoked says that the delivery is being taken away: it can still be settled for a short time.
	Revoked() bool
}

// Publisher publishes to one topology. It is safe for concurrent use.
type Publisher interface {
	// Publish returns after the broker confirmed, and where it routes, routed every message (Q2). Else the error is
	// a *PublishError that tells failed messages (not stored) from unknown ones (Q3). It never repeats a message.
	Publish(context.Context, []Message) error
	Close(context.Context) error
}

// Admin declares and observes. It is safe for concurrent use and holds one connection. Calls return errors that wrap
// ErrUnavailable, ErrUnauthorized, ErrConflict (*ConflictError), ErrNotFound or ErrUnsupported.
type Admin interface {
	// Server identifies the server behind the connection.
	Server(context.Context) (Server, error)
	// Observe compares declarations with the broker, in one batched read where the broker has one. It writes
	// nothing. The result is in the order of the argument.
	Observe(context.Context, []Declaration) ([]Observation, error)
	// Declare creates what is missing and repairs what can be repaired without touching messages. It never deletes
	// a queue and never changes a fixed argument: that is a *ConflictError. Declaring an external topology verifies
	// that its source exists (ErrNotFound) and creates only its dead-letter queue (J4).
	Declare(context.Context, Declaration) error
	// Depths counts messages, in one batched read where the broker has one. A queue that does not exist has
	// Missing set. The result is in the order of the argument, which holds physical names.
	Depths(context.Context, []string) ([]Depth, error)
	// Delete deletes queues by physical name with what is in them and says how many messages that were, where the
	// broker tells. An absent queue is success.
	Delete(context.Context, []string) ([]Deleted, error)
	Close(context.Context) error
}

// Server is what an Admin is connected to.
type Server struct {
	// ID is the same for every connection to one cluster and differs between clusters (RabbitMQ: cluster name and
	// vhost). Two Broker objects with one ID share their claims.
	ID      string
	Version string
	// Warnings are findings about the server that endanger messages, each a sentence that says what to do.
	Warnings []string
	// DetailsErr says why properties of queues and unsettled counts cannot be read although the endpoint names where
	// (RabbitMQ's management API), wrapping ErrUnavailable or ErrUnauthorized. Nil: they can, or nothing is named.
	DetailsErr error
}

// Observation is how a declaration stands on the broker.
type Observation struct {
	Objects []ObservedObject
	// DriftKnown is false where arguments could not be read, so that "no difference" means "none known".
	DriftKnown bool
	// Warnings are findings that endanger messages, such as a policy that turns a guarantee off.
	Warnings []string
}

// ObservedObject is an Object and how it stands.
type ObservedObject struct {
	Object
	Missing bool
	Diffs   []Diff
}

// UpToDate says whether nothing is missing and nothing known differs.
func (o Observation) UpToDate() bool {
	for _, obj := range o.Objects {
		if obj.Missing || len(obj.Diffs) > 0 {
			return false
		}
	}
	return true
}

// Diff is one property that is not as declared.
type Diff struct {
	Property string
	Want     string
	Have     string
	// Repairable says that Declare can mend it without touching messages.
	Repairable bool
	// Remedy is what a person can do about one that is not repairable, where the broker knows something better than
	// draining the queue and declaring it anew; empty: it does not.
	Remedy string
}

// Count is a number that may be unknown. Unknown is not zero.
type Count struct {
	N     int64
	Known bool
}

// Known makes a known count.
func Known(n int64) Count { return Count{N: n, Known: true} }

// Depth is how full a queue is.
type Depth struct {
	Queue   string
	Missing bool
	// Ready counts messages that a consumer could get now; on a hold queue those that wait.
	Ready Count
	// Due counts those of a hold queue's Ready whose delay is over and that consumers take from there by themselves. They
	// are work; the others only wait (L2). Unknown where the broker moves due messages to the main queue.
	Due Count
	// InFlight counts delivered and unsettled ones.
	InFlight Count
	// Stuck counts expired messages that could not be moved to their target (RabbitMQ's messages_dlx).
	Stuck     Count
	Consumers Count
}

// Deleted is one deleted queue.
type Deleted struct {
	Queue    string
	Messages Count
}
