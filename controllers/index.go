package controllers

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/topology"
)

// Names of the cache's indexes. Values are "namespace/name" unless stated.
const (
	// indexTopologyBroker: Topologies by the Broker that they refer to.
	indexTopologyBroker = "topology.broker"
	// indexTopologyClaim: Topologies by the logical names of the queues that they claim.
	indexTopologyClaim = "topology.claim"
	// indexBrokerSecret: Brokers by the Secrets that they name.
	indexBrokerSecret = "broker.secret"
	// indexGroupTopology: ConsumerGroups by their Topology.
	indexGroupTopology = "consumergroup.topology"
)

// setupIndexes registers the indexes that the controllers of this package look objects up by.
func setupIndexes(ctx context.Context, idx client.FieldIndexer) error {
	for _, i := range []struct {
		obj  client.Object
		name string
		keys client.IndexerFunc
	}{
		{&v1alpha1.Topology{}, indexTopologyBroker, func(o client.Object) []string { return []string{render.BrokerKey(o.(*v1alpha1.Topology)).String()} }},
		{&v1alpha1.Topology{}, indexTopologyClaim, func(o client.Object) []string { return claimIndexKeys(o.(*v1alpha1.Topology)) }},
		{&v1alpha1.Broker{}, indexBrokerSecret, func(o client.Object) []string { return brokerSecretKeys(o.(*v1alpha1.Broker)) }},
		{&v1alpha1.ConsumerGroup{}, indexGroupTarget, func(o client.Object) []string { return []string{render.TargetOf(o.(*v1alpha1.ConsumerGroup)).String()} }},
		{&v1alpha1.ConsumerGroup{}, indexGroupSecret, func(o client.Object) []string { return groupSecretKeys(o.(*v1alpha1.ConsumerGroup)) }},
		{&v1alpha1.Topology{}, indexTopologyPublisher, func(o client.Object) []string { return publisherKeys(o.(*v1alpha1.Topology)) }},
		{&v1alpha1.Broker{}, indexBrokerWorkloadSecret, func(o client.Object) []string { return workloadSecretKeys(o.(*v1alpha1.Broker)) }},
		{&v1alpha1.ConsumerGroup{}, indexGroupTopology, func(o client.Object) []string {
			return []string{types.NamespacedName{Namespace: o.GetNamespace(), Name: o.(*v1alpha1.ConsumerGroup).Spec.TopologyRef.Name}.String()}
		}},
	} {
		if err := idx.IndexField(ctx, i.obj, i.name, i.keys); err != nil {
			return fmt.Errorf("index %s: %w", i.name, err)
		}
	}
	return nil
}

// brokerSecretKeys are the Secrets that a change of which concerns the operator's connection.
func brokerSecretKeys(b *v1alpha1.Broker) []string {
	var keys []string
	names := operatorSecrets(b)
	if b.Spec.Embedded != nil { // its server has to know these users
		for _, c := range []*v1alpha1.CredentialsSource{b.Spec.Credentials, b.Spec.WorkloadCredentials} {
			if c != nil {
				names = append(names, c.SecretRef.Name)
			}
		}
		names = append(names, render.EmbeddedName(b))
	}
	for _, name := range names {
		keys = append(keys, types.NamespacedName{Namespace: b.Namespace, Name: name}.String())
	}
	return slices.Compact(slices.Sorted(slices.Values(keys)))
}

func claimIndexKeys(t *v1alpha1.Topology) []string {
	var names []string
	for _, c := range claimsOf(t) {
		names = append(names, c.Name)
	}
	return slices.Compact(slices.Sorted(slices.Values(names)))
}

// claimsOf are the queues that a Topology claims: all that it declares, and the main queue of an external one. A spec
// from which no names derive claims nothing.
func claimsOf(t *v1alpha1.Topology) []topology.Queue {
	topo, err := topology.Derive(render.TopologySpec(t))
	if err != nil {
		return nil
	}
	return render.Claims(topo)
}
