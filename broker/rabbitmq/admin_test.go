package rabbitmq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/topology"
)

// withoutManagement opens a second admin that has only AMQP.
func (b *bench) withoutManagement() broker.Admin {
	b.t.Helper()
	a, err := Driver.OpenAdmin(b.t.Context(), broker.Config{Endpoint: endpointOf(b.t, b.vhost.URL, ""), Credentials: credentials(userOf(b.t, b.vhost.URL))})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { closeBounded(b.t, a) })
	return a
}

// bothAdmins runs a test with the management API and without it.
func bothAdmins(t *testing.T, f func(t *testing.T, b *bench, a broker.Admin, managed bool)) {
	t.Run("management", func(t *testing.T) { b := newBench(t); f(t, b, b.admin, true) })
	t.Run("amqp", func(t *testing.T) { b := newBench(t); f(t, b, b.withoutManagement(), false) })
}

func observe(t *testing.T, a broker.Admin, d broker.Declaration) broker.Observation {
	t.Helper()
	out, err := a.Observe(t.Context(), []broker.Declaration{d})
	if err != nil {
		t.Fatal(err)
	}
	return out[0]
}

func TestDeclareIsIdempotentAndObserved(t *testing.T) {
	bothAdmins(t, func(t *testing.T, b *bench, a broker.Admin, managed bool) {
		b.exchange("shop", amqp.ExchangeTopic)
		for _, options := range []string{`{"bindings":[{"exchange":"shop","routingKey":"order.*"}]}`, `{"queueType":"classic"}`} {
			s := orders()
			if strings.Contains(options, classicQueue) {
				s.Queue = "plain"
			}
			d := declaration(t, s, options)
			before := observe(t, a, d)
			for _, o := range before.Objects {
				if !o.Missing && (managed || o.Kind == "queue") {
					t.Errorf("%s %s is not missing before it is declared", o.Kind, o.Name)
				}
			}
			for range 2 {
				if err := a.Declare(t.Context(), d); err != nil {
					t.Fatal(err)
				}
			}
			after := observe(t, a, d)
			if !after.UpToDate() || after.DriftKnown != managed || len(after.Warnings) > 0 {
				t.Errorf("after declaring: %+v", after)
			}
			objects, err := Driver.Objects(d)
			if err != nil {
				t.Fatal(err)
			}
			var got []broker.Object
			for _, o := range after.Objects {
				got = append(got, o.Object)
			}
			if diff := cmp.Diff(objects, got); diff != "" {
				t.Errorf("observed objects differ from Objects (-want +got):\n%s", diff)
			}
		}
	})
}

func (b *bench) exchange(name, kind string) {
	b.t.Helper()
	ch, err := b.raw.Channel()
	if err != nil {
		b.t.Fatal(err)
	}
	defer ch.Close()
	if err := ch.ExchangeDeclare(name, kind, true, false, false, false, nil); err != nil {
		b.t.Fatal(err)
	}
}

// foreign declares a queue as somebody else did.
func (b *bench) foreign(name string, args amqp.Table) {
	b.t.Helper()
	ch, err := b.raw.Channel()
	if err != nil {
		b.t.Fatal(err)
	}
	defer ch.Close()
	if _, err := ch.QueueDeclare(name, true, false, false, false, args); err != nil {
		b.t.Fatal(err)
	}
}

