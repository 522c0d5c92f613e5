package controllers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/nats"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/natsserver"
	"github.com/shove-dev/shove/topology"
)

func natsBroker(name, url string) *v1alpha1.Broker {
	b := &v1alpha1.Broker{ObjectMeta: metav1.ObjectMeta{Name: name}}
	b.Spec.NATS = &v1alpha1.NATSBroker{Servers: []v1alpha1.NATSServer{v1alpha1.NATSServer(url)}}
	b.Spec.Credentials = &v1alpha1.CredentialsSource{SecretRef: v1alpha1.SecretReference{Name: name + "-admin"}}
	b.Spec.ResyncInterval = &metav1.Duration{Duration: time.Second}
	return b
}

func withUser(user, password string) func(*server.Options) {
	return func(o *server.Options) { o.Users = append(o.Users, &server.User{Username: user, Password: password}) }
}

// nats is a server with one user as Secret and Broker, and a connection to it.
func (c *cluster) nats(name string) (*natsserver.Server, jetstream.JetStream) {
	c.t.Helper()
	s := natsserver.Start(c.t, withUser("admin", secretPassword))
	c.create(secret(name+"-admin", map[string]string{"username": "admin", "password": secretPassword}), natsBroker(name, s.URL()))
	nc, err := natsgo.Connect(s.URL(), natsgo.UserInfo("admin", secretPassword), natsgo.MaxReconnects(-1), natsgo.ReconnectWait(20*time.Millisecond))
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		c.t.Fatal(err)
	}
	return s, js
}

func streamsOf(t testing.TB, js jetstream.JetStream) []string {
	t.Helper()
	var out []string
	names := js.StreamNames(t.Context())
	for name := range names.Name() {
		out = append(out, name)
	}
	if err := names.Err(); err != nil {
		t.Fatal(err)
	}
	slices.Sort(out)
	return out
}

