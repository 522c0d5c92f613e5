// Package render turns what people write (Broker, Topology, ConsumerGroup) into what drivers, runtimes and workloads
// take: a broker.Declaration, a config.RuntimeConfig, and the patch that brings it into a pod template. Everything
// here is a pure function of its arguments: no client, no clock. The operator and "kubectl shove render" share it.
package render
