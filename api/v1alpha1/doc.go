// Package v1alpha1 holds the custom resources of the API group shove.dev:
//
//   - Broker says how one message broker is reached and who may use it.
//   - Topology describes one subscription: a queue, its delayed-retry tiers
//     and its dead-letter queue.
//   - ConsumerGroup says which workload consumes a Topology and with which
//     retry budget, deadline and scaling.
//
// Validation that needs one object only is CEL in the CRDs (no webhook); what
// needs a second object is a condition, see conditions.go.
//
// The package imports apimachinery only, so that a program which merely reads
// or writes these objects does not link the operator's dependencies.
//
// +kubebuilder:object:generate=true
// +groupName=shove.dev
package v1alpha1
