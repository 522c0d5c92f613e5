package kafka

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/kafkaserver"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// vault is the broker with all its listeners, and a superuser's connection to it.
type vault struct {
	t      *testing.T
	server *kafkaserver.Server
	admin  *kadm.Client
	client *kgo.Client
}

func newVault(t *testing.T) *vault {
	t.Helper()
	srv := testenv.SecureKafka(t)
	c, err := kgo.NewClient(kgo.SeedBrokers(srv.Addr(kafkaserver.Plain)), kgo.DisableClientMetrics())
	must(t, err)
	t.Cleanup(c.Close)
	return &vault{t, srv, kadm.NewClient(c), c}
}

func secured(server, mechanism string) json.RawMessage {
	if mechanism == "" {
		return json.RawMessage(`{"bootstrapServers": ["` + server + `"]}`)
	}
	return json.RawMessage(`{"bootstrapServers": ["` + server + `"], "sasl": {"mechanism": "` + mechanism + `"}}`)
}

func login(user, password string) func(context.Context) (broker.Credentials, error) {
	return func(context.Context) (broker.Credentials, error) {
		return broker.Credentials{Username: user, Password: password}, nil
	}
}

// scram makes a user, or gives it another password.
func (v *vault) scram(user, password string, mechanisms ...kadm.ScramMechanism) {
	v.t.Helper()
	ctx, cancel := short()
	defer cancel()
	for _, m := range mechanisms { // Kafka refuses two of one user in one request
		resp, err := v.admin.AlterUserSCRAMs(ctx, nil, []kadm.UpsertSCRAM{{User: user, Mechanism: m, Iterations: 4096, Password: password}})
		must(v.t, err)
		must(v.t, resp.Error())
	}
}

// opens says what comes of connecting. A user that was just made is not known at once.
func (v *vault) opens(cfg broker.Config) error {
	a, err := Driver.OpenAdmin(v.t.Context(), cfg)
	if err == nil {
		_, err = a.Server(v.t.Context())
		must(v.t, a.Close(v.t.Context()))
	}
	return err
}

