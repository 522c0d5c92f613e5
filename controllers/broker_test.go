package controllers

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/internal/testenv"
)

func condition(o v1alpha1.ConditionedObject, kind string) metav1.Condition {
	if c := meta.FindStatusCondition(o.GetConditions(), kind); c != nil {
		return *c
	}
	return metav1.Condition{}
}

// state is a condition as "Status/Reason".
func state(o v1alpha1.ConditionedObject, kind string) string {
	c := condition(o, kind)
	if c.Type == "" {
		return ""
	}
	return string(c.Status) + "/" + c.Reason
}

func TestBroker_SaysWhatIsWrong(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	good := map[string]string{"username": "admin", "password": secretPassword}
	for name, tc := range map[string]struct {
		secret  map[string]string // nil: none
		spec    func(*v1alpha1.BrokerSpec)
		open    error
		probe   error
		reason  string
		stalled bool
		says    string
	}{
		"secret missing":       {reason: v1alpha1.ReasonSecretNotFound, stalled: true, says: "create it"},
		"password missing":     {secret: map[string]string{"username": "x"}, reason: v1alpha1.ReasonSecretKeyMissing, stalled: true, says: "username and password"},
		"password empty":       {secret: map[string]string{"username": "x", "password": ""}, reason: v1alpha1.ReasonSecretKeyMissing, stalled: true, says: "empty"},
		"ca key missing":       {secret: good, spec: caFrom("self"), reason: v1alpha1.ReasonSecretKeyMissing, stalled: true, says: "ca.crt"},
		"ca secret missing":    {secret: good, spec: caFrom("nowhere"), reason: v1alpha1.ReasonSecretNotFound, stalled: true, says: "spec.tls.caSecretRef"},
		"refused":              {secret: good, open: fmt.Errorf("login: %w", broker.ErrUnauthorized), reason: v1alpha1.ReasonAuthenticationFailed, stalled: true, says: "correct the Secret"},
		"refused later":        {secret: good, probe: fmt.Errorf("login: %w", broker.ErrUnauthorized), reason: v1alpha1.ReasonAuthenticationFailed, stalled: true, says: "correct the Secret"},
		"vhost missing":        {secret: good, open: fmt.Errorf("vhost \"x\": %w", broker.ErrNotFound), reason: v1alpha1.ReasonVHostNotFound, stalled: true, says: "create it on the server"},
		"too old":              {secret: good, open: fmt.Errorf("RabbitMQ 3.6: %w", broker.ErrUnsupported), reason: v1alpha1.ReasonUnsupportedVersion, stalled: true, says: "3.6"},
		"down":                 {secret: good, open: fmt.Errorf("dial: %w", broker.ErrUnavailable), reason: v1alpha1.ReasonUnreachable, says: "dial"},
		"no such backend":      {secret: good, spec: onKafka, reason: v1alpha1.ReasonBackendNotAvailable, stalled: true, says: "kafka"},
		"secrets in an error":  {secret: good, open: fmt.Errorf("dial amqp://admin:%s@rabbit:5672/: %w", secretPassword, broker.ErrUnavailable), reason: v1alpha1.ReasonUnreachable, says: "amqp://rabbit:5672/"},
		"a port of the moment": {secret: good, open: fmt.Errorf("read tcp 10.0.0.1:51234->10.0.0.2:5672: reset: %w", broker.ErrUnavailable), reason: v1alpha1.ReasonUnreachable, says: "read tcp 10.0.0.2:5672"},
	} {
		t.Run(name, func(t *testing.T) {
			f.breaks("Open", tc.open)
			f.breaks("Server", tc.probe)
			defer func() { f.breaks("Open", nil); f.breaks("Server", nil) }()
			id := "b-" + strings.ReplaceAll(name, " ", "-")
			b := rabbitBroker(id, "amqp://rabbit:5672/", "")
			if tc.spec != nil {
				tc.spec(&b.Spec)
				if b.Spec.TLS != nil && b.Spec.TLS.CASecretRef.Name == "self" {
					b.Spec.TLS.CASecretRef.Name = id + "-admin"
				}
			}
			if tc.secret != nil {
				s.create(secret(id+"-admin", tc.secret))
			}
			s.create(b)
			after := s.broker(b)
			if got := state(b, v1alpha1.ConditionReady); got != "False/"+tc.reason {
				t.Errorf("Ready is %s, want False/%s: %s", got, tc.reason, describe(b))
			}
			if got := meta.IsStatusConditionTrue(b.Status.Conditions, v1alpha1.ConditionStalled); got != tc.stalled {
				t.Errorf("stalled: %v, want %v", got, tc.stalled)
			}
			message := condition(b, v1alpha1.ConditionReady).Message
			if !strings.Contains(message, tc.says) || strings.Contains(message, secretPassword) || strings.Contains(message, "51234") {
				t.Errorf("message %q, want one with %q and no secret or port", message, tc.says)
			}
			if tc.stalled && after != 0 && after < time.Minute {
				t.Errorf("a person has to act, and yet it is tried again in %s", after)
			}
			if !tc.stalled && (after <= 0 || after > 2*lastBackoff) {
				t.Errorf("it may pass by itself, and is tried again in %s", after)
			}
			// A second look at the same state writes nothing.
			writes, notes := s.writes.count(), s.notes.count()
			s.broker(b)
			if n := s.writes.count() - writes; n != 0 {
				t.Errorf("the second look wrote %d times", n)
			}
			if n := s.notes.count() - notes; n != 0 {
				t.Errorf("the second look sent %d events", n)
			}
		})
	}
}

