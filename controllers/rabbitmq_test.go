package controllers

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker/rabbitmq"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/rabbitserver"
)

// rabbit is a vhost of a real server as Secret and Broker.
func (c *cluster) rabbit(name string) testenv.RabbitMQVhost {
	c.t.Helper()
	v := testenv.RabbitMQ(c.t).Vhost(c.t)
	u, err := url.Parse(v.URL)
	if err != nil {
		c.t.Fatal(err)
	}
	password, _ := u.User.Password()
	user := u.User.Username()
	u.User = nil
	m, err := url.Parse(v.ManagementURL)
	if err != nil {
		c.t.Fatal(err)
	}
	m.User = nil
	c.create(secret(name+"-admin", map[string]string{"username": user, "password": password}), rabbitBroker(name, u.String(), m.String()))
	return v
}

func queuesOf(t testing.TB, v testenv.RabbitMQVhost) map[string]map[string]any {
	t.Helper()
	var list []struct {
		Name      string
		Arguments map[string]any
	}
	v.Server.MustCall(t, "GET", "/api/queues/"+v.Name, nil, &list)
	out := map[string]map[string]any{}
	for _, q := range list {
		out[q.Name] = q.Arguments
	}
	return out
}

func TestRabbitMQ_FromApplyToReady(t *testing.T) {
	c := start(t, rabbitmq.Driver)
	v := c.rabbit("rabbit")
	topo := orders("orders", "rabbit")
	c.create(topo)
	c.ready(topo)

	have := queuesOf(t, v)
	want := []string{"orders", "orders-dlq", "orders-hold-30s", "orders-hold-5s"}
	if diff := cmp.Diff(want, sortedKeys(have)); diff != "" {
		t.Errorf("queues (-want +got):\n%s", diff)
	}
	if got := have["orders-hold-5s"]["x-dead-letter-routing-key"]; got != "orders" {
		t.Errorf("the hold queue leads to %v", got)
	}
}

// The whole life on a real server: adoption, a conflict told in the server's words, bindings, drift, deletion.
func TestRabbitMQ_Life(t *testing.T) {
	c := start(t, rabbitmq.Driver)
	v := c.rabbit("rabbit")
	b := &v1alpha1.Broker{}
	b.Name, b.Namespace = "rabbit", c.ns
	c.ready(b)
	c.conditionIs(b, v1alpha1.ConditionManagementReady, metav1.ConditionTrue, v1alpha1.ReasonManagementReachable)
	c.get(b)
	b.Spec.ResyncInterval = &metav1.Duration{Duration: 10 * time.Second}
	c.update(b)

	put := func(path string, body any) { v.Server.MustCall(t, http.MethodPut, path, body, nil) }
	put("/api/queues/"+v.Name+"/taken", map[string]any{"durable": true, "arguments": map[string]any{"x-queue-type": "classic"}})
	put("/api/exchanges/"+v.Name+"/shop", map[string]any{"type": "topic", "durable": true})

	taken := orders("taken", "rabbit")
	c.create(taken)
	if message := c.stalled(taken, v1alpha1.ReasonImmutableField); !strings.Contains(message, `queue "taken" exists with another x-queue-type: it has classic, the manifest asks for quorum`) {
		t.Errorf("message: %s", message)
	}

	topo := orders("orders", "rabbit")
	topo.Spec.DeletionPolicy = v1alpha1.DeletionDelete
	topo.Spec.RabbitMQ = &v1alpha1.RabbitMQTopology{Bindings: []v1alpha1.RabbitMQBinding{{Exchange: "shop", RoutingKey: "order.*"}, {Exchange: "shop", RoutingKey: "old"}}}
	c.create(topo)
	c.ready(topo)
	bindings := func() []string {
		var list []struct {
			Source     string `json:"source"`
			RoutingKey string `json:"routing_key"`
		}
		v.Server.MustCall(t, http.MethodGet, "/api/queues/"+v.Name+"/orders/bindings", nil, &list)
		var out []string
		for _, b := range list {
			if b.Source != "" {
				out = append(out, b.Source+" "+b.RoutingKey)
			}
		}
		slices.Sort(out)
		return out
	}
	if diff := cmp.Diff([]string{"shop old", "shop order.*"}, bindings()); diff != "" {
		t.Errorf("bindings (-want +got):\n%s", diff)
	}
	c.get(topo)
	topo.Spec.RabbitMQ.Bindings = topo.Spec.RabbitMQ.Bindings[:1]
	c.update(topo)
	c.ready(topo)
	if diff := cmp.Diff([]string{"shop order.*"}, bindings()); diff != "" {
		t.Errorf("bindings after one left the list (-want +got):\n%s", diff)
	}

	v.Server.MustCall(t, http.MethodDelete, "/api/queues/"+v.Name+"/orders-hold-5s", nil, nil)
	testenv.Eventually(t, time.Minute, func() error {
		if queuesOf(t, v)["orders-hold-5s"] == nil {
			return errors.New("the queue did not come back within the resync interval")
		}
		return nil
	})
	if note := c.event(topo, EventDrifted); !strings.Contains(note, `queue "orders-hold-5s" was missing`) {
		t.Errorf("event: %s", note)
	}

	for range 3 {
		v.Server.MustCall(t, http.MethodPost, "/api/exchanges/"+v.Name+"/amq.default/publish",
			map[string]any{"properties": map[string]any{"delivery_mode": 2}, "routing_key": "orders", "payload": "x", "payload_encoding": "string"}, nil)
	}
	if err := c.client.Delete(t.Context(), topo); err != nil {
		t.Fatal(err)
	}
	if note := c.event(topo, EventQueuesDeleted); !strings.Contains(note, "with 3 messages in them") {
		t.Errorf("event: %s", note)
	}
	if diff := cmp.Diff([]string{"taken"}, sortedKeys(queuesOf(t, v))); diff != "" {
		t.Errorf("queues left (-want +got):\n%s", diff)
	}
}

