package redis

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/brokertest"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/redisserver"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// TestCluster runs the suite on clusters of one node each that is reached through a proxy, whose port it announces.
func TestCluster(t *testing.T) {
	brokertest.Run(t, brokertest.Backend{Capabilities: Driver.Capabilities, Open: func(t *testing.T) brokertest.Instance {
		w := testWire(t, "")
		node := testenv.StartRedisCluster(t, 1, redisserver.Options{Announce: w.port()})[0]
		w.mu.Lock()
		w.upstream = node.Addr()
		w.mu.Unlock()
		in := brokertest.Instance{Driver: Driver, Client: broker.Config{Endpoint: endpointOf(cluster, w.addr())}, Raw: newRaw(t, node.Addr()), Faults: faultsOf(t, w, node.Addr())}
		// Faults must not break how tests declare and count, and one address of a node is all that it announces.
		in.Admin = broker.Config{Endpoint: endpointOf(standalone, node.Addr())}
		in.Faults.Restart = func(t testing.TB) {
			t.Helper()
			if err := errors.Join(node.Kill(), node.Restart(t.Context())); err != nil {
				t.Fatal(err)
			}
			testenv.ClusterAgrees(t, node, 1)
		}
		return in
	}})
}

func addresses(nodes []*redisserver.Server) []string {
	var out []string
	for _, n := range nodes {
		out = append(out, n.Addr())
	}
	return out
}

// benchOnCluster has a raw client of the node that has the queue.
func benchOnCluster(t *testing.T, nodes []*redisserver.Server, queue string) *bench {
	t.Helper()
	e := endpointOf(cluster, addresses(nodes)...)
	return benchWith(t, e, e, ownerOf(nodes, queue).Addr())
}

// ownerOf is the primary that has a queue's slot as the cluster was made.
func ownerOf(nodes []*redisserver.Server, queue string) *redisserver.Server {
	slot := slotOf("{" + queue + "}")
	for i := range nodes {
		if slot < (i+1)*16384/len(nodes) {
			return nodes[i]
		}
	}
	return nil
}

// queueOn is a queue name whose slot a node has.
func queueOn(nodes []*redisserver.Server, i int) string {
	for n := 0; ; n++ {
		if q := fmt.Sprintf("orders%d", n); ownerOf(nodes, q) == nodes[i] {
			return q
		}
	}
}

// Three nodes: queues on each of them work at one time, whichever node the endpoint names.
func TestClusterOfThree(t *testing.T) {
	t.Parallel()
	nodes := testenv.StartRedisCluster(t, 3, redisserver.Options{})
	for i := range nodes {
		q := queueOn(nodes, i)
		e := endpointOf(cluster, nodes[(i+1)%3].Addr())
		b := benchWith(t, e, e, nodes[i].Addr())
		d := b.declare(topology.Spec{Queue: q, Holds: []time.Duration{50 * time.Millisecond}, DeadLetter: true})
		l := newLedger()
		stop := l.run(t, b, d)
		l.grows(t, 100)
		stop()
	}
	e := endpointOf(cluster, nodes[0].Addr())
	a, err := Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: e})
	if err != nil {
		t.Fatal(err)
	}
	defer closeBounded(t, a)
	first, err := a.Server(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	other, err := Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: endpointOf(cluster, nodes[2].Addr())})
	if err != nil {
		t.Fatal(err)
	}
	defer closeBounded(t, other)
	if second, err := other.Server(t.Context()); err != nil || second.ID != first.ID {
		t.Errorf("one cluster has the ids %q and %q, %v", first.ID, second.ID, err)
	}
	if _, err := Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: endpointOf(cluster, testenv.Redis(t).Addr(t))}); !errors.Is(err, broker.ErrUnsupported) {
		t.Errorf("a server that is no cluster: %v", err)
	}
}

// A slot is moved to another node under load: nothing is lost, and nobody has to be restarted.
func TestClusterSlotMoves(t *testing.T) {
	t.Parallel()
	nodes := testenv.StartRedisCluster(t, 2, redisserver.Options{})
	q := queueOn(nodes, 0)
	b := benchOnCluster(t, nodes, q)
	d := b.declare(topology.Spec{Queue: q, Holds: []time.Duration{50 * time.Millisecond}, DeadLetter: true})
	l := newLedger()
	stop := l.run(t, b, d)
	l.grows(t, 50)
	moveSlot(t, nodes[0], nodes[1], slotOf(main(d)))
	b.raw = goredis.NewClient(&goredis.Options{Addr: nodes[1].Addr(), Protocol: 2, DisableIdentity: true})
	t.Cleanup(func() { _ = b.raw.Close() })
	l.grows(t, 100)
	stop()
	if n := b.raw.XLen(t.Context(), dead(d)).Val(); n == 0 {
		t.Error("nothing is on the other node")
	}
}

