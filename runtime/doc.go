// Package runtime consumes, settles and publishes messages for one process.
//
// A [Runtime] is made of drivers, a configuration and handlers, and runs until its context ends:
//
//	os.Exit(runtime.Main(
//		runtime.Drivers(rabbitmq.Driver),
//		runtime.Handle[Order]("orders", &shop{}),
//	))
//
// # Configuration
//
// The queues, their delays and every option come from a RuntimeConfig (package config): the file that SHOVE_CONFIG
// names, which the operator mounts and the runtime follows, or one made in code with [Config]. Code binds a [Handler] to
// the name of a Topology and nothing else. An option given in code, such as [HandlerTimeout], yields to the
// ConsumerGroup's field and wins over the Broker's consumerDefaults.
//
// # Handling
//
// A handler returns [Ack], [Retry], [Reject] or [Defer], or a richer copy of one (Retry.Because("stock is down"),
// Defer.Until(t)), or returns an error through [ErrorFunc]. It runs under a deadline and a panic guard; both end as a
// retry. A retried message waits in the hold queue of its tier; after the last one it is dead-lettered. Delivery is at
// least once: a message may come again after a crash, with the same [Metadata.MessageID].
//
// A handler that is also a [DeadHandler] drains the dead-letter queue. [Audited] records every call.
//
// # Publishing
//
// [NewPublisher] makes a typed publisher to a topology by its name. It returns after the broker confirmed, and a
// [PublishError] tells failed messages from those whose fate is unknown.
//
// # Running
//
// [Runtime.Run] drains when its context ends: it stops fetching, gives back what no handler has begun and lets running
// handlers finish. [ExitCode] turns what it returns into the process's exit code. While it runs it serves /metrics,
// /healthz, /readyz and /status on [HTTPAddr].
package runtime
