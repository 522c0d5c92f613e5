package redis

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

	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/redisserver"
	"github.com/shove-dev/shove/settle"
)

func credentials(c broker.Credentials) func(context.Context) (broker.Credentials, error) {
	return func(context.Context) (broker.Credentials, error) { return c, nil }
}

func TestTLS(t *testing.T) {
	srv := testenv.StartRedis(t, redisserver.Options{TLS: true, RequireClient: true})
	endpoint := endpointOf(standalone, srv.TLSAddr())
	pem, err := os.ReadFile(srv.Certificates.CA)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		t.Fatal("no certificate of an authority")
	}
	pair, err := tls.LoadX509KeyPair(srv.Certificates.ClientCert, srv.Certificates.ClientKey)
	if err != nil {
		t.Fatal(err)
	}
	var asked atomic.Int32
	config := func(c *tls.Config) func() (*tls.Config, error) {
		return func() (*tls.Config, error) { asked.Add(1); return c, nil }
	}
	good := &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	open := func(e json.RawMessage, tc func() (*tls.Config, error)) (broker.Admin, error) {
		a, err := Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: e, TLS: tc})
		if err == nil {
			t.Cleanup(func() { closeBounded(t, a) })
		}
		return a, err
	}

	t.Run("mutual", func(t *testing.T) {
		a, err := open(endpoint, config(good))
		if err != nil {
			t.Fatal(err)
		}
		d := declaration(t, orders(t))
		if err := a.Declare(t.Context(), d); err != nil {
			t.Fatal(err)
		}
		c := openTestClient(t, broker.Config{Endpoint: endpoint, TLS: config(good)})
		p, err := c.Publisher(t.Context(), d)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Publish(t.Context(), messages("m", 3)); err != nil {
			t.Fatal(err)
		}
		s, err := c.Subscribe(t.Context(), broker.Subscribe{Declaration: d, Prefetch: 3})
		if err != nil {
			t.Fatal(err)
		}
		mustSettle(t, s, act(settle.Done, receive(t, s, 3)...))
		if good.ServerName != "" {
			t.Error("the caller's TLS configuration was written to")
		}
		if asked.Load() < 2 {
			t.Errorf("TLS was asked for %d times", asked.Load())
		}
	})
	t.Run("server_name", func(t *testing.T) {
		wrong := good.Clone()
		wrong.ServerName = "another.example"
		if _, err := open(endpoint, config(wrong)); !errors.Is(err, broker.ErrUnavailable) || !strings.Contains(err.Error(), "another.example") {
			t.Errorf("wrong name: %v", err)
		}
		named := good.Clone()
		named.ServerName = "localhost"
		if _, err := open(endpoint, config(named)); err != nil {
			t.Errorf("right name: %v", err)
		}
	})
	t.Run("unknown_authority", func(t *testing.T) {
		if _, err := open(endpoint, config(&tls.Config{MinVersion: tls.VersionTLS12})); !errors.Is(err, broker.ErrUnavailable) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("no_client_certificate", func(t *testing.T) {
		if _, err := open(endpoint, config(&tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12})); !errors.Is(err, broker.ErrUnavailable) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("plain_text_to_a_TLS_port", func(t *testing.T) {
		if _, err := open(endpoint, nil); !errors.Is(err, broker.ErrUnavailable) {
			t.Errorf("got %v", err)
		}
	})
}

// What docs/brokers/redis.md says users need.
const (
	workloadRights = "+@read +@write +@connection +eval +evalsha +time +command|info"
	operatorRights = workloadRights + " +info"
)

func TestACL(t *testing.T) {
	srv := testenv.StartRedis(t, redisserver.Options{Config: []string{
		"user default off",
		"user root on >root ~* &* +@all",
		"user app on >secret-of-app ~{orders}* resetchannels -@all " + workloadRights,
		"user operator on >secret-of-operator ~{orders}* ~{shove}* resetchannels -@all " + operatorRights,
		"user reader on >secret-of-reader ~{orders}* resetchannels -@all +@read +@connection",
	}})
	endpoint := endpointOf(standalone, srv.Addr())
	as := func(name string) broker.Config {
		return broker.Config{Endpoint: endpoint, Credentials: credentials(broker.Credentials{Username: name, Password: "secret-of-" + name})}
	}
	spec := orders(t)
	spec.Queue = "orders"
	d := declaration(t, spec)

	a, err := Driver.OpenAdmin(t.Context(), as("operator"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeBounded(t, a) })
	if err := a.Declare(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	if server, err := a.Server(t.Context()); err != nil || !strings.HasPrefix(server.ID, "redis-") {
		t.Errorf("server %+v, %v", server, err)
	}
	obs, err := a.Observe(t.Context(), []broker.Declaration{d})
	if err != nil || !obs[0].UpToDate() {
		t.Errorf("observed %+v, %v", obs, err)
	}

	t.Run("workload", func(t *testing.T) {
		c := openTestClient(t, as("app"))
		p, err := c.Publisher(t.Context(), d)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Publish(t.Context(), messages("m", 4)); err != nil {
			t.Fatal(err)
		}
		s, err := c.Subscribe(t.Context(), broker.Subscribe{Declaration: d, Prefetch: 4, Concurrency: 1, Lease: minIdle})
		if err != nil {
			t.Fatal(err)
		}
		ds := receive(t, s, 4)
		hold := settle.Action{Kind: settle.Hold, Retries: 1, Delay: spec.Holds[0]}
		mustSettle(t, s, append(act(settle.Done, ds[0]), copying(ds[1], hold), copying(ds[2], settle.Action{Kind: settle.DeadLetter}), act(settle.GiveBack, ds[3])[0]))
		if err := s.(broker.Extender).Extend(t.Context(), ds, minIdle); err != nil {
			t.Error(err)
		}
		mustSettle(t, s, act(settle.Done, receive(t, s, 2)...)) // the held one and the one given back
		if err := s.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
	t.Run("another_queue", func(t *testing.T) {
		c := openTestClient(t, as("app"))
		other := declaration(t, orders(t))
		p, err := c.Publisher(t.Context(), other)
		if err != nil {
			t.Fatal(err)
		}
		err = p.Publish(t.Context(), messages("m", 1))
		if e, ok := errors.AsType[*broker.PublishError](err); !ok || !errors.Is(e.Items[0].Err, broker.ErrUnauthorized) {
			t.Errorf("publish: %v", err)
		}
		if _, err := c.Subscribe(t.Context(), broker.Subscribe{Declaration: other, Prefetch: 1}); !errors.Is(err, broker.ErrUnauthorized) {
			t.Errorf("subscribe: %v", err)
		}
	})
	t.Run("reader", func(t *testing.T) {
		c := openTestClient(t, as("reader"))
		if _, err := c.Subscribe(t.Context(), broker.Subscribe{Declaration: d, Prefetch: 1}); !errors.Is(err, broker.ErrUnauthorized) {
			t.Errorf("subscribe: %v", err)
		}
	})
	t.Run("wrong_password", func(t *testing.T) {
		for _, c := range []broker.Credentials{{Username: "app", Password: "wrong-secret"}, {Username: "nobody", Password: "wrong-secret"}, {}} {
			_, err := Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: endpoint, Credentials: credentials(c)})
			if !errors.Is(err, broker.ErrUnauthorized) || strings.Contains(err.Error(), "wrong-secret") {
				t.Errorf("%s: %v", c.Username, err)
			}
		}
	})
	t.Run("rotated", func(t *testing.T) {
		root := goredis.NewClient(&goredis.Options{Addr: srv.Addr(), Username: "root", Password: "root"})
		defer root.Close()
		current := broker.Credentials{Username: "operator", Password: "secret-of-operator"}
		cfg := broker.Config{Endpoint: endpoint, Credentials: func(context.Context) (broker.Credentials, error) { return current, nil }}
		a, err := Driver.OpenAdmin(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer closeBounded(t, a)
		if err := root.Do(t.Context(), "ACL", "SETUSER", "operator", "resetpass", ">new").Err(); err != nil {
			t.Fatal(err)
		}
		current.Password = "new"
		if err := root.ClientKillByFilter(t.Context(), "USER", "operator").Err(); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, bound, func() error { // a connection that was closed shows when it is used
			_, err := a.Depths(t.Context(), []string{main(d)})
			return err
		})
	})
}
