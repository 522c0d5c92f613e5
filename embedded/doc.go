// Package embedded is a broker that needs nothing installed: a NATS server with JetStream inside a process, with its
// messages in files of one directory.
//
// The operator runs it in a pod for a Broker with spec.embedded ("shove-operator embedded"). A program may run it
// itself, for development and for tests of its own:
//
//	srv, err := embedded.Start(ctx, embedded.Options{Dir: "./data"})
//	…
//	runtime.New(runtime.Drivers(srv.Driver()), …)
//
// It is one server without a replica: while it is down nothing is delivered, and what is lost with its disk is lost.
// docs/embedded.md says what it is good for.
package embedded
