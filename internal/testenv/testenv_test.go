package testenv_test

import (
	"errors"
	"net"
	"net/url"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/rabbitserver"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func dial(url string) (*amqp.Connection, error) {
	return amqp.DialConfig(url, amqp.Config{Heartbeat: 5 * time.Second, Dial: amqp.DefaultDial(2 * time.Second)})
}

func mustDial(t *testing.T, url string) *amqp.Connection {
	t.Helper()
	c, err := dial(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestPollReportsTheLastError(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	if err := testenv.Poll(time.Millisecond, func() error { return boom }); !errors.Is(err, boom) {
		t.Fatalf("got %v, want %v", err, boom)
	}
	calls := 0
	if err := testenv.Poll(time.Minute, func() error {
		if calls++; calls < 3 {
			return boom
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

func TestVhostsAreApart(t *testing.T) {
	t.Parallel()
	server := testenv.RabbitMQ(t)
	a, b := server.Vhost(t), server.Vhost(t)
	ch, err := mustDial(t, a.URL).Channel()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ch.QueueDeclare("q", true, false, false, false, amqp.Table{"x-queue-type": "quorum"}); err != nil {
		t.Fatal(err)
	}
	if err := ch.ExchangeDeclare("h", "x-consistent-hash", true, false, false, false, nil); err != nil {
		t.Fatalf("the consistent-hash plugin is missing: %v", err)
	}
	ch, err = mustDial(t, b.URL).Channel()
	if err != nil {
		t.Fatal(err)
	}
	var refused *amqp.Error
	if _, err := ch.QueueDeclarePassive("q", true, false, false, false, nil); !errors.As(err, &refused) || refused.Code != amqp.NotFound {
		t.Fatalf("the queue of another vhost: got %v, want 404", err)
	}
}

func TestUserWithLessRights(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t).Vhost(t)
	name := "u-" + v.Name
	v.AddUser(t, name, "secret", "", "^$", ".*", ".*")
	u, err := url.Parse(v.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(name, "secret")
	ch, err := mustDial(t, u.String()).Channel()
	if err != nil {
		t.Fatal(err)
	}
	var refused *amqp.Error
	if _, err := ch.QueueDeclare("q", true, false, false, false, nil); !errors.As(err, &refused) || refused.Code != amqp.AccessRefused {
		t.Fatalf("declaring without the right to: got %v, want 403", err)
	}
}

func TestPrivateServerKillAndRestart(t *testing.T) {
	t.Parallel()
	server := testenv.StartRabbitMQ(t, rabbitserver.Options{TLS: true})
	conn := mustDial(t, server.URL)
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	closed := conn.NotifyClose(make(chan *amqp.Error, 1))
	if _, err := ch.QueueDeclare("kept", true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	server.Kill(t)
	select {
	case reason := <-closed:
		t.Logf("closed: %v", reason)
	case <-time.After(10 * time.Second):
		t.Fatal("the connection outlives the server")
	}
	if _, err := dial(server.URL); err == nil {
		t.Fatal("a killed server accepts connections")
	}
	server.Restart(t)
	ch, err = mustDial(t, server.URL).Channel()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ch.QueueDeclarePassive("kept", true, false, false, false, nil); err != nil {
		t.Fatalf("a durable queue is gone after a restart: %v", err)
	}
	tls, err := amqp.DialTLS_ExternalAuth(server.TLSURL, nil)
	if err == nil {
		_ = tls.Close()
		t.Fatal("a client without the authority connects")
	}
	server.Stop(t)
	server.Restart(t)
	mustDial(t, server.URL)
}

func TestProxyCutAndRestore(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t).Vhost(t)
	u, err := url.Parse(v.URL)
	if err != nil {
		t.Fatal(err)
	}
	proxy := testenv.Proxy(t, u.Host)
	conn := mustDial(t, proxy.URL(v.URL))
	closed := conn.NotifyClose(make(chan *amqp.Error, 1))
	proxy.Cut()
	select {
	case reason := <-closed:
		t.Logf("closed: %v", reason)
	case <-time.After(10 * time.Second):
		t.Fatal("the connection outlives the cut")
	}
	if c, err := net.DialTimeout("tcp", proxy.Addr(), time.Second); err == nil {
		_ = c.Close()
		t.Fatal("a cut proxy accepts connections")
	}
	proxy.Restore()
	proxy.Latency(50 * time.Millisecond)
	start := time.Now()
	mustDial(t, proxy.URL(v.URL))
	if took := time.Since(start); took < 100*time.Millisecond { // at least two answers of the server
		t.Fatalf("connecting took %v in spite of the latency", took)
	}
}
