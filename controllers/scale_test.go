package controllers

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/internal/testenv"
)

// crowd creates n Topologies on one Broker.
func (c *cluster) crowd(n int, brokerName string) {
	c.t.Helper()
	var work errgroup.Group
	work.SetLimit(16)
	for i := range n {
		work.Go(func() error {
			t := orders(fmt.Sprintf("t-%04d", i), brokerName)
			t.Namespace = c.ns
			return c.client.Create(context.Background(), t)
		})
	}
	if err := work.Wait(); err != nil {
		c.t.Fatal(err)
	}
}

// all waits until every Topology of the namespace has Ready with this status.
func (c *cluster) all(n int, timeout time.Duration, ready bool) {
	c.t.Helper()
	testenv.Eventually(c.t, timeout, func() error {
		var list v1alpha1.TopologyList
		if err := c.client.List(context.Background(), &list, client.InNamespace(c.ns)); err != nil {
			return err
		}
		is := 0
		for i := range list.Items {
			t := &list.Items[i]
			if t.Status.ObservedGeneration == t.Generation && meta.IsStatusConditionTrue(t.Status.Conditions, v1alpha1.ConditionReady) == ready {
				is++
			}
		}
		if is != n {
			return fmt.Errorf("%d of %d have Ready=%v", is, n, ready)
		}
		return nil
	})
}

// versions are the resource versions of everything of ours in the namespace.
func (c *cluster) versions() map[string]string {
	c.t.Helper()
	out := map[string]string{}
	var topologies v1alpha1.TopologyList
	var brokers v1alpha1.BrokerList
	if err := errors.Join(c.client.List(context.Background(), &topologies, client.InNamespace(c.ns)), c.client.List(context.Background(), &brokers, client.InNamespace(c.ns))); err != nil {
		c.t.Fatal(err)
	}
	for i := range topologies.Items {
		out["topology "+topologies.Items[i].Name] = topologies.Items[i].ResourceVersion
	}
	for i := range brokers.Items {
		out["broker "+brokers.Items[i].Name] = brokers.Items[i].ResourceVersion
	}
	return out
}

// The broker goes down with hundreds of objects on it: no retry storm, deletions are not starved, and all recover
// when it returns.
func TestCase21_BrokerDownWithManyObjects(t *testing.T) {
	f := newFakeServer("cluster-a")
	f.latency = 100 * time.Millisecond // as a busy broker; however slowly objects are created, they share looks
	c := start(t, f.driver())
	b := rabbitBroker("rabbit", "amqp://rabbit:5672/", "http://rabbit:15672")
	c.create(secret("rabbit-admin", map[string]string{"username": "admin", "password": secretPassword}), b)
	c.ready(b)
	const n = 200
	c.crowd(n, "rabbit")
	c.all(n, time.Minute, true)
	if got := f.count("Observe"); got > n/2 {
		t.Errorf("%d Topologies were looked at in %d calls", n, got)
	}

	f.breaks("*", fmt.Errorf("dial: %w", broker.ErrUnavailable))
	probe := orders("probe", "rabbit") // somebody finds out
	c.create(probe)
	c.conditionIs(b, v1alpha1.ConditionReady, "False", v1alpha1.ReasonUnreachable)
	c.all(n+1, time.Minute, false)
	calls := f.total() - f.count("Open")
	versions := c.versions()
	testenv.Consistently(t, 2*time.Second, func() error {
		if got := f.total() - f.count("Open") - calls; got != 0 {
			return fmt.Errorf("%d calls but attempts to connect, while the broker is down", got)
		}
		return nil
	})
	for name, v := range c.versions() {
		if versions[name] != v {
			t.Errorf("%s is written while nothing changes", name)
		}
	}
	doomed := &v1alpha1.Topology{}
	doomed.Namespace, doomed.Name = c.ns, "t-0000"
	if err := c.client.Delete(context.Background(), doomed); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 2*time.Second, func() error {
		if err := c.client.Get(context.Background(), client.ObjectKeyFromObject(doomed), doomed); err == nil {
			return errors.New("the deletion waits for the broker")
		}
		return nil
	})

	f.breaks("*", nil)
	c.all(n, time.Minute, true)
	if open, most := f.connections(); open != 1 || most > 2 {
		t.Errorf("%d connections are open, %d were at once", open, most)
	}
}

// BenchmarkThousandTopologies is what 1,000 Topologies cost the operator itself, on a broker that answers every call
// within a millisecond. The whole way, with a real broker, is the benchmark of cmd/operator.
func BenchmarkThousandTopologies(b *testing.B) {
	for range b.N {
		f := newFakeServer("cluster-a")
		f.latency = time.Millisecond
		c := start(b, f.driver())
		c.create(secret("rabbit-admin", map[string]string{"username": "admin", "password": secretPassword}))
		broker := rabbitBroker("rabbit", "amqp://rabbit:5672/", "http://rabbit:15672")
		broker.Spec.ResyncInterval = &metav1.Duration{Duration: 10 * time.Second}
		c.create(broker)
		c.ready(broker)
		const n = 1000
		begun := time.Now()
		c.crowd(n, "rabbit")
		c.all(n, 5*time.Minute, true)
		b.ReportMetric(time.Since(begun).Seconds(), "s-to-ready")
		b.ReportMetric(float64(f.count("Observe")), "observes")
		looks := f.count("Observe")
		versions := c.versions()
		delete(versions, "broker rabbit") // its number of dependents follows
		testenv.Eventually(b, time.Minute, func() error {
			if got := f.count("Observe"); got < looks+3 {
				return fmt.Errorf("%d resyncs", got-looks)
			}
			return nil
		})
		changed := 0
		now := c.versions()
		for name, v := range versions {
			if now[name] != v {
				changed++
			}
		}
		b.ReportMetric(float64(changed), "writes/3-resyncs")
		b.ReportMetric(float64(heap()>>20), "MB-heap")
		_, most := f.connections()
		b.ReportMetric(float64(most), "connections")
		b.ReportMetric(0, "ns/op")
		c.stop()
	}
}
