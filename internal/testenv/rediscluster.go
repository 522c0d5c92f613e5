package testenv

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/internal/testenv/redisserver"
)

// StartRedisCluster starts a cluster of so many primaries, each with an equal part of the slots, and returns when all of
// them agree. The options apply to every node.
func StartRedisCluster(tb testing.TB, n int, opts redisserver.Options) []*redisserver.Server {
	tb.Helper()
	opts.Cluster = true
	nodes := make([]*redisserver.Server, n)
	for i := range nodes {
		nodes[i] = StartRedis(tb, opts)
	}
	const slots = 16384
	for i, node := range nodes {
		redisDo(tb, node, "CLUSTER", "ADDSLOTSRANGE", i*slots/n, (i+1)*slots/n-1)
		if i > 0 {
			host, port, err := net.SplitHostPort(node.Addr())
			if err != nil {
				tb.Fatal(err)
			}
			redisDo(tb, nodes[0], "CLUSTER", "MEET", host, port)
		}
	}
	for _, node := range nodes {
		ClusterAgrees(tb, node, n)
	}
	return nodes
}

// JoinRedisCluster starts a node without slots, as a replica of another one.
func JoinRedisCluster(tb testing.TB, primary *redisserver.Server, opts redisserver.Options) *redisserver.Server {
	tb.Helper()
	opts.Cluster = true
	node := StartRedis(tb, opts)
	host, port, err := net.SplitHostPort(primary.Addr())
	if err != nil {
		tb.Fatal(err)
	}
	redisDo(tb, node, "CLUSTER", "MEET", host, port)
	id := redisDo(tb, primary, "CLUSTER", "MYID")
	Eventually(tb, 30*time.Second, func() error { return redisTry(node, "CLUSTER", "REPLICATE", id) })
	ReplicaIsUp(tb, node)
	return node
}

// ReplicaIsUp waits until a replica has everything that its primary has.
func ReplicaIsUp(tb testing.TB, replica *redisserver.Server) {
	tb.Helper()
	Eventually(tb, 30*time.Second, func() error {
		if info := redisDo(tb, replica, "INFO", "replication"); !strings.Contains(fmt.Sprint(info), "master_link_status:up") {
			return errors.New("the replica has not caught up")
		}
		return nil
	})
}

// ClusterAgrees waits until a node says that all slots are served and that it knows so many nodes.
func ClusterAgrees(tb testing.TB, node *redisserver.Server, nodes int) {
	tb.Helper()
	Eventually(tb, 30*time.Second, func() error {
		info := fmt.Sprint(redisDo(tb, node, "CLUSTER", "INFO"))
		if !strings.Contains(info, "cluster_state:ok") || !strings.Contains(info, fmt.Sprintf("cluster_known_nodes:%d", nodes)) {
			return fmt.Errorf("the cluster does not agree yet: %s", info)
		}
		return nil
	})
}

func redisTry(s *redisserver.Server, args ...any) error {
	c := goredis.NewClient(&goredis.Options{Addr: s.Addr(), Protocol: 2, DisableIdentity: true})
	defer c.Close()
	return c.Do(context.Background(), args...).Err()
}

// redisDo sends one command to a server.
func redisDo(tb testing.TB, s *redisserver.Server, args ...any) any {
	tb.Helper()
	c := goredis.NewClient(&goredis.Options{Addr: s.Addr(), Protocol: 2, DisableIdentity: true})
	defer c.Close()
	out, err := c.Do(context.Background(), args...).Result()
	if err != nil {
		tb.Fatalf("%v: %v", args, err)
	}
	return out
}
