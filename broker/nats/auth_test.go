package nats

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"log/slog"
	"math/big"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/settle"
)

// identity is a user's nkey.
type identity struct {
	pair         nkeys.KeyPair
	public, seed string
}

func newIdentity(t testing.TB, pair nkeys.KeyPair, err error) identity {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	public, err := pair.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	seed, err := pair.Seed()
	if err != nil {
		t.Fatal(err)
	}
	return identity{pair, public, string(seed)}
}

// trusted makes a server trust an operator, and returns the credentials file of a user in an account with JetStream.
func trusted(t testing.TB) (change func(*server.Options), creds string) {
	t.Helper()
	user := func(p nkeys.KeyPair, err error) identity { return newIdentity(t, p, err) }
	op, sys, acc, usr := user(nkeys.CreateOperator()), user(nkeys.CreateAccount()), user(nkeys.CreateAccount()), user(nkeys.CreateUser())
	must := func(text string, err error) string {
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	operator := jwt.NewOperatorClaims(op.public)
	operator.SystemAccount = sys.public
	account := jwt.NewAccountClaims(acc.public)
	account.Name = "SHOP"
	account.Limits.JetStreamLimits = jwt.JetStreamLimits{MemoryStorage: -1, DiskStorage: -1, Streams: -1, Consumer: -1}
	resolver := &server.MemAccResolver{}
	for id, claims := range map[string]*jwt.AccountClaims{acc.public: account, sys.public: jwt.NewAccountClaims(sys.public)} {
		if err := resolver.Store(id, must(claims.Encode(op.pair))); err != nil {
			t.Fatal(err)
		}
	}
	text := must(jwt.NewUserClaims(usr.public).Encode(acc.pair))
	file, err := jwt.FormatUserConfig(text, []byte(usr.seed))
	if err != nil {
		t.Fatal(err)
	}
	signed, err := jwt.DecodeOperatorClaims(must(operator.Encode(op.pair)))
	if err != nil {
		t.Fatal(err)
	}
	return func(o *server.Options) {
		o.TrustedOperators, o.SystemAccount, o.AccountResolver = []*jwt.OperatorClaims{signed}, sys.public, resolver
	}, string(file)
}

func TestCredentials(t *testing.T) {
	user := func(p nkeys.KeyPair, err error) identity { return newIdentity(t, p, err) }
	id, other := user(nkeys.CreateUser()), user(nkeys.CreateUser())
	trust, creds := trusted(t)
	_, foreign := trusted(t)
	decorated := "-----BEGIN USER NKEY SEED-----\n" + id.seed + "\n------END USER NKEY SEED------\n"
	for name, tc := range map[string]struct {
		server func(*server.Options)
		right  broker.Credentials
		wrong  map[string]broker.Credentials
	}{
		"user_and_password": {func(o *server.Options) { o.Username, o.Password = "shop", "s3cret" }, broker.Credentials{Username: "shop", Password: "s3cret"},
			map[string]broker.Credentials{"wrong": {Username: "shop", Password: "other-s3cret"}, "none": {}}},
		"token": {func(o *server.Options) { o.Authorization = "s3cret" }, broker.Credentials{Token: "s3cret"},
			map[string]broker.Credentials{"wrong": {Token: "other-s3cret"}, "none": {}}},
		"nkey": {func(o *server.Options) { o.Nkeys = []*server.NkeyUser{{Nkey: id.public}} }, broker.Credentials{NKey: id.seed + "\n"},
			map[string]broker.Credentials{"wrong": {NKey: other.seed}, "public": {NKey: id.public}, "garbage": {NKey: "s3cret"}, "of_an_account": {NKey: user(nkeys.CreateAccount()).seed}}},
		"decorated_nkey": {func(o *server.Options) { o.Nkeys = []*server.NkeyUser{{Nkey: id.public}} }, broker.Credentials{NKey: decorated}, nil},
		"creds": {trust, broker.Credentials{Creds: creds},
			map[string]broker.Credentials{"of_another_operator": {Creds: foreign}, "without_a_seed": {Creds: strings.Split(creds, "-----BEGIN USER NKEY")[0]}, "garbage": {Creds: "s3cret"}}},
	} {
		t.Run(name, func(t *testing.T) {
			s := startServer(t, tc.server)
			var asked atomic.Int32
			current := tc.right
			cfg := broker.Config{Endpoint: endpointOf(t, "nats://"+s.addr()), Credentials: func(context.Context) (broker.Credentials, error) {
				asked.Add(1)
				return current, nil
			}}
			a, err := Driver.OpenAdmin(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer closeBounded(t, a)
			d := declaration(t, orders(), "")
			if err := a.Declare(t.Context(), d); err != nil {
				t.Fatal(err)
			}
			c, err := Driver.OpenClient(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer closeBounded(t, c)
			p, err := c.Publisher(t.Context(), d)
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Publish(t.Context(), messages("m", 3)); err != nil {
				t.Fatal(err)
			}
			if n := asked.Load(); n != 2 {
				t.Errorf("credentials were asked for %d times by 2 connections", n)
			}
			for name, c := range tc.wrong {
				current = c
				_, err := Driver.OpenAdmin(t.Context(), cfg)
				if !errors.Is(err, broker.ErrUnauthorized) || strings.Contains(err.Error(), "s3cret") || strings.Contains(err.Error(), id.seed) {
					t.Errorf("%s: %v, want unauthorized and no secret", name, err)
				}
			}
		})
	}
	t.Run("unreadable", func(t *testing.T) {
		cfg := broker.Config{Endpoint: endpointOf(t, "nats://127.0.0.1:1"), Credentials: func(context.Context) (broker.Credentials, error) {
			return broker.Credentials{}, errors.New("no such file")
		}}
		if _, err := Driver.OpenAdmin(t.Context(), cfg); !errors.Is(err, broker.ErrUnavailable) || !strings.Contains(err.Error(), "no such file") {
			t.Errorf("got %v", err)
		}
	})
}

// TestPermissions: what the server denies is told as such, at once and with the subject, although it answers nothing.
func TestPermissions(t *testing.T) {
	allow := func(subjects ...string) *server.SubjectPermission { return &server.SubjectPermission{Allow: subjects} }
	worker := []string{"$JS.API.STREAM.INFO.orders", "$JS.API.CONSUMER.INFO.orders.orders", "$JS.API.CONSUMER.INFO.orders." + parkedConsumer,
		"$JS.API.CONSUMER.MSG.NEXT.orders.orders", "$JS.ACK.orders.orders.>", "orders-hold-100ms.>", "orders-dlq"}
	s := startServer(t, func(o *server.Options) {
		o.Users = []*server.User{
			{Username: "admin", Password: "a"},
			{Username: "worker", Password: "w", Permissions: &server.Permissions{Publish: allow(worker...), Subscribe: allow("_INBOX.>")}},
			{Username: "nobody", Password: "n", Permissions: &server.Permissions{Publish: allow("x"), Subscribe: allow("_INBOX.>")}},
			{Username: "deaf", Password: "d", Permissions: &server.Permissions{Publish: allow(">"), Subscribe: allow("x")}},
		}
	})
	config := func(user string) broker.Config {
		return broker.Config{Endpoint: endpointOf(t, "nats://"+s.addr()), Credentials: credentials(broker.Credentials{Username: user, Password: user[:1]}), Logger: slog.New(slog.DiscardHandler)}
	}
	a, err := Driver.OpenAdmin(t.Context(), config("admin"))
	if err != nil {
		t.Fatal(err)
	}
	defer closeBounded(t, a)
	d := declaration(t, orders(), "")
	if err := a.Declare(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	raw := s.connect(natsgo.UserInfo("admin", "a"))
	for range 2 {
		if _, err := raw.Request("orders", []byte("m"), bound); err != nil {
			t.Fatal(err)
		}
	}
	denied := func(what string, began time.Time, err error, subject string) {
		t.Helper()
		if !errors.Is(err, broker.ErrUnauthorized) || !strings.Contains(err.Error(), subject) {
			t.Errorf("%s: %v, want unauthorized and %s", what, err, subject)
		}
		if took := time.Since(began); took > 3*time.Second {
			t.Errorf("%s: it took %s", what, took)
		}
	}
	c, err := Driver.OpenClient(t.Context(), config("worker"))
	if err != nil {
		t.Fatal(err)
	}
	defer closeBounded(t, c)
	sub, err := c.Subscribe(t.Context(), broker.Subscribe{Declaration: d, Prefetch: 1, Concurrency: 1})
	if err != nil {
		t.Fatalf("the documented rights are not enough: %v", err)
	}
	mustSettle(t, sub, copying(receive(t, sub, 1)[0], settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected}))
	x := receive(t, sub, 1)[0]
	began := time.Now()
	denied("hold", began, settleItem(t, sub.Settle(t.Context(), []broker.Settlement{copying(x, holdFor(1, 1))}), 0), "orders-hold-2s.at.")
	mustSettle(t, sub, copying(x, holdFor(0, 1)))
	p, err := c.Publisher(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	began = time.Now()
	err = p.Publish(t.Context(), messages("m", 2))
	failed, ok := errors.AsType[*broker.PublishError](err)
	if !ok || len(failed.Items) != 2 {
		t.Fatalf("publish: %v", err)
	}
	denied("publish", began, failed.Items[1].Err, `"orders"`)

	began = time.Now()
	_, err = Driver.OpenAdmin(t.Context(), config("nobody"))
	denied("open", began, err, "$JS.API.INFO")
	began = time.Now()
	_, err = Driver.OpenAdmin(t.Context(), config("deaf"))
	denied("open without an inbox", began, err, "_INBOX.")
	n, err := Driver.OpenClient(t.Context(), config("nobody"))
	if err != nil {
		t.Fatal(err)
	}
	defer closeBounded(t, n)
	began = time.Now()
	_, err = n.Subscribe(t.Context(), broker.Subscribe{Declaration: d, Prefetch: 1, Concurrency: 1})
	denied("subscribe", began, err, "$JS.API.STREAM.INFO.orders")
}

// authority signs certificates for 127.0.0.1.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
}

func newAuthority(t testing.TB) authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ca := authority{key: key, pool: x509.NewCertPool()}
	ca.cert = &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, ca.cert, ca.cert, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	if ca.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	ca.pool.AddCert(ca.cert)
	return ca
}

func (ca authority) pair(t testing.TB) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(2), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"nats.test"},
		IPAddresses: []net.IP{net.ParseIP("127.0.0.1")}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}, ca.cert, key.Public(), ca.key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func TestTLS(t *testing.T) {
	ca := newAuthority(t)
	s := startServer(t, func(o *server.Options) {
		o.TLS, o.TLSVerify, o.TLSTimeout = true, true, 5
		o.TLSConfig = &tls.Config{Certificates: []tls.Certificate{ca.pair(t)}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: ca.pool, MinVersion: tls.VersionTLS12}
	})
	good := &tls.Config{RootCAs: ca.pool, Certificates: []tls.Certificate{ca.pair(t)}, MinVersion: tls.VersionTLS12}
	var asked atomic.Int32
	config := func(c *tls.Config) func() (*tls.Config, error) {
		return func() (*tls.Config, error) { asked.Add(1); return c, nil }
	}
	named := func(name string) *tls.Config { c := good.Clone(); c.ServerName = name; return c }
	for name, tc := range map[string]struct {
		scheme string
		tls    func() (*tls.Config, error)
		says   string // "": it connects
	}{
		"tls":                   {"tls://", config(good), ""},
		"upgraded":              {"nats://", config(good), ""},
		"server_name":           {"tls://", config(named("nats.test")), ""},
		"wrong_server_name":     {"tls://", config(named("another.test")), "another.test"},
		"unknown_authority":     {"tls://", nil, "unknown authority"},
		"no_client_certificate": {"tls://", config(&tls.Config{RootCAs: ca.pool, MinVersion: tls.VersionTLS12}), "certificate"},
		"plain":                 {"nats://", nil, ""}, // the server insists, and the system's authorities do not know it
		"no_configuration":      {"tls://", func() (*tls.Config, error) { return nil, errors.New("no such file") }, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			a, err := Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: endpointOf(t, tc.scheme+s.addr()), TLS: tc.tls})
			if name == "plain" {
				if err == nil {
					closeBounded(t, a)
					t.Error("connected without TLS")
				}
				return
			}
			if tc.says != "" {
				if !errors.Is(err, broker.ErrUnavailable) || !strings.Contains(err.Error(), tc.says) {
					t.Errorf("got %v, want %q in it", err, tc.says)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer closeBounded(t, a)
			if err := a.Declare(t.Context(), declaration(t, orders(), "")); err != nil {
				t.Error(err)
			}
		})
	}
	if good.ServerName != "" {
		t.Error("the caller's TLS configuration was written to")
	}
	plain := startServer(t)
	if _, err := Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: endpointOf(t, "nats://"+plain.addr()), TLS: config(good)}); !errors.Is(err, broker.ErrUnavailable) {
		t.Errorf("a server without TLS, although it is configured: %v", err)
	}
}