func caFrom(name string) func(*v1alpha1.BrokerSpec) {
	return func(s *v1alpha1.BrokerSpec) {
		s.RabbitMQ.URL = "amqps://rabbit:5671/"
		s.TLS = &v1alpha1.BrokerTLS{CASecretRef: &v1alpha1.SecretReference{Name: name}}
	}
}

func onKafka(s *v1alpha1.BrokerSpec) {
	s.RabbitMQ = nil
	s.Kafka = &v1alpha1.KafkaBroker{BootstrapServers: []v1alpha1.HostPort{"kafka:9092"}}
}

func TestBroker_BacksOffWhileDown(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	f.breaks("Open", broker.ErrUnavailable)
	b := s.connected("rabbit")
	for i, want := range []time.Duration{2 * time.Second, 4 * time.Second, 8 * time.Second, 16 * time.Second, 30 * time.Second, 30 * time.Second} {
		after := s.broker(b)
		if low, high := want-want/5, want+want/5; after < low || after > high {
			t.Errorf("attempt %d: next in %s, want %s to %s", i+2, after, low, high)
		}
	}
	f.breaks("Open", nil)
	if s.broker(b); state(b, v1alpha1.ConditionReady) != "True/Ready" {
		t.Fatalf("not ready after the broker came back%s", describe(b))
	}
	f.breaks("Server", broker.ErrUnavailable)
	if after := s.broker(b); after > 2*time.Second {
		t.Errorf("the count of failures began anew, and yet the next attempt is in %s", after)
	}
}

