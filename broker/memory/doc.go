// Package memory is a broker in one process: the reference model that every other backend is compared with, the
// broker of tests and of the quickstart. It keeps the whole contract of package broker (prefetch, leases, redelivery
// in order, holds, mandatory routing, dead letters, external queues) and has hooks that make it fail on purpose.
//
// It is not durable: what it holds is gone when the process ends.
//
// A Server stands for the broker, every client opened on it for one consumer process, so that several consumers, the
// death of one, and a restart of the broker can be played through in one test. It uses nothing but mutexes, channels
// and timers, and so runs under testing/synctest; make the Server inside the bubble.
package memory
