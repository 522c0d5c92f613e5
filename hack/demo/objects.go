package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/hack/demo/ledger"
)

// objects reads the three custom resources of the example.
type objects struct {
	client    client.Client
	namespace string
}

func newObjects(cfg *rest.Config, namespace string) (*objects, error) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("make a client: %w", err)
	}
	return &objects{c, namespace}, nil
}

// objectState is an object's Ready condition.
type objectState struct {
	Name   string // as kubectl takes it
	Ready  bool
	Reason string // "" before the operator has looked
	Text   string
}

// names of the example's objects.
const (
	brokerName, topologyName, groupName = "shop", "orders", "orders-worker"
	workerName, publisherName           = "orders-worker", "orders-publisher"
)

// objectNames are what kubectl is asked to describe.
var objectNames = []string{"broker/" + brokerName, "topology/" + topologyName, "consumergroup/" + groupName}

// states reads all three.
func (o *objects) states(ctx context.Context) ([]objectState, error) {
	b, t, g := &v1alpha1.Broker{}, &v1alpha1.Topology{}, &v1alpha1.ConsumerGroup{}
	var out []objectState
	for i, x := range []struct {
		name string
		obj  client.Object
	}{{brokerName, b}, {topologyName, t}, {groupName, g}} {
		if err := o.client.Get(ctx, client.ObjectKey{Namespace: o.namespace, Name: x.name}, x.obj); err != nil {
			return nil, fmt.Errorf("read %s: %w", objectNames[i], err)
		}
		out = append(out, stateOf(objectNames[i], x.obj))
	}
	return out, nil
}

func stateOf(name string, obj client.Object) objectState {
	s := objectState{Name: name, Text: "not looked at yet"}
	var conditions []metav1.Condition
	var observed int64
	switch o := obj.(type) {
	case *v1alpha1.Broker:
		conditions, observed = o.Status.Conditions, o.Status.ObservedGeneration
	case *v1alpha1.Topology:
		conditions, observed = o.Status.Conditions, o.Status.ObservedGeneration
	case *v1alpha1.ConsumerGroup:
		conditions, observed = o.Status.Conditions, o.Status.ObservedGeneration
	}
	if c := meta.FindStatusCondition(conditions, v1alpha1.ConditionReady); c != nil {
		s.Reason, s.Text = c.Reason, c.Message
		s.Ready = c.Status == metav1.ConditionTrue && observed == obj.GetGeneration()
	}
	return s
}

// queues are the physical names that the operator found, from the Topology's status; ok is false until it has.
func (o *objects) queues(ctx context.Context) (q ledger.Queues, ok bool, err error) {
	t := &v1alpha1.Topology{}
	if err := o.client.Get(ctx, client.ObjectKey{Namespace: o.namespace, Name: topologyName}, t); err != nil {
		return q, false, fmt.Errorf("read the Topology: %w", err)
	}
	var holds []v1alpha1.QueueStatus
	for _, s := range t.Status.Queues {
		switch s.Role {
		case v1alpha1.QueueRoleMain:
			q.Main = s.Name
		case v1alpha1.QueueRoleHold:
			holds = append(holds, s)
		case v1alpha1.QueueRoleDeadLetter:
			q.DeadLetter = s.Name
		}
	}
	slices.SortFunc(holds, func(a, b v1alpha1.QueueStatus) int { return cmp.Compare(a.Delay.Duration, b.Delay.Duration) })
	for _, h := range holds {
		q.Holds = append(q.Holds, h.Name)
	}
	return q, q.Main != "" && len(q.Holds) == len(t.Spec.HoldQueues) && q.DeadLetter != "", nil
}