// The password changes on the server and in the Secret: the operator goes on with the new one.
func TestRabbitMQ_Case24_RotatedPassword(t *testing.T) {
	c := start(t, rabbitmq.Driver)
	v := testenv.RabbitMQ(t).Vhost(t)
	user := "u-" + v.Name
	v.AddUser(t, user, "first-"+secretPassword, "monitoring", ".*", ".*", ".*")
	u := plainURL(t, v.URL)
	b := rabbitBroker("rabbit", u, "")
	sec := secret("rabbit-admin", map[string]string{"username": user, "password": "first-" + secretPassword})
	c.create(sec, b)
	c.ready(b)
	hash := b.Status.SecretHash

	v.Server.MustCall(t, http.MethodPut, "/api/users/"+user, map[string]string{"password": "second-" + secretPassword, "tags": "monitoring"}, nil)
	sec.StringData = map[string]string{"password": "second-" + secretPassword}
	c.update(sec)
	testenv.Eventually(t, patience, func() error {
		c.get(b)
		if b.Status.SecretHash == hash {
			return errors.New("the rotation is not noticed")
		}
		return nil
	})
	topo := orders("orders", "rabbit")
	c.create(topo)
	c.ready(topo)
	connections := func() (n int) {
		var list []struct {
			User string `json:"user"`
		}
		v.Server.MustCall(t, http.MethodGet, "/api/vhosts/"+v.Name+"/connections", nil, &list)
		for _, c := range list {
			if c.User == user {
				n++
			}
		}
		return n
	}
	testenv.Eventually(t, 30*time.Second, func() error { // the server's list is some seconds late
		if n := connections(); n != 1 {
			return fmt.Errorf("%d connections", n)
		}
		return nil
	})

	sec.StringData = map[string]string{"password": "wrong-" + secretPassword}
	c.update(sec)
	c.stalled(b, v1alpha1.ReasonAuthenticationFailed)
}

func plainURL(t testing.TB, raw string) string {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal("a URL of the test server does not parse")
	}
	u.User = nil
	return u.String()
}

// A private authority is trusted by name of its Secret, and a client certificate is shown. The server restarts: one
// connection again, and everything is as it was.
func TestRabbitMQ_TLSAndRestart(t *testing.T) {
	server := testenv.StartRabbitMQ(t, rabbitserver.Options{TLS: true, RequireClient: true})
	c := start(t, rabbitmq.Driver)
	u, err := url.Parse(server.URL)
	if err != nil {
		t.Fatal("a URL of the test server does not parse")
	}
	password, _ := u.User.Password()
	b := rabbitBroker("rabbit", plainURL(t, server.TLSURL), plainURL(t, server.ManagementURL))
	ca := secret("ca", map[string]string{"ca.crt": ""})
	b.Spec.TLS = &v1alpha1.BrokerTLS{CASecretRef: &v1alpha1.SecretReference{Name: "ca"}, ClientCertSecretRef: &v1alpha1.SecretReference{Name: "client"}}
	c.create(secret("rabbit-admin", map[string]string{"username": u.User.Username(), "password": password}), ca, b,
		secret("client", map[string]string{"tls.crt": pem(t, server.Certificates.ClientCert), "tls.key": pem(t, server.Certificates.ClientKey)}))
	c.stalled(b, v1alpha1.ReasonSecretKeyMissing)
	ca.StringData = map[string]string{"ca.crt": otherAuthority(t)}
	c.update(ca)
	c.waits(b, v1alpha1.ReasonTLSFailed)
	ca.StringData = map[string]string{"ca.crt": pem(t, server.Certificates.CA)}
	c.update(ca)
	c.ready(b)
	topo := orders("orders", "rabbit")
	c.create(topo)
	c.ready(topo)
	server.Stop(t)
	late := orders("late", "rabbit")
	c.create(late) // finds out
	c.waits(b, v1alpha1.ReasonUnreachable)
	c.waits(late, v1alpha1.ReasonBrokerNotReady)
	server.Restart(t)
	testenv.Eventually(t, 90*time.Second, func() error {
		c.get(b)
		if !meta.IsStatusConditionTrue(b.Status.Conditions, v1alpha1.ConditionReady) {
			return errors.New(describe(b))
		}
		return nil
	})
	c.ready(late)
	c.ready(topo)
}

func pem(t testing.TB, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func otherAuthority(t testing.TB) string {
	t.Helper()
	certs, err := rabbitserver.NewCertificates(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return pem(t, certs.CA)
}
