package rabbitmq

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/rabbitserver"
	"github.com/shove-dev/shove/settle"
)

func TestTLS(t *testing.T) {
	srv := testenv.StartRabbitMQ(t, rabbitserver.Options{TLS: true, RequireClient: true})
	v := srv.Vhost(t)
	endpoint := endpointOf(t, v.TLSURL, "")
	creds := credentials(userOf(t, v.URL))
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
		a, err := Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: e, Credentials: creds, TLS: tc})
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
		d := declaration(t, orders(), "")
		if err := a.Declare(t.Context(), d); err != nil {
			t.Fatal(err)
		}
		c := openTestClient(t, broker.Config{Endpoint: endpoint, Credentials: creds, TLS: config(good)})
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
		if n := asked.Load(); n != 3 {
			t.Errorf("TLS was asked for %d times by 3 connections", n)
		}
	})
	t.Run("server_name", func(t *testing.T) {
		wrong := good.Clone()
		wrong.ServerName = "another.example"
		if _, err := open(endpoint, config(wrong)); !errors.Is(err, broker.ErrUnavailable) || !strings.Contains(err.Error(), "another.example") {
			t.Errorf("wrong name: %v", err)
		}
		// The name that the certificate has, whatever the address is.
		named := good.Clone()
		named.ServerName = "localhost"
		if _, err := open(endpoint, config(named)); err != nil {
			t.Errorf("right name: %v", err)
		}
	})
	t.Run("unknown_authority", func(t *testing.T) {
		if _, err := open(endpoint, nil); !errors.Is(err, broker.ErrUnavailable) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("no_client_certificate", func(t *testing.T) {
		if _, err := open(endpoint, config(&tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12})); !errors.Is(err, broker.ErrUnavailable) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("plain_url", func(t *testing.T) {
		_, err := open(endpointOf(t, v.URL, ""), config(good))
		if !errors.Is(err, broker.ErrUnsupported) || !strings.Contains(err.Error(), "amqps://") {
			t.Errorf("got %v", err)
		}
	})
}