// The whole life on a real server: streams from the spec, a dot in a name, what others changed or deleted by hand, a
// conflict told in the server's words, deletion.
func TestNATS_Life(t *testing.T) {
	c := start(t, nats.Driver)
	_, js := c.nats("nats")
	b := &v1alpha1.Broker{ObjectMeta: metav1.ObjectMeta{Name: "nats", Namespace: c.ns}}
	c.ready(b)
	if b.Status.ServerID != "test/$G" || b.Status.ServerVersion == "" || b.Status.Kind != v1alpha1.BrokerNATS {
		t.Errorf("status %+v", b.Status)
	}

	topo := orders("orders", "nats")
	topo.Spec.Queue = "shop.orders"
	topo.Spec.DeletionPolicy = v1alpha1.DeletionDelete
	topo.Spec.NATS = &v1alpha1.NATSTopology{Replicas: 1, Storage: v1alpha1.NATSMemory, AckWait: &metav1.Duration{Duration: 10 * time.Second}}
	c.create(topo)
	c.ready(topo)
	c.conditionIs(topo, v1alpha1.ConditionDrift, metav1.ConditionFalse, v1alpha1.ReasonInSync)
	if diff := cmp.Diff([]string{"shop~orders", "shop~orders-dlq"}, streamsOf(t, js)); diff != "" {
		t.Errorf("streams (-want +got):\n%s", diff)
	}
	var queues []string
	for _, q := range topo.Status.Queues {
		queues = append(queues, q.Name)
	}
	if diff := cmp.Diff([]string{"shop~orders-dlq", "shop~orders", "shop~orders-hold-5s", "shop~orders-hold-30s"}, queues); diff != "" {
		t.Errorf("queues in the status (-want +got):\n%s", diff)
	}
	k, err := js.Consumer(t.Context(), "shop~orders", "shop~orders")
	if err != nil || k.CachedInfo().Config.AckWait != 10*time.Second {
		t.Errorf("consumer %+v, %v", k, err)
	}

	c.edited(topo, func() { topo.Spec.NATS.AckWait.Duration = 20 * time.Second })
	c.ready(topo)
	if k, err = js.Consumer(t.Context(), "shop~orders", "shop~orders"); err != nil || k.CachedInfo().Config.AckWait != 20*time.Second {
		t.Errorf("consumer after the spec changed %+v, %v", k, err)
	}
	c.edited(topo, func() { topo.Spec.NATS.Replicas = 3 })
	c.refusedBy(topo, "replicas")
	c.edited(topo, func() { topo.Spec.NATS.Replicas = 1 })
	c.ready(topo)

	// Case 22: somebody changes and deletes by hand.
	cfg := k.CachedInfo().Config
	cfg.MaxDeliver = 5
	if _, err := js.UpdateConsumer(t.Context(), "shop~orders", cfg); err != nil {
		t.Fatal(err)
	}
	c.repaired(topo, `consumer "shop~orders > shop~orders" had max_deliver 5, not -1`)
	if err := js.DeleteStream(t.Context(), "shop~orders-dlq"); err != nil {
		t.Fatal(err)
	}
	c.repaired(topo, `stream "shop~orders-dlq" was missing`)

	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "taken", Subjects: []string{"taken"}}); err != nil {
		t.Fatal(err)
	}
	taken := orders("taken", "nats")
	c.create(taken)
	if message := c.stalled(taken, v1alpha1.ReasonImmutableField); !strings.Contains(message, `stream "taken" exists with another retention: it has limits, the manifest asks for workqueue`) {
		t.Errorf("message: %s", message)
	}

	for range 3 {
		if _, err := js.Publish(t.Context(), "shop~orders", []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.client.Delete(t.Context(), topo); err != nil {
		t.Fatal(err)
	}
	if note := c.event(topo, EventQueuesDeleted); !strings.Contains(note, "with 3 messages in them") {
		t.Errorf("event: %s", note)
	}
	if got := streamsOf(t, js); slices.Contains(got, "shop~orders") || slices.Contains(got, "shop~orders-dlq") || !slices.Contains(got, "taken") {
		t.Errorf("streams left: %v", got)
	}
}

// edited changes the spec of a Topology.
func (c *cluster) edited(topo *v1alpha1.Topology, change func()) {
	c.t.Helper()
	c.get(topo)
	change()
	c.update(topo)
}

// refusedBy waits until a Topology is stalled because the server said no.
func (c *cluster) refusedBy(topo *v1alpha1.Topology, says string) {
	c.t.Helper()
	if message := c.stalled(topo, v1alpha1.ReasonUnsupported); !strings.Contains(message, says) {
		c.t.Errorf("message: %s", message)
	}
}

// repaired waits for the event about a repair.
func (c *cluster) repaired(topo *v1alpha1.Topology, what string) {
	c.t.Helper()
	testenv.Eventually(c.t, time.Minute, func() error {
		for _, e := range c.eventsOf(topo)[EventDrifted] {
			if strings.Contains(e.Note, what) {
				return nil
			}
		}
		return fmt.Errorf("no event says %s: %v%s", what, c.eventsOf(topo)[EventDrifted], describe(topo))
	})
	c.ready(topo)
}

// The numbers in the status, and warnings about what endangers messages.
func TestNATS_CountsAndWarnings(t *testing.T) {
	c := start(t, nats.Driver)
	s, js := c.nats("nats")
	topo := orders("orders", "nats")
	topo.Namespace = c.ns
	decl, err := render.Declaration(topo, topology.NATS)
	if err != nil {
		t.Fatal(err)
	}
	endpoint, err := render.Endpoint(natsBroker("nats", s.URL()))
	if err != nil {
		t.Fatal(err)
	}
	// A queue that is in use when its Topology comes.
	admin, err := nats.Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: endpoint, Name: "test", Credentials: func(context.Context) (broker.Credentials, error) {
		return broker.Credentials{Username: "admin", Password: secretPassword}, nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(admin.Declare(t.Context(), decl), admin.Close(t.Context())); err != nil {
		t.Fatal(err)
	}
	put := func(subject string, h natsgo.Header) {
		if _, err := js.PublishMsg(t.Context(), &natsgo.Msg{Subject: subject, Header: h, Data: []byte("x")}); err != nil {
			t.Fatal(err)
		}
	}
	for range 5 {
		put("orders", nil)
	}
	put("orders-dlq", nil)
	for i := range 3 {
		put(fmt.Sprintf("orders-hold-30s.at.%d", i), natsgo.Header{"Nats-Schedule": {"@at " + time.Now().Add(time.Hour).UTC().Format(time.RFC3339Nano)}, "Nats-Schedule-Target": {"orders"}})
	}
	k, err := js.Consumer(t.Context(), "orders", "orders")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.FetchNoWait(2); err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(t.Context(), "orders")
	if err != nil {
		t.Fatal(err)
	}
	cfg := stream.CachedInfo().Config
	cfg.MaxAge = 24 * time.Hour
	if _, err := js.UpdateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}

	c.create(topo)
	c.ready(topo)
	if got := topo.Status.Counts; got == nil || deref(got.Ready) != 3 || deref(got.InFlight) != 2 || deref(got.Held) != 3 || deref(got.Dead) != 1 {
		t.Errorf("counts %+v, want 3 ready, 2 in flight, 3 held, 1 dead", got)
	}
	if at := c.conditionIs(topo, v1alpha1.ConditionMessagesAtRisk, metav1.ConditionTrue, ""); !strings.Contains(at.Message, "max_age") {
		t.Errorf("message: %s", at.Message)
	}
}

func deref(n *int64) int64 {
	if n == nil {
		return -1
	}
	return *n
}

// Case 24: another user in the Secret, and a wrong password. The server goes away, and comes back with what it stored.
func TestNATS_Case24_RotationAndRestart(t *testing.T) {
	c := start(t, nats.Driver)
	s := natsserver.Start(t, withUser("first", "1-"+secretPassword), withUser("second", "2-"+secretPassword))
	b := natsBroker("nats", s.URL())
	sec := secret("nats-admin", map[string]string{"username": "first", "password": "1-" + secretPassword})
	c.create(sec, b)
	topo := orders("orders", "nats")
	c.create(topo)
	c.ready(b)
	c.ready(topo)

	sec.StringData = map[string]string{"username": "second", "password": "2-" + secretPassword}
	c.update(sec)
	testenv.Eventually(t, patience, func() error {
		conns, err := s.Running().Connz(&server.ConnzOptions{Username: true})
		if err != nil {
			return err
		}
		var users []string
		for _, k := range conns.Conns {
			users = append(users, k.AuthorizedUser)
		}
		if !slices.Equal(users, []string{"second"}) {
			return fmt.Errorf("connected are %v", users)
		}
		return nil
	})
	c.ready(b)

	s.Stop()
	late := orders("late", "nats")
	c.create(late) // finds out
	c.waits(b, v1alpha1.ReasonUnreachable)
	c.waits(late, v1alpha1.ReasonBrokerNotReady)
	s.Run(t)
	testenv.Eventually(t, 90*time.Second, func() error {
		c.get(b)
		if state(b, v1alpha1.ConditionReady) != "True/Ready" {
			return errors.New(describe(b))
		}
		return nil
	})
	c.ready(late)
	c.ready(topo)

	sec.StringData = map[string]string{"password": "wrong-" + secretPassword}
	c.update(sec)
	c.stalled(b, v1alpha1.ReasonAuthenticationFailed)
}

// Streams of somebody else: awaited, verified, read, and left alone when the Topology goes.
func TestNATS_J4_SourceAndExternal(t *testing.T) {
	c := start(t, nats.Driver)
	_, js := c.nats("nats")
	fan := orders("billing", "nats")
	fan.Spec.Source = &v1alpha1.Source{Name: "orders-log"}
	fan.Spec.DeletionPolicy = v1alpha1.DeletionDelete
	ext := orders("legacy", "nats")
	ext.Spec.External, ext.Spec.HoldQueues = true, nil
	ext.Spec.DeletionPolicy = v1alpha1.DeletionDelete
	c.create(fan, ext)
	c.waits(fan, v1alpha1.ReasonSourceNotFound)
	c.waits(ext, v1alpha1.ReasonExternalNotFound)
	for _, name := range []string{"orders-log", "legacy"} {
		if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: name, Subjects: []string{name}}); err != nil {
			t.Fatal(err)
		}
		if _, err := js.Publish(t.Context(), name, []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	for _, topo := range []*v1alpha1.Topology{fan, ext} {
		testenv.Eventually(t, 90*time.Second, func() error {
			c.get(topo)
			if state(topo, v1alpha1.ConditionReady) != "True/Ready" {
				return errors.New(describe(topo))
			}
			return nil
		})
	}
	c.conditionIs(ext, v1alpha1.ConditionDeclared, metav1.ConditionTrue, v1alpha1.ReasonVerified)
	if diff := cmp.Diff([]string{"billing", "billing-dlq", "legacy", "legacy-dlq", "orders-log"}, streamsOf(t, js)); diff != "" {
		t.Errorf("streams (-want +got):\n%s", diff)
	}
	for _, topo := range []*v1alpha1.Topology{fan, ext} {
		if err := c.client.Delete(t.Context(), topo); err != nil {
			t.Fatal(err)
		}
		c.event(topo, EventQueuesDeleted)
	}
	if diff := cmp.Diff([]string{"legacy", "orders-log"}, streamsOf(t, js)); diff != "" {
		t.Errorf("streams left (-want +got):\n%s", diff)
	}
	if _, err := js.Consumer(t.Context(), "orders-log", "billing"); !errors.Is(err, jetstream.ErrConsumerNotFound) {
		t.Errorf("the durable on the source is left: %v", err)
	}
}