func TestSASL(t *testing.T) {
	t.Parallel()
	v := newVault(t)
	v.scram("carol", "first-secret", kadm.ScramSha256, kadm.ScramSha512)
	at := v.server.Addr(kafkaserver.SASL)
	for _, tc := range []struct{ mechanism, user, password string }{
		{saslPlain, kafkaserver.User, kafkaserver.Password},
		{saslScram256, "carol", "first-secret"},
		{saslScram512, "carol", "first-secret"},
	} {
		t.Run(tc.mechanism, func(t *testing.T) {
			good := broker.Config{Endpoint: secured(at, tc.mechanism), Credentials: login(tc.user, tc.password)}
			testenv.Eventually(t, bound, func() error { return v.opens(good) })
			for user, password := range map[string]string{tc.user: "wrong-secret", "nobody": tc.password} {
				err := v.opens(broker.Config{Endpoint: secured(at, tc.mechanism), Credentials: login(user, password)})
				if !errors.Is(err, broker.ErrUnauthorized) || strings.Contains(err.Error(), "secret") {
					t.Errorf("%s with %s: %v", user, password, err)
				}
			}
		})
	}
	t.Run("mechanism_that_the_broker_lacks", func(t *testing.T) {
		err := v.opens(broker.Config{Endpoint: secured(at, saslOAuth), Credentials: func(context.Context) (broker.Credentials, error) {
			return broker.Credentials{Token: "a-secret"}, nil
		}})
		if !errors.Is(err, broker.ErrUnsupported) || strings.Contains(err.Error(), "a-secret") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("none_where_one_is_needed", func(t *testing.T) {
		if err := v.opens(broker.Config{Endpoint: secured(at, "")}); !errors.Is(err, broker.ErrUnavailable) || !strings.Contains(err.Error(), "SASL") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("credentials_that_nothing_uses", func(t *testing.T) {
		err := v.opens(broker.Config{Endpoint: secured(v.server.Addr(kafkaserver.Plain), ""), Credentials: login("carol", "first-secret")})
		if !errors.Is(err, broker.ErrUnsupported) || !strings.Contains(err.Error(), "kafka.sasl.mechanism") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("nobody_listens", func(t *testing.T) {
		if err := v.opens(broker.Config{Endpoint: secured("127.0.0.1:1", "")}); !errors.Is(err, broker.ErrUnavailable) {
			t.Errorf("got %v", err)
		}
	})
}

// TestRotation: a password that changes is used by the next connection, and the connections that stand go on.
func TestRotation(t *testing.T) {
	t.Parallel()
	v := newVault(t)
	v.scram("rita", "old-secret", kadm.ScramSha512)
	v.allow("rita")
	var now atomic.Pointer[string]
	set := func(p string) { now.Store(&p) }
	set("old-secret")
	cfg := broker.Config{Endpoint: secured(v.server.Addr(kafkaserver.SASL), saslScram512), Credentials: func(context.Context) (broker.Credentials, error) {
		return broker.Credentials{Username: "rita", Password: *now.Load()}, nil
	}}
	testenv.Eventually(t, bound, func() error { return v.opens(cfg) })
	a := openTestAdmin(t, cfg)
	topo, err := topology.Derive(topology.Spec{Queue: testenv.KafkaServer{}.Name("rotated")})
	must(t, err)
	decl := broker.Declaration{Topology: topo, Options: json.RawMessage(`{"partitions": 1}`)}
	must(t, a.Declare(t.Context(), decl))
	net := newNetwork(v.client)
	c, err := net.mode().driver().OpenClient(t.Context(), cfg)
	must(t, err)
	t.Cleanup(func() { must(t, c.Close(context.Background())) })
	p, err := c.Publisher(t.Context(), decl)
	must(t, err)
	publish := func(id string) error {
		return p.Publish(t.Context(), []broker.Message{{ID: id, Body: []byte(id)}})
	}
	must(t, publish("before"))

	v.scram("rita", "new-secret", kadm.ScramSha512)
	testenv.Eventually(t, bound, func() error {
		if err := v.opens(cfg); !errors.Is(err, broker.ErrUnauthorized) {
			return errors.Join(errors.New("the old password still works"), err)
		}
		return nil
	})
	must(t, publish("over the connection that stands"))
	set("new-secret")
	must(t, v.opens(cfg))
	net.cut()
	testenv.Eventually(t, bound, func() error { return publish("over a new connection") })
}

func (v *vault) allow(user string) {
	v.t.Helper()
	v.acl(kadm.NewACLs().AnyResource().AllowHosts().Allow("User:" + user).Operations(kadm.OpAll).ResourcePatternType(kadm.ACLPatternLiteral).Topics("*").Groups("*"))
}

func (v *vault) acl(b *kadm.ACLBuilder) {
	v.t.Helper()
	ctx, cancel := short()
	defer cancel()
	resp, err := v.admin.CreateACLs(ctx, b)
	must(v.t, err)
	for _, r := range resp {
		must(v.t, r.Err)
	}
}

func TestTLS(t *testing.T) {
	t.Parallel()
	v := newVault(t)
	pem, err := os.ReadFile(v.server.Certificates.CA)
	must(t, err)
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		t.Fatal("no certificate of an authority")
	}
	pair, err := tls.LoadX509KeyPair(v.server.Certificates.ClientCert, v.server.Certificates.ClientKey)
	must(t, err)
	var asked atomic.Int32
	use := func(c *tls.Config) func() (*tls.Config, error) {
		return func() (*tls.Config, error) { asked.Add(1); return c, nil }
	}
	trusting := &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	mutual := &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	named := trusting.Clone()
	named.ServerName = "localhost"
	other := trusting.Clone()
	other.ServerName = "another.example"
	addr := v.server.Addr
	for name, tc := range map[string]struct {
		cfg  broker.Config
		want error
		says string
	}{
		"server_only":           {cfg: broker.Config{Endpoint: secured(addr(kafkaserver.TLS), ""), TLS: use(trusting)}},
		"server_name":           {cfg: broker.Config{Endpoint: secured(addr(kafkaserver.TLS), ""), TLS: use(named)}},
		"another_name":          {broker.Config{Endpoint: secured(addr(kafkaserver.TLS), ""), TLS: use(other)}, broker.ErrUnavailable, "another.example"},
		"unknown_authority":     {broker.Config{Endpoint: secured(addr(kafkaserver.TLS), ""), TLS: use(nil)}, broker.ErrUnavailable, "authority"},
		"plain_text_to_TLS":     {broker.Config{Endpoint: secured(addr(kafkaserver.TLS), "")}, broker.ErrUnavailable, "tls"},
		"TLS_to_plain_text":     {broker.Config{Endpoint: secured(addr(kafkaserver.Plain), ""), TLS: use(trusting)}, broker.ErrUnavailable, "TLS"},
		"mutual":                {cfg: broker.Config{Endpoint: secured(addr(kafkaserver.MTLS), ""), TLS: use(mutual)}},
		"no_client_certificate": {broker.Config{Endpoint: secured(addr(kafkaserver.MTLS), ""), TLS: use(trusting)}, broker.ErrUnavailable, "certificate"},
		"PLAIN_over_TLS": {cfg: broker.Config{Endpoint: secured(addr(kafkaserver.SASLTLS), saslPlain), TLS: use(trusting),
			Credentials: login(kafkaserver.User, kafkaserver.Password)}},
		"wrong_password_over_TLS": {broker.Config{Endpoint: secured(addr(kafkaserver.SASLTLS), saslPlain), TLS: use(trusting),
			Credentials: login(kafkaserver.User, "wrong-secret")}, broker.ErrUnauthorized, "SASL_AUTHENTICATION_FAILED"},
	} {
		t.Run(name, func(t *testing.T) {
			err := v.opens(tc.cfg)
			if tc.want == nil && err != nil || tc.want != nil && (!errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.says)) {
				t.Errorf("got %v, want %v saying %q", err, tc.want, tc.says)
			}
		})
	}
	if trusting.ServerName != "" {
		t.Error("the caller's TLS configuration was written to")
	}
	t.Run("asked_at_each_connection", func(t *testing.T) {
		before := asked.Load()
		for range 3 {
			must(t, v.opens(broker.Config{Endpoint: secured(addr(kafkaserver.TLS), ""), TLS: use(trusting)}))
		}
		if n := asked.Load() - before; n < 3 {
			t.Errorf("3 connections asked %d times", n)
		}
	})
	// The whole name of the certificate is the user, for whom ACLs are written.
	t.Run("user_of_a_certificate", func(t *testing.T) {
		a := openTestAdmin(t, broker.Config{Endpoint: secured(addr(kafkaserver.MTLS), ""), TLS: use(mutual)})
		topo, err := topology.Derive(topology.Spec{Queue: testenv.KafkaServer{}.Name("certified")})
		must(t, err)
		decl := broker.Declaration{Topology: topo, Options: json.RawMessage(`{"partitions": 1}`)}
		if err := a.Declare(t.Context(), decl); !errors.Is(err, broker.ErrUnauthorized) {
			t.Errorf("without an ACL: %v", err)
		}
		v.allow("CN=shove-test")
		testenv.Eventually(t, bound, func() error { return a.Declare(t.Context(), decl) })
	})
}

// TestRightsAreNamed takes a user without any right through everything, each time giving what the error asked for.
func TestRightsAreNamed(t *testing.T) {
	t.Parallel()
	v := newVault(t)
	name := testenv.KafkaServer{}.Name("guarded")
	topo, err := topology.Derive(topology.Spec{Queue: name, Holds: []time.Duration{time.Second}, DeadLetter: true})
	must(t, err)
	decl := broker.Declaration{Topology: topo, Options: json.RawMessage(`{"partitions": 1}`)}
	operator := "operator-" + name
	v.scram(operator, "secret", kadm.ScramSha512)
	cfg := broker.Config{Endpoint: secured(v.server.Addr(kafkaserver.SASL), saslScram512), Credentials: login(operator, "secret")}
	testenv.Eventually(t, bound, func() error { return v.opens(cfg) })
	a := openTestAdmin(t, cfg)

	obs, err := a.Observe(t.Context(), []broker.Declaration{decl})
	if err != nil || obs[0].DriftKnown || len(obs[0].Warnings) == 0 || !strings.Contains(obs[0].Warnings[0], "Describe") {
		t.Errorf("observing what may not be seen: %+v, %v", obs, err)
	}
	topic := func(op kadm.ACLOperation) {
		v.acl(kadm.NewACLs().AllowHosts().Allow("User:" + operator).Operations(op).ResourcePatternType(kadm.ACLPatternPrefixed).Topics(name))
	}
	group := func(op kadm.ACLOperation) {
		v.acl(kadm.NewACLs().AllowHosts().Allow("User:" + operator).Operations(op).ResourcePatternType(kadm.ACLPatternPrefixed).Groups(name))
	}
	larger := decl
	larger.Options = json.RawMessage(`{"partitions": 2, "config": {"retention.ms": "1000000000"}}`)
	for _, step := range []struct {
		operation string
		resource  string
		do        func() error
		grant     func()
	}{
		{"Describe", "topic", func() error { return a.Declare(t.Context(), decl) }, func() { topic(kadm.OpDescribe) }},
		{"Create", "topic", func() error { return a.Declare(t.Context(), decl) }, func() { topic(kadm.OpCreate) }},
		{"Alter", "topic", func() error { return a.Declare(t.Context(), larger) }, func() { topic(kadm.OpAlter); topic(kadm.OpDescribeConfigs) }},
		{"AlterConfigs", "topic", func() error { return a.Declare(t.Context(), larger) }, func() { topic(kadm.OpAlterConfigs) }},
	} {
		err := step.do()
		want := "the operation " + step.operation + " on " + step.resource + ` "` + name
		if !errors.Is(err, broker.ErrUnauthorized) || !strings.Contains(err.Error(), want) {
			t.Fatalf("%s is missing: got %v, want it to say %s", step.operation, err, want)
		}
		step.grant()
		testenv.Eventually(t, bound, func() error {
			if err := step.do(); err != nil && strings.Contains(err.Error(), want) {
				return err
			}
			return nil
		})
	}
	testenv.Eventually(t, bound, func() error { return a.Declare(t.Context(), larger) })
	if ds, err := a.Depths(t.Context(), []string{name}); err != nil || ds[0].Ready.Known {
		t.Errorf("counting for a group that may not be seen: %+v, %v", ds, err)
	}
	group(kadm.OpDescribe)
	testenv.Eventually(t, bound, func() error {
		ds, err := a.Depths(t.Context(), []string{name})
		if err == nil && ds[0].Ready != broker.Known(0) {
			err = errors.New("still unknown")
		}
		return err
	})
	if _, err := a.Delete(t.Context(), []string{name + "-dlq"}); !errors.Is(err, broker.ErrUnauthorized) || !strings.Contains(err.Error(), "the operation Delete on topic") {
		t.Errorf("deleting: %v", err)
	}
	topic(kadm.OpDelete)
	testenv.Eventually(t, bound, func() error { _, err := a.Delete(t.Context(), []string{name + "-dlq"}); return err })
	must(t, v.declareAs(larger))
	v.workerNeeds(name, larger)
}

func (v *vault) declareAs(decl broker.Declaration) error {
	a, err := Driver.OpenAdmin(v.t.Context(), broker.Config{Endpoint: secured(v.server.Addr(kafkaserver.Plain), "")})
	if err != nil {
		return err
	}
	return errors.Join(a.Declare(v.t.Context(), decl), a.Close(v.t.Context()))
}

// workerNeeds runs a worker with exactly the rights that the documentation lists for one.
func (v *vault) workerNeeds(name string, decl broker.Declaration) {
	v.t.Helper()
	t := v.t
	user := "worker-" + name
	v.scram(user, "secret", kadm.ScramSha512)
	cfg := broker.Config{Endpoint: secured(v.server.Addr(kafkaserver.SASL), saslScram512), Credentials: login(user, "secret")}
	testenv.Eventually(t, bound, func() error { return v.opens(cfg) })
	c, err := Driver.OpenClient(t.Context(), cfg)
	must(t, err)
	t.Cleanup(func() { must(t, c.Close(context.Background())) })
	in := broker.Subscribe{Declaration: decl, Prefetch: 5, Concurrency: 1}
	if _, err := c.Subscribe(t.Context(), in); !errors.Is(err, broker.ErrUnauthorized) || !strings.Contains(err.Error(), name) {
		t.Errorf("subscribing without a right: %v", err)
	}
	v.acl(kadm.NewACLs().AllowHosts().Allow("User:"+user).Operations(kadm.OpRead, kadm.OpWrite).ResourcePatternType(kadm.ACLPatternPrefixed).Topics(name))
	v.acl(kadm.NewACLs().AllowHosts().Allow("User:" + user).Operations(kadm.OpRead).ResourcePatternType(kadm.ACLPatternPrefixed).Groups(name))
	p, err := c.Publisher(t.Context(), decl)
	must(t, err)
	testenv.Eventually(t, bound, func() error {
		return p.Publish(t.Context(), []broker.Message{{ID: "1", Body: []byte("m")}})
	})
	var s broker.Subscription
	testenv.Eventually(t, bound, func() (err error) { s, err = c.Subscribe(t.Context(), in); return err })
	act := func(k settle.Kind) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), bound)
		defer cancel()
		ds, err := s.Receive(ctx)
		must(t, err)
		must(t, s.Settle(ctx, []broker.Settlement{{Delivery: ds[0], Action: settle.Action{Kind: k, Tier: 0, Delay: time.Second, Retries: 1}}}))
	}
	act(settle.Hold)
	act(settle.DeadLetter)
}

// TestMetadataNeedsNoRight says why OpenAdmin succeeds for a user without any: Kafka has no right to connect.
func TestMetadataNeedsNoRight(t *testing.T) {
	t.Parallel()
	v := newVault(t)
	must(t, v.opens(broker.Config{Endpoint: secured(v.server.Addr(kafkaserver.SASL), saslPlain), Credentials: login(kafkaserver.Weak, kafkaserver.WeakPassword)}))
}
