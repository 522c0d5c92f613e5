package nats

import (
	"context"
	"fmt"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
)

// startCluster starts three servers.
func startCluster(t testing.TB) []*testServer {
	t.Helper()
	ports := []int{testenv.FreePort(t), testenv.FreePort(t), testenv.FreePort(t)}
	var routes []*url.URL
	for _, p := range ports {
		routes = append(routes, &url.URL{Scheme: "nats", Host: fmt.Sprintf("127.0.0.1:%d", p)})
	}
	all := make([]*testServer, len(ports))
	for i, p := range ports {
		all[i] = startServer(t, func(o *server.Options) {
			o.ServerName, o.Routes = fmt.Sprintf("node-%d", i), routes
			o.Cluster = server.ClusterOpts{Name: "trio", Host: "127.0.0.1", Port: p}
		})
	}
	return all
}

// TestCluster keeps the books over the loss of the leader of a replicated stream, twice.
func TestCluster(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t)
	var servers []string
	for _, n := range nodes {
		servers = append(servers, "nats://"+n.addr())
	}
	cfg := broker.Config{Endpoint: endpointOf(t, servers...)}
	var a broker.Admin
	d := declaration(t, orders(), `{"replicas": 3, "ackWait": "4s"}`)
	testenv.Eventually(t, time.Minute, func() (err error) { // a cluster takes a while to elect its leader
		if a == nil {
			if a, err = Driver.OpenAdmin(t.Context(), cfg); err != nil {
				return err
			}
		}
		return a.Declare(t.Context(), d)
	})
	defer closeBounded(t, a)
	if got, err := a.Server(t.Context()); err != nil || got.ID != "trio/$G" {
		t.Errorf("server %+v, %v", got, err)
	}
	if o, err := a.Observe(t.Context(), []broker.Declaration{d}); err != nil || !o[0].UpToDate() {
		t.Errorf("after declaring: %v, %v", differences(o[0]), err)
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
	k := &books{}
	producing, stopProducing := context.WithCancel(t.Context())
	consuming, stopConsuming := context.WithCancel(t.Context())
	defer stopProducing()
	defer stopConsuming()
	var producers, consumers sync.WaitGroup
	producers.Go(func() { k.produce(producing, p) })
	for range 2 {
		consumers.Go(func() { k.consume(consuming, c, d) })
	}
	conn, err := natsgo.Connect(servers[0]+","+servers[1]+","+servers[2], natsgo.MaxReconnects(-1), natsgo.ReconnectWait(50*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		k.progress(t, 200)
		var leader *testServer
		testenv.Eventually(t, bound, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			s, err := js.Stream(ctx, "orders")
			if err != nil {
				return err
			}
			for _, n := range nodes {
				if n.Options.ServerName == s.CachedInfo().Cluster.Leader {
					leader = n
					return nil
				}
			}
			return fmt.Errorf("the leader is %q", s.CachedInfo().Cluster.Leader)
		})
		k.Fault()
		leader.restart()
		k.Fault()
	}
	k.progress(t, 200)
	k.Fault() // what was lost on the way to a consumer is redelivered up to an ack wait later
	stopProducing()
	producers.Wait()
	testenv.Eventually(t, time.Minute, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		s, err := js.Stream(ctx, "orders")
		if err != nil {
			return err
		}
		if n := s.CachedInfo().State.Msgs; n > 0 {
			return fmt.Errorf("%d messages are left", n)
		}
		return nil
	})
	stopConsuming()
	consumers.Wait()
	b := &bench{t: t, raw: raw{conn: conn, js: js}}
	for _, m := range b.stored("orders-dlq", ">") {
		k.Dead(m.Header.Get(header.MessageID))
	}
	for _, err := range k.problems {
		t.Error(err)
	}
	if err := k.Check(); err != nil {
		t.Error(err)
	}
	t.Logf("%d calls, %d duplicates", k.called, k.Duplicates())
}
