package redis

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/broker"
)

// admin declares and observes.
type admin struct{ nodes *nodes }

var _ broker.Admin = (*admin)(nil)

func openAdmin(ctx context.Context, cfg broker.Config) (*admin, error) {
	d, err := newDialer(cfg)
	if err != nil {
		return nil, err
	}
	a := &admin{nodes: newNodes(d)}
	if err := a.reach(ctx); err != nil {
		_ = a.nodes.close()
		return nil, fmt.Errorf("connect to Redis at %s: %w", strings.Join(d.endpoint.Addresses, ", "), mapError(err))
	}
	return a, nil
}

// reach makes sure that the server answers and takes the credentials.
func (a *admin) reach(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	all, err := a.nodes.primaries(ctx)
	if err != nil {
		return err
	}
	err = all[0].Ping(ctx).Err()
	if begins(err, "NOPERM") { // it may do without
		return nil
	}
	return err
}

// serverKey holds an identity of the installation. Redis has none that stays over a restart and a failover.
const serverKey = "{shove}#server"

// Server says what the connection is to, and what of its configuration endangers messages.
func (a *admin) Server(ctx context.Context) (broker.Server, error) {
	var out broker.Server
	all, err := a.nodes.primaries(ctx)
	if err != nil {
		return out, fmt.Errorf("Redis server: %w", mapError(err))
	}
	warned := map[string]bool{}
	runID := ""
	for _, c := range all {
		text, err := c.Info(ctx, "server", "memory", "persistence", "replication").Result()
		if err != nil {
			return out, fmt.Errorf("Redis server: INFO: %w", mapError(err))
		}
		info := parseInfo(text)
		if out.Version == "" {
			out.Version, runID = version(info), info["run_id"]
		}
		for _, w := range serverWarnings(info) {
			if !warned[w] {
				warned[w] = true
				out.Warnings = append(out.Warnings, w)
			}
		}
	}
	if out.ID, err = a.serverID(ctx); err != nil {
		if _, replied := reply(err); !replied {
			return out, fmt.Errorf("Redis server: %w", mapError(err))
		}
		out.ID = "run-" + runID // the user may not write the key: it is another one after a restart
	}
	return out, nil
}

func (a *admin) serverID(ctx context.Context) (string, error) {
	set := goredis.NewCmd(ctx, "SET", serverKey, "redis-"+strings.ToLower(rand.Text()), "NX")
	get := goredis.NewCmd(ctx, "GET", serverKey)
	if err := a.nodes.exec(ctx, serverKey, set, get); err != nil {
		return "", err
	}
	return get.Text()
}

func parseInfo(text string) map[string]string {
	out := map[string]string{}
	for line := range strings.Lines(text) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			out[k] = v
		}
	}
	return out
}

// version names Valkey as what it is: it calls itself Redis 7.2.4 as well.
func version(info map[string]string) string {
	if v := info["valkey_version"]; v != "" {
		return "valkey " + v
	}
	return info["redis_version"]
}

// serverWarnings are findings that endanger messages.
func serverWarnings(info map[string]string) []string {
	var out []string
	if p := info["maxmemory_policy"]; p != "" && p != "noeviction" {
		out = append(out, fmt.Sprintf("maxmemory-policy is %q: a server that is short of memory deletes queues; set it to noeviction", p))
	}
	if info["aof_enabled"] == "0" {
		out = append(out, "the append-only file is off: what was stored since the last snapshot is lost when the server ends; set appendonly to yes")
	}
	if v := strings.SplitN(info["redis_version"], ".", 2)[0]; v != "" && len(v) == 1 && v < "7" {
		out = append(out, fmt.Sprintf("version %s is too old: use Redis 7.0 or later, or Valkey", info["redis_version"]))
	}
	return out
}

// Declare creates streams with their groups and registers hold queues, which come into being with their first message.
func (a *admin) Declare(ctx context.Context, d broker.Declaration) error {
	p, err := newPlan(d)
	if err != nil {
		return err
	}
	if err := a.declare(ctx, &p); err != nil {
		return fmt.Errorf("declare %q: %w", d.Topology.Queue, mapError(err))
	}
	return nil
}

func (a *admin) declare(ctx context.Context, p *plan) error {
	if p.verify != "" {
		source, err := a.nodes.resolve(ctx, p.verify)
		if err != nil {
			return err
		}
		// A group is no message: without one of its own nobody can read a stream and say what is done.
		if err := a.nodes.createGroup(ctx, source, p.topology.Queue, "0", false); err != nil {
			return err
		}
	}
	for _, s := range p.streams {
		if err := a.nodes.createGroup(ctx, s.key, s.group, "0", true); err != nil {
			return fmt.Errorf("stream %q: %w", s.key, err)
		}
	}
	register := []any{"HSET", p.registry}
	for _, h := range p.holds {
		if have, err := a.typeOf(ctx, h.key); err != nil {
			return err
		} else if have != "none" && have != "zset" {
			return conflict(h.key, "sorted set", have)
		}
		register = append(register, h.key, h.delay)
	}
	if p.fanOut() {
		register = append(register, physical(p.topology, p.topology.Queue), isReader)
	}
	if len(register) == 2 {
		return nil
	}
	return a.nodes.exec(ctx, p.registry, goredis.NewCmd(ctx, register...))
}

func (a *admin) typeOf(ctx context.Context, key string) (string, error) {
	cmd := goredis.NewCmd(ctx, "TYPE", key)
	if err := a.nodes.exec(ctx, key, cmd); err != nil {
		return "", err
	}
	return cmd.Text()
}

// Delete deletes queues with what is in them, and what is kept beside them.
func (a *admin) Delete(ctx context.Context, names []string) ([]broker.Deleted, error) {
	out := make([]broker.Deleted, 0, len(names))
	for _, name := range names {
		n, err := a.deleteQueue(ctx, name)
		if err != nil {
			return out, fmt.Errorf("delete queue %q: %w", name, mapError(err))
		}
		out = append(out, broker.Deleted{Queue: name, Messages: broker.Known(n)})
	}
	return out, nil
}

// deleteQueue counts and deletes in one step.
func (a *admin) deleteQueue(ctx context.Context, key string) (int64, error) {
	tag := tagOf(key)
	out, err := a.nodes.run(ctx, deleteScript, []string{key, tag + queuesSuffix, consumersKey(key, queueOf(key)), tag, untagged(tag)}, []any{queueOf(key)})
	if err != nil {
		return 0, err
	}
	return toInt(out[0]), nil
}

func (a *admin) Close(context.Context) error {
	if err := a.nodes.close(); err != nil && !errors.Is(err, goredis.ErrClosed) {
		return err
	}
	return nil
}