func TestBroker_ShowsTheServer(t *testing.T) {
	f := newFakeServer("cluster-a")
	f.warnings = []string{"the feature flag stream_queue is off: enable it"}
	s := step(t, f.driver())
	b := s.connected("rabbit")
	if b.Status.ServerID != "cluster-a" || b.Status.ServerVersion != "3.10.8" || b.Status.SecretHash == "" || b.Status.Kind != v1alpha1.BrokerRabbitMQ || b.Status.ObservedGeneration != b.Generation {
		t.Errorf("status: %+v", b.Status)
	}
	for kind, want := range map[string]string{
		v1alpha1.ConditionReady: "True/Ready", v1alpha1.ConditionConnected: "True/Connected",
		v1alpha1.ConditionManagementReady: "True/ManagementReachable", v1alpha1.ConditionServerWarning: "True/ServerWarning",
	} {
		if got := state(b, kind); got != want {
			t.Errorf("%s is %s, want %s", kind, got, want)
		}
	}
	if got := s.notes.take(v1alpha1.ConditionServerWarning); len(got) != 1 {
		t.Errorf("events about the warning: %q", got)
	}
	for _, tc := range []struct {
		err  error
		want string
	}{
		{fmt.Errorf("GET /api: %w", broker.ErrUnavailable), "False/ManagementUnreachable"},
		{fmt.Errorf("GET /api: %w", broker.ErrUnauthorized), "False/ManagementForbidden"},
	} {
		f.change(func() { f.details, f.warnings = tc.err, nil })
		s.broker(b)
		if got := state(b, v1alpha1.ConditionManagementReady); got != tc.want {
			t.Errorf("ManagementReady is %s, want %s", got, tc.want)
		}
		if got := state(b, v1alpha1.ConditionReady); got != "True/Ready" {
			t.Errorf("Ready is %s although AMQP works", got)
		}
	}
	if got := state(b, v1alpha1.ConditionServerWarning); got != "" {
		t.Errorf("the warning is over, and ServerWarning is %s", got)
	}
	s.edit(b, func() { b.Spec.RabbitMQ.Management = nil })
	s.broker(b)
	if got := state(b, v1alpha1.ConditionManagementReady); got != "False/ManagementNotConfigured" {
		t.Errorf("ManagementReady is %s", got)
	}
}

// The credentials Secret is rotated: a new connection at once, the old one drained, no restart, and the objects on
// the Broker notice nothing.
func TestCase24_RotatedSecret(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	b := s.connected("rabbit")
	topo := s.declared(orders("orders", "rabbit"))
	before := b.Status.SecretHash

	if got := s.deps.brokersOfSecret(context.Background(), secretOf(s, "rabbit-admin")); len(got) != 1 || got[0].Name != "rabbit" {
		t.Fatalf("a change of the Secret leads to %v", got)
	}
	sec := secretOf(s, "rabbit-admin")
	sec.StringData = map[string]string{"password": "another"}
	if err := s.client.Update(context.Background(), sec); err != nil {
		t.Fatal(err)
	}
	s.broker(b)

	if n := len(f.opened); n != 2 || f.opened[1].Password != "another" {
		t.Fatalf("%d connections were made, the last one with the new password: %v", n, n == 2 && f.opened[1].Password == "another")
	}
	testenv.Eventually(t, patience, func() error {
		if open, _ := f.connections(); open != 1 {
			return fmt.Errorf("%d connections are open", open)
		}
		return nil
	})
	if b.Status.SecretHash == before {
		t.Error("the hash of the Secrets did not change")
	}
	if got := s.notes.take(EventCredentialsRotated); len(got) != 1 {
		t.Errorf("events about the rotation: %q", got)
	}
	writes := s.writes.count()
	s.topology(topo)
	if s.writes.count() != writes || state(topo, v1alpha1.ConditionReady) != "True/Ready" {
		t.Error("the rotation disturbed a Topology")
	}
}

func secretOf(s *stepper, name string) *corev1Secret {
	o := secret(name, nil)
	o.Namespace = s.ns
	s.get(o)
	return o
}

