package redis

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/brokertest"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/redisserver"
	"github.com/shove-dev/shove/topology"
)

func TestConformance(t *testing.T) {
	brokertest.Run(t, brokertest.Backend{Open: openConformance, Capabilities: Driver.Capabilities})
}

func endpointOf(mode mode, addresses ...string) json.RawMessage {
	return endpointJSON(map[string]any{"addresses": addresses, "mode": mode})
}

func endpointSentinel(master string, addresses ...string) json.RawMessage {
	return endpointJSON(map[string]any{"addresses": addresses, "mode": sentinel, "masterName": master})
}

func endpointJSON(v any) json.RawMessage {
	out, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return out
}

// openConformance gives a subtest a proxy to the shared server, and a server of its own where it restarts it.
func openConformance(t *testing.T) brokertest.Instance {
	var addr string
	var private *redisserver.Server
	if strings.HasSuffix(t.Name(), "restarts_under_load") {
		private = testenv.StartRedis(t, redisserver.Options{})
		addr = private.Addr()
	} else {
		addr = testenv.Redis(t).Addr(t)
	}
	w := testWire(t, addr)
	in := brokertest.Instance{
		Driver: Driver,
		Client: broker.Config{Endpoint: endpointOf(standalone, w.addr())},
		Admin:  broker.Config{Endpoint: endpointOf(standalone, addr)},
		Raw:    newRaw(t, addr),
		Faults: faultsOf(t, w, addr),
	}
	if private != nil {
		in.Faults.Restart = func(t testing.TB) {
			t.Helper()
			if err := errors.Join(private.Kill(), private.Restart(t.Context())); err != nil {
				t.Fatal(err)
			}
		}
	}
	return in
}

func faultsOf(t testing.TB, w *wire, addr string) brokertest.Faults {
	t.Helper()
	return brokertest.Faults{
		Cut: func(testing.TB) { w.end() },
		Block: func(testing.TB) func() {
			w.setRefuse(true)
			w.end()
			return func() { w.setRefuse(false) }
		},
		HoldConfirms: func(testing.TB) func() { return w.hold() },
		CutAt:        func(_ testing.TB, step brokertest.Step) func() { return w.arm(step) },
		BreakCopies: func(t testing.TB, d broker.Declaration) func() {
			t.Helper()
			c := newRaw(t, addr).c
			var keys []string
			for _, h := range d.Topology.Holds {
				keys = append(keys, physical(d.Topology, h.Queue))
				if err := c.Set(t.Context(), keys[len(keys)-1], "in the way", 0).Err(); err != nil {
					t.Fatal(err)
				}
			}
			return func() {
				if err := c.Del(context.Background(), keys...).Err(); err != nil {
					t.Error(err)
				}
			}
		},
	}
}

// raw reads and writes the server with the plain client library.
type raw struct{ c *goredis.Client }

func newRaw(t testing.TB, addr string) *raw {
	t.Helper()
	c := goredis.NewClient(&goredis.Options{Addr: addr, Protocol: 2, DisableIdentity: true})
	t.Cleanup(func() { _ = c.Close() })
	return &raw{c}
}

func (r *raw) Publish(t testing.TB, d broker.Declaration, q topology.Queue, msgs ...brokertest.Message) {
	t.Helper()
	for _, m := range msgs {
		values := []any{payloadField, m.Body}
		if m.ContentType != "" {
			values = append(values, contentTypeField, m.ContentType)
		}
		for k, v := range m.Headers {
			s, err := text(v)
			if err != nil {
				t.Fatal(err)
			}
			values = append(values, k, s)
		}
		if m.Key != "" {
			values = append(values, header.Key, m.Key)
		}
		if err := r.c.XAdd(t.Context(), &goredis.XAddArgs{Stream: physical(d.Topology, q.Name), NoMkStream: true, Values: values}).Err(); err != nil {
			t.Fatal(err)
		}
	}
}

func (r *raw) Take(t testing.TB, d broker.Declaration, q topology.Queue) []brokertest.Message {
	t.Helper()
	ctx := t.Context()
	key := physical(d.Topology, q.Name)
	if q.Role == topology.RoleHold {
		return r.takeHeld(t, key)
	}
	all, err := r.c.XRange(ctx, key, "-", "+").Result()
	if err != nil {
		t.Fatal(err)
	}
	var out []brokertest.Message
	for _, x := range all {
		out = append(out, messageOf(x.Values))
		if err := errors.Join(r.c.XAck(ctx, key, q.Name, x.ID).Err(), r.c.XDel(ctx, key, x.ID).Err()); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

func messageOf(fields map[string]any) brokertest.Message {
	m := brokertest.Message{Headers: header.Map{}}
	for k, v := range fields {
		switch k {
		case payloadField:
			m.Body = []byte(v.(string))
		case contentTypeField:
			m.ContentType = v.(string)
		default:
			m.Headers[k] = v
		}
	}
	m.Key, _ = m.Headers.Text(header.Key)
	return m
}

// takeHeld removes and returns what is in a hold queue, the first to be due first.
func (r *raw) takeHeld(t testing.TB, key string) []brokertest.Message {
	t.Helper()
	all, err := r.c.Eval(t.Context(), `
		local out = {}
		for i, m in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do out[i] = cmsgpack.unpack(string.sub(m, 18)) end
		redis.call('DEL', KEYS[1])
		return out`, []string{key}).Slice()
	if err != nil {
		t.Fatal(err)
	}
	var out []brokertest.Message
	for _, x := range all {
		fields := map[string]any{}
		list := x.([]any)
		for i := 0; i+1 < len(list); i += 2 {
			fields[list[i].(string)] = list[i+1]
		}
		out = append(out, messageOf(fields))
	}
	return out
}

func (r *raw) Count(t testing.TB, d broker.Declaration, q topology.Queue) (ready, inFlight int) {
	t.Helper()
	ready, inFlight, err := r.count(t.Context(), physical(d.Topology, q.Name), q)
	if err != nil {
		t.Fatal(err)
	}
	return ready, inFlight
}

func (r *raw) count(ctx context.Context, key string, q topology.Queue) (ready, inFlight int, err error) {
	if q.Role == topology.RoleHold {
		n, err := r.c.ZCard(ctx, key).Result()
		return int(n), 0, err
	}
	// In one step: messages move meanwhile.
	out, err := r.c.Eval(ctx, `
		if redis.call('EXISTS', KEYS[1]) == 0 then return {0, 0, 0} end
		local p = redis.pcall('XPENDING', KEYS[1], ARGV[1])
		if p.err then return {redis.call('XLEN', KEYS[1]), 0, 0} end
		local back = #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 100000, ARGV[2])
		local unread = 0
		for _, g in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
			for i = 1, #g, 2 do
				if g[i] == 'last-delivered-id' and g[2] == ARGV[1] then unread = #redis.call('XRANGE', KEYS[1], '(' .. g[i + 1], '+') end
			end
		end
		return {unread, p[1], back}`, []string{key}, q.Name, returned).Int64Slice()
	if err != nil {
		return 0, 0, err
	}
	return int(out[0] + out[2]), int(out[1] - out[2]), nil
}
