package controllers

import (
	"net/url"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/shove-dev/shove/broker/rabbitmq"
	"github.com/shove-dev/shove/internal/testenv"
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