// moveSlot does what redis-cli --cluster reshard does for one slot.
func moveSlot(t *testing.T, from, to *redisserver.Server, slot int) {
	t.Helper()
	ctx := t.Context()
	open := func(s *redisserver.Server) *goredis.Client {
		c := goredis.NewClient(&goredis.Options{Addr: s.Addr(), Protocol: 2, DisableIdentity: true})
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	src, dst := open(from), open(to)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	srcID, err := src.ClusterMyID(ctx).Result()
	must(err)
	dstID, err := dst.ClusterMyID(ctx).Result()
	must(err)
	must(dst.Do(ctx, "CLUSTER", "SETSLOT", slot, "IMPORTING", srcID).Err())
	must(src.Do(ctx, "CLUSTER", "SETSLOT", slot, "MIGRATING", dstID).Err())
	for {
		keys, err := src.ClusterGetKeysInSlot(ctx, slot, 100).Result()
		must(err)
		if len(keys) == 0 {
			break
		}
		args := []any{"MIGRATE", "127.0.0.1", to.Port(), "", 0, 5000, "KEYS"}
		for _, k := range keys {
			args = append(args, k)
		}
		must(src.Do(ctx, args...).Err())
		time.Sleep(100 * time.Millisecond) // so that commands meet the slot between two nodes
	}
	must(dst.Do(ctx, "CLUSTER", "SETSLOT", slot, "NODE", dstID).Err())
	must(src.Do(ctx, "CLUSTER", "SETSLOT", slot, "NODE", dstID).Err())
}

// A primary of a cluster dies, and its replica takes over: what it had answered and not passed on yet is what may be
// lost, and it is counted.
func TestClusterFailover(t *testing.T) {
	t.Parallel()
	nodes := testenv.StartRedisCluster(t, 3, redisserver.Options{})
	q := queueOn(nodes, 1)
	replica := testenv.JoinRedisCluster(t, nodes[1], redisserver.Options{})
	testenv.ClusterAgrees(t, nodes[0], 4)
	b := benchOnCluster(t, nodes, q)
	d := b.declare(topology.Spec{Queue: q, Holds: []time.Duration{50 * time.Millisecond}, DeadLetter: true})
	l := newLedger()
	stop := l.run(t, b, d)
	l.grows(t, 100)
	l.died = time.Now()
	if err := nodes[1].Kill(); err != nil {
		t.Fatal(err)
	}
	afterFailover(t, b, l, replica)
	stop()
}

// afterFailover waits until another server has taken over and work goes on there.
func afterFailover(t *testing.T, b *bench, l *ledger, next *redisserver.Server) {
	t.Helper()
	b.raw = goredis.NewClient(&goredis.Options{Addr: next.Addr(), Protocol: 2, DisableIdentity: true})
	t.Cleanup(func() { _ = b.raw.Close() })
	testenv.Eventually(t, time.Minute, func() error {
		role, err := b.raw.Do(t.Context(), "ROLE").Slice()
		if err != nil || role[0] != "master" {
			return fmt.Errorf("role %v, %w", role, err)
		}
		return nil
	})
	l.grows(t, 200)
}

// Sentinels name another primary: the client finds it, and nothing that was replicated is lost.
func TestSentinelFailover(t *testing.T) {
	t.Parallel()
	primary := testenv.StartRedis(t, redisserver.Options{})
	replica := testenv.StartRedis(t, redisserver.Options{Config: []string{fmt.Sprintf("replicaof 127.0.0.1 %d", primary.Port())}})
	testenv.ReplicaIsUp(t, replica)
	var sentinels []*redisserver.Server
	for range 3 {
		sentinels = append(sentinels, testenv.StartRedis(t, redisserver.Options{Sentinel: true, Config: []string{
			fmt.Sprintf("sentinel monitor orders-db 127.0.0.1 %d 2", primary.Port()),
			"sentinel down-after-milliseconds orders-db 1000",
			"sentinel failover-timeout orders-db 5000",
		}}))
	}
	e := endpointSentinel("orders-db", addresses(sentinels)...)
	b := benchWith(t, e, e, primary.Addr())
	testenv.Eventually(t, bound, func() error { // the sentinels have found each other and the replica
		for _, s := range sentinels {
			c := goredis.NewSentinelClient(&goredis.Options{Addr: s.Addr(), Protocol: 2, DisableIdentity: true})
			m, err := c.Master(t.Context(), "orders-db").Result()
			_ = c.Close()
			if err != nil || m["num-slaves"] != "1" || m["num-other-sentinels"] != "2" {
				return fmt.Errorf("%v, %w", m, err)
			}
		}
		return nil
	})
	d := b.declare(topology.Spec{Queue: "orders", Holds: []time.Duration{50 * time.Millisecond}, DeadLetter: true})
	l := newLedger()
	stop := l.run(t, b, d)
	l.grows(t, 100)
	l.died = time.Now()
	if err := primary.Kill(); err != nil {
		t.Fatal(err)
	}
	afterFailover(t, b, l, replica)
	stop()

	t.Run("unknown_master", func(t *testing.T) {
		_, err := Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: endpointSentinel("other", addresses(sentinels)...)})
		if !errors.Is(err, broker.ErrUnavailable) || !strings.Contains(err.Error(), `"other"`) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("settles", func(t *testing.T) {
		b.publish(d, messages("z", 3)...)
		s := b.subscribe(d, 3)
		mustSettle(t, s, act(settle.Done, receive(t, s, 3)...))
	})
}
