package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Kinds of this API group.
const (
	KindBroker        = "Broker"
	KindTopology      = "Topology"
	KindConsumerGroup = "ConsumerGroup"
)

var (
	// GroupVersion is the group and version of every kind in this package.
	GroupVersion = schema.GroupVersion{Group: "shove.dev", Version: "v1alpha1"}

	// SchemeBuilder collects the functions that add this package's types to a scheme.
	SchemeBuilder = runtime.NewSchemeBuilder(addKnownTypes)

	// AddToScheme adds the types of this package to a scheme.
	AddToScheme = SchemeBuilder.AddToScheme
)

// Resource returns the group resource of an unqualified resource name, for API errors.
func Resource(resource string) schema.GroupResource {
	return GroupVersion.WithResource(resource).GroupResource()
}

func addKnownTypes(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion,
		&Broker{}, &BrokerList{},
		&Topology{}, &TopologyList{},
		&ConsumerGroup{}, &ConsumerGroupList{},
	)
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
}