// Connections per Broker stay constant over 1,000 passes.
func TestCase30_OneConnection(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	b := s.connected("rabbit")
	topo := s.declared(orders("orders", "rabbit"))
	s.broker(b) // counts its dependents
	writes := s.writes.count()
	for range 500 {
		for _, pass := range []func() error{
			func() error { _, err := s.brokers.Reconcile(context.Background(), requestFor(b)); return err },
			func() error { _, err := s.topologies.Reconcile(context.Background(), requestFor(topo)); return err },
		} {
			if err := pass(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if open, most := f.connections(); open != 1 || most != 1 {
		t.Errorf("%d connections are open, %d were at once", open, most)
	}
	if n := f.count("Open"); n != 1 {
		t.Errorf("%d connections were made", n)
	}
	if got := testutil.ToFloat64(s.deps.metrics.connections.WithLabelValues(s.ns, "rabbit")); got != 1 {
		t.Errorf("the metric says %v", got)
	}
	if n := s.writes.count() - writes; n != 0 {
		t.Errorf("passes that changed nothing wrote %d times to the API server", n)
	}
	if n := f.count("Declare"); n != 1 {
		t.Errorf("passes that changed nothing declared %d times", n-1)
	}
}

func TestBroker_DeletionNamesDependentsAndEnds(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	b := s.connected("rabbit")
	topo := s.declared(orders("orders", "rabbit"))
	s.broker(b)
	if b.Status.Dependents == nil || *b.Status.Dependents != 1 {
		t.Fatalf("dependents: %v", b.Status.Dependents)
	}
	s.delete(b)
	after := s.broker(b)
	if got := state(b, v1alpha1.ConditionInUse); got != "True/HasDependents" || !strings.Contains(condition(b, v1alpha1.ConditionInUse).Message, s.ns+"/orders") {
		t.Fatalf("InUse: %s%s", got, describe(b))
	}
	if after <= 0 || after > deletionBound {
		t.Errorf("looked at again in %s", after)
	}
	writes := s.writes.count()
	if s.broker(b); s.writes.count() != writes {
		t.Error("the second look wrote")
	}
	if s.topology(topo); state(topo, v1alpha1.ConditionBrokerReady) != "False/BrokerNotReady" {
		t.Errorf("the Topology says %s", describe(topo))
	}
	s.clock.Step(deletionBound + time.Second)
	s.broker(b)
	if !s.gone(b) {
		t.Fatal("the Broker is not gone after two minutes")
	}
	if got := s.notes.take(EventDependentsLeft); len(got) != 1 || !strings.Contains(got[0], s.ns+"/orders") {
		t.Errorf("events: %q", got)
	}
	testenv.Eventually(t, patience, func() error {
		if open, _ := f.connections(); open != 0 {
			return fmt.Errorf("%d connections are open", open)
		}
		return nil
	})
	if s.topology(topo); state(topo, v1alpha1.ConditionReady) != "False/BrokerNotFound" {
		t.Errorf("the Topology says %s", describe(topo))
	}
}

func TestBroker_WithoutDependentsHasNoFinalizer(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	b := s.connected("rabbit")
	if len(b.Finalizers) != 0 {
		t.Fatalf("finalizers: %v", b.Finalizers)
	}
	topo := s.declared(orders("orders", "rabbit"))
	if s.broker(b); !cmp.Equal(b.Finalizers, []string{v1alpha1.FinalizerBroker}) {
		t.Fatalf("finalizers with a Topology: %v", b.Finalizers)
	}
	s.delete(topo)
	s.sync(topo)
	if s.broker(b); len(b.Finalizers) != 0 {
		t.Fatalf("finalizers after it: %v", b.Finalizers)
	}
	s.delete(b)
	s.sync(b)
	s.broker(b)
	testenv.Eventually(t, patience, func() error {
		if open, _ := f.connections(); open != 0 {
			return errors.New("the connection is still there")
		}
		return nil
	})
}

// Memory does not grow with other people's Secrets: only metadata is watched, and only Secrets that a Broker names
// are read, by name.
func TestCase27_OtherSecretsCostNothing(t *testing.T) {
	f := newFakeServer("cluster-a")
	c := connect(t)
	const n, size = 150, 200 << 10
	var work errgroup.Group
	work.SetLimit(8)
	for i := range n {
		work.Go(func() error {
			o := secret(fmt.Sprintf("other-%d", i), map[string]string{"data": strings.Repeat("x", size)})
			o.Namespace = c.ns
			return c.client.Create(context.Background(), o)
		})
	}
	if err := work.Wait(); err != nil {
		t.Fatal(err)
	}
	before := heap()
	c.run(Options{Drivers: []broker.Driver{f.driver()}, Namespaces: []string{c.ns}})
	b := rabbitBroker("rabbit", "amqp://rabbit:5672/", "")
	c.create(b)
	c.stalled(b, v1alpha1.ReasonSecretNotFound)
	c.create(secret("rabbit-admin", map[string]string{"username": "admin", "password": secretPassword}))
	c.ready(b)                                                    // the watch told of the Secret that was missing
	if grown := int64(heap()) - int64(before); grown > n*size/4 { //nolint:gosec // far from the bound
		t.Errorf("the heap grew by %d MB with %d MB of other people's Secrets", grown>>20, n*size>>20)
	}
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