func TestConflictNamesTheArgument(t *testing.T) {
	dlx := amqp.Table{argExchange: "", argRoutingKey: "orders-dlq"}
	with := func(base amqp.Table, kv ...any) amqp.Table {
		out := amqp.Table{}
		for k, v := range base {
			out[k] = v
		}
		for i := 0; i < len(kv); i += 2 {
			out[kv[i].(string)] = kv[i+1]
		}
		return out
	}
	hold := amqp.Table{argType: "quorum", argTTL: int64(100), argExchange: "", argRoutingKey: "orders", argStrategy: atLeastOnce, argOverflow: rejectPublish}
	for _, c := range []struct {
		name, queue, options string
		args                 amqp.Table
		want                 broker.Diff
	}{
		{"no_limit", "orders", "", with(dlx, argType, "quorum", argStrategy, atLeastOnce, argOverflow, rejectPublish), broker.Diff{Property: argLimit, Want: "1000000000", Have: "none"}},
		{"quorum_for_classic", "orders", `{"queueType":"classic"}`, with(dlx, argType, "quorum"), broker.Diff{Property: argType, Want: "classic", Have: "quorum"}},
		{"other_ttl", "orders-hold-100ms", "", with(hold, argTTL, int64(200)), broker.Diff{Property: argTTL, Want: "100", Have: "200"}},
		{"weak_hold", "orders-hold-100ms", "", amqp.Table{argType: "quorum", argTTL: int64(100), argExchange: "", argRoutingKey: "orders", argOverflow: rejectPublish}, broker.Diff{Property: argStrategy, Want: atLeastOnce, Have: "none"}},
		{"length_limit", "orders", `{"queueType":"classic"}`, with(dlx, argType, "classic", "x-max-length", int64(10)), broker.Diff{Property: "x-max-length", Want: "none", Have: "10"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			bothAdmins(t, func(t *testing.T, b *bench, a broker.Admin, managed bool) {
				b.foreign(c.queue, c.args)
				d := declaration(t, orders(), c.options)
				o := observe(t, a, d)
				var diffs []broker.Diff
				for _, obj := range o.Objects {
					if obj.Name == c.queue {
						diffs = obj.Diffs
					}
				}
				if diff := cmp.Diff([]broker.Diff{c.want}, diffs); diff != "" {
					t.Errorf("observed (-want +got):\n%s", diff)
				}
				err := a.Declare(t.Context(), d)
				var conflict *broker.ConflictError
				if !errors.As(err, &conflict) || !errors.Is(err, broker.ErrConflict) {
					t.Fatalf("got %v, want a *ConflictError", err)
				}
				if diff := cmp.Diff(c.want, conflict.Diff); diff != "" {
					t.Errorf("conflict (-want +got):\n%s", diff)
				}
				if want := fmt.Sprintf("queue %q", c.queue); conflict.Object != want {
					t.Errorf("object %s, want %s", conflict.Object, want)
				}
				if b.live(c.queue).Name == "" {
					t.Error("the queue is gone")
				}
			})
		})
	}
}

// Where several arguments differ the management API shows all of them, and the server names one.
func TestConflictOfTypes(t *testing.T) {
	bothAdmins(t, func(t *testing.T, b *bench, a broker.Admin, managed bool) {
		b.foreign("orders", amqp.Table{argType: classicQueue})
		d := declaration(t, topology.Spec{Queue: "orders", DeadLetter: true}, "")
		if err := a.Declare(t.Context(), d); !errors.Is(err, broker.ErrConflict) {
			t.Errorf("got %v, want ErrConflict", err)
		}
		diffs := observe(t, a, d).Objects[1].Diffs
		if len(diffs) == 0 || managed && diffs[0] != (broker.Diff{Property: argType, Want: "quorum", Have: "classic"}) {
			t.Errorf("observed %+v", diffs)
		}
	})
}

func TestAdoptsEqualQueues(t *testing.T) {
	bothAdmins(t, func(t *testing.T, b *bench, a broker.Admin, _ bool) {
		for _, c := range []struct{ name, kind string }{{"typed", classicQueue}, {"untyped", ""}} {
			args := amqp.Table{argExchange: "", argRoutingKey: c.name + "-dlq", "x-foo": "bar"}
			if c.kind != "" {
				args[argType] = c.kind
			}
			b.foreign(c.name, args)
			b.publish(c.name, numbered(3)...)
			d := declaration(t, topology.Spec{Queue: c.name, DeadLetter: true}, `{"queueType":"classic"}`)
			if err := a.Declare(t.Context(), d); err != nil {
				t.Fatal(err)
			}
			if o := observe(t, a, d); !o.UpToDate() {
				t.Errorf("%s: %+v", c.name, o)
			}
			if n := b.live(c.name).Messages; n != 3 {
				t.Errorf("%s: %d messages after adoption, want 3", c.name, n)
			}
		}
	})
}

func TestMissingExchangeAndBindingDrift(t *testing.T) {
	b := newBench(t)
	d := declaration(t, topology.Spec{Queue: "orders"}, `{"bindings":[{"exchange":"shop","routingKey":"order.*"}]}`)
	err := b.admin.Declare(t.Context(), d)
	if !errors.Is(err, broker.ErrNotFound) || !strings.Contains(err.Error(), "shop") || !strings.Contains(err.Error(), "create the exchange") {
		t.Fatalf("got %v, want ErrNotFound that says what to create", err)
	}
	b.exchange("shop", amqp.ExchangeTopic)
	if err := b.admin.Declare(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	ch, err := b.raw.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if err := ch.QueueUnbind("orders", "order.*", "shop", nil); err != nil {
		t.Fatal(err)
	}
	if o := observe(t, b.admin, d); o.UpToDate() || !o.Objects[1].Missing {
		t.Errorf("a lost binding is not seen: %+v", o)
	}
	if err := b.admin.Declare(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	if o := observe(t, b.admin, d); !o.UpToDate() {
		t.Errorf("a lost binding is not repaired: %+v", o)
	}
}

func TestJ4_ExternalTopology(t *testing.T) {
	bothAdmins(t, func(t *testing.T, b *bench, a broker.Admin, _ bool) {
		d := declaration(t, topology.Spec{Queue: "theirs", External: true, DeadLetter: true}, "")
		if err := a.Declare(t.Context(), d); !errors.Is(err, broker.ErrNotFound) || !strings.Contains(err.Error(), "theirs") {
			t.Fatalf("got %v, want ErrNotFound", err)
		}
		b.foreign("theirs", amqp.Table{"x-max-length": int64(5)})
		if err := a.Declare(t.Context(), d); err != nil {
			t.Fatal(err)
		}
		if o := observe(t, a, d); !o.UpToDate() || len(o.Objects) != 2 {
			t.Errorf("%+v", o)
		}
		if b.live("theirs-dlq").Name == "" {
			t.Error("no dead-letter queue")
		}
	})
}

func TestDepthsAndDelete(t *testing.T) {
	bothAdmins(t, func(t *testing.T, b *bench, a broker.Admin, managed bool) {
		d := b.declare(orders(), "")
		b.publish("orders", numbered(5)...)
		s := b.subscribe(d, 2)
		receive(t, s, 2)
		want := broker.Depth{Queue: "orders", Ready: broker.Known(3), Consumers: broker.Known(1)}
		if managed {
			want.InFlight, want.Stuck = broker.Known(2), broker.Known(0)
		}
		testenv.Eventually(t, bound, func() error {
			got, err := a.Depths(t.Context(), []string{"orders", "missing"})
			if err != nil {
				return err
			}
			if diff := cmp.Diff([]broker.Depth{want, {Queue: "missing", Missing: true}}, got); diff != "" {
				return errors.New(diff)
			}
			return nil
		})
		closeBounded(t, s)
		b.eventuallyReady("orders", 5)
		got, err := a.Delete(t.Context(), []string{"orders-hold-400ms", "orders", "missing"})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]broker.Deleted{
			{Queue: "orders-hold-400ms", Messages: broker.Known(0)}, {Queue: "orders", Messages: broker.Known(5)}, {Queue: "missing", Messages: broker.Known(0)},
		}, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

// A held message whose target is missing is visible nowhere but in messages_dlx.
func TestStuckMessagesAreCounted(t *testing.T) {
	b := newBench(t)
	b.declare(orders(), "")
	if _, err := b.admin.Delete(t.Context(), []string{"orders"}); err != nil {
		t.Fatal(err)
	}
	b.publish("orders-hold-100ms", numbered(4)...)
	testenv.Eventually(t, bound, func() error {
		got, err := b.admin.Depths(t.Context(), []string{"orders-hold-100ms"})
		if err != nil {
			return err
		}
		if got[0].Stuck != broker.Known(4) || got[0].Ready != broker.Known(0) {
			return fmt.Errorf("%+v", got[0])
		}
		return nil
	})
}

func TestPolicyThatTurnsAtLeastOnceOff(t *testing.T) {
	b := newBench(t)
	d := b.declare(orders(), "")
	b.policy("lossy", "^orders-hold-100ms$", map[string]any{"overflow": "drop-head", "message-ttl": 50})
	o := observe(t, b.admin, d)
	text := strings.Join(o.Warnings, "\n")
	for _, want := range []string{`policy "lossy" sets overflow to drop-head on queue "orders-hold-100ms"`, "message-ttl to 50"} {
		if !strings.Contains(text, want) {
			t.Errorf("warnings %q lack %q", text, want)
		}
	}
	if !o.UpToDate() {
		t.Errorf("a policy is no difference of arguments: %+v", o)
	}
}

func TestObserveManyAndRetired(t *testing.T) {
	b := newBench(t)
	var ds []broker.Declaration
	for i := range 4 {
		s := orders()
		s.Queue = fmt.Sprintf("q%d", i)
		ds = append(ds, declaration(t, s, ""))
	}
	for _, d := range ds[:3] {
		if err := b.admin.Declare(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
	b.foreign("q0-hold-7s", nil)
	ds[0].Retired = []topology.Queue{{Name: "q0-hold-7s", Role: topology.RoleRetired}, {Name: "q0-hold-8s", Role: topology.RoleRetired}}
	got, err := b.admin.Observe(t.Context(), ds)
	if err != nil {
		t.Fatal(err)
	}
	for i, o := range got {
		if o.UpToDate() != (i < 3) {
			t.Errorf("%d: up to date %v", i, o.UpToDate())
		}
	}
	last := got[0].Objects[len(got[0].Objects)-1]
	if last.Name != "q0-hold-7s" || last.Role != topology.RoleRetired {
		t.Errorf("last object %+v, want the retired queue that exists", last)
	}
}

func TestServer(t *testing.T) {
	b := newBench(t)
	one, err := b.admin.Server(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	two, err := b.withoutManagement().Server(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if one.ID != two.ID || !strings.HasSuffix(one.ID, "/"+b.vhost.Name) || one.Version == "" || len(one.Warnings) > 0 || one.DetailsErr != nil {
		t.Errorf("with management %+v, without %+v", one, two)
	}
}

func TestRefusals(t *testing.T) {
	b := newBench(t)
	b.vhost.AddUser(t, "nobody-"+b.vhost.Name, "secret-word", "", "^$", "^$", "^$")
	open := func(endpoint json.RawMessage, c broker.Credentials) (broker.Admin, error) {
		a, err := Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: endpoint, Credentials: credentials(c)})
		if err == nil {
			t.Cleanup(func() { closeBounded(t, a) })
		}
		return a, err
	}
	check := func(name string, err, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("%s: got %v, want %v", name, err, want)
		}
		if err != nil && strings.Contains(err.Error(), "secret-word") {
			t.Errorf("%s: the password is in the error", name)
		}
	}
	admin := userOf(t, b.vhost.URL)
	nobody := broker.Credentials{Username: "nobody-" + b.vhost.Name, Password: "secret-word"}
	_, err := open(b.endpoint, broker.Credentials{Username: "guest", Password: "secret-word"})
	check("wrong password", err, broker.ErrUnauthorized)
	_, err = open(endpointOf(t, strings.Replace(b.vhost.URL, b.vhost.Name, "no-such-vhost", 1), ""), admin)
	check("missing vhost", err, broker.ErrNotFound)
	_, err = open(endpointOf(t, strings.Replace(b.vhost.URL, b.vhost.Name, "", 1), ""), nobody)
	check("refused vhost", err, broker.ErrUnauthorized)
	_, err = open(json.RawMessage(`{"url":"amqp://127.0.0.1:1/"}`), admin)
	check("nobody listens", err, broker.ErrUnavailable)
	a, err := open(b.endpoint, nobody)
	if err != nil {
		t.Fatal(err)
	}
	check("no right to declare", a.Declare(t.Context(), declaration(t, orders(), "")), broker.ErrUnauthorized)
	srv, err := a.Server(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	check("no management tag", srv.DetailsErr, broker.ErrUnauthorized)
	// The next call works: a refusal costs a channel, not the connection.
	check("still no right", a.Declare(t.Context(), declaration(t, orders(), "")), broker.ErrUnauthorized)
}

// A queue that the user may not touch is the trouble of its own Topology only.
func TestOneRefusedQueueAmongOthers(t *testing.T) {
	b := newBench(t)
	name := "narrow-" + b.vhost.Name
	b.vhost.AddUser(t, name, "secret-word", "", "^(mine.*)$", "^(mine.*|amq\\.default)$", "^mine.*$")
	a, err := Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: endpointOf(t, b.vhost.URL, ""), Credentials: credentials(broker.Credentials{Username: name, Password: "secret-word"})})
	if err != nil {
		t.Fatal(err)
	}
	defer closeBounded(t, a)
	mine, theirs := declaration(t, topology.Spec{Queue: "mine", DeadLetter: true}, ""), declaration(t, topology.Spec{Queue: "theirs"}, "")
	b.foreign("theirs", amqp.Table{argType: quorumQueue, argLimit: deliveryLimit})
	if err := a.Declare(t.Context(), mine); err != nil {
		t.Fatal(err)
	}
	got, err := a.Observe(t.Context(), []broker.Declaration{theirs, mine})
	if err != nil {
		t.Fatal(err)
	}
	if got[0].UpToDate() || len(got[0].Warnings) == 0 || !got[1].UpToDate() {
		t.Errorf("observed %+v", got)
	}
	if err := a.Declare(t.Context(), theirs); !errors.Is(err, broker.ErrUnauthorized) {
		t.Errorf("declare: got %v, want ErrUnauthorized", err)
	}
	depths, err := a.Depths(t.Context(), []string{"theirs", "mine"})
	if err != nil || !depths[1].Ready.Known || depths[0].Missing {
		t.Errorf("depths %+v, %v", depths, err)
	}
}

// The connection is made anew by the next call.
func TestAdminSurvivesACut(t *testing.T) {
	v := testenv.RabbitMQ(t).Vhost(t)
	proxy := testenv.Proxy(t, hostOf(t, v.URL))
	a, err := Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: endpointOf(t, proxy.URL(v.URL), ""), Credentials: credentials(userOf(t, v.URL))})
	if err != nil {
		t.Fatal(err)
	}
	defer closeBounded(t, a)
	d := declaration(t, orders(), "")
	if err := a.Declare(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	proxy.Cut()
	testenv.Eventually(t, bound, func() error {
		if err := a.Declare(t.Context(), d); !errors.Is(err, broker.ErrUnavailable) {
			return fmt.Errorf("got %v, want ErrUnavailable", err)
		}
		return nil
	})
	proxy.Restore()
	if err := a.Declare(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	proxy.Freeze()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := a.Declare(ctx, d); !errors.Is(err, broker.ErrUnavailable) {
		t.Errorf("frozen: got %v, want ErrUnavailable", err)
	}
	proxy.Flap()
}

// Constant connections (keda#6266).
func TestAdminKeepsOneConnection(t *testing.T) {
	b := newBench(t)
	a := b.withoutManagement().(*admin)
	d := declaration(t, orders(), "")
	bad := declaration(t, topology.Spec{Queue: "orders", Holds: orders().Holds, DeadLetter: true}, `{"queueType":"classic"}`)
	for range 50 {
		if err := a.Declare(t.Context(), d); err != nil {
			t.Fatal(err)
		}
		if err := a.Declare(t.Context(), bad); !errors.Is(err, broker.ErrConflict) {
			t.Fatal(err)
		}
	}
	c, err := a.link.get(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	port := c.LocalAddr().String()
	testenv.Eventually(t, bound, func() error {
		var all []struct {
			PeerPort int `json:"peer_port"`
			Channels int `json:"channels"`
		}
		if err := b.vhost.Server.Call(http.MethodGet, "/api/vhosts/"+b.vhost.Name+"/connections", nil, &all); err != nil {
			return err
		}
		for _, c := range all {
			if strings.HasSuffix(port, fmt.Sprintf(":%d", c.PeerPort)) {
				if c.Channels > maxIdleChannels {
					t.Fatalf("%d channels", c.Channels)
				}
				return nil
			}
		}
		return fmt.Errorf("the connection is not listed among %d", len(all))
	})
}
