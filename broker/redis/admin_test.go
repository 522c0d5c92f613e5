package redis

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/redisserver"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

func (b *bench) depth(key string) broker.Depth {
	b.t.Helper()
	out, err := b.admin.Depths(b.t.Context(), []string{key})
	if err != nil {
		b.t.Fatal(err)
	}
	return out[0]
}

func (b *bench) wantDepth(key string, ready, inFlight int64) {
	b.t.Helper()
	d := b.depth(key)
	if d.Missing || d.Ready != broker.Known(ready) || d.InFlight != broker.Known(inFlight) {
		b.t.Errorf("%q: %+v, want %d ready and %d in flight", key, d, ready, inFlight)
	}
}

func TestDepthsOfStreams(t *testing.T) {
	b := newBench(t)
	d := b.declare(orders(t))
	key, group := main(d), d.Topology.Queue
	ctx := t.Context()
	b.wantDepth(key, 0, 0)
	b.wantDepth(holdKey(d, 0), 0, 0)
	b.publish(d, messages("m", 6)...)
	b.wantDepth(key, 6, 0)

	t.Run("unread_entries_deleted", func(t *testing.T) { // keda#2819: the server's lag is nil then
		b := b.on(t)
		ids, err := b.raw.XRange(ctx, key, "-", "+").Result()
		if err != nil {
			t.Fatal(err)
		}
		if err := b.raw.XDel(ctx, key, ids[1].ID).Err(); err != nil {
			t.Fatal(err)
		}
		b.wantDepth(key, 5, 0)
	})
	s := b.subscribe(d, 2)
	ds := receive(t, s, 2)
	b.wantDepth(key, 3, 2)
	mustSettle(t, s, act(settle.GiveBack, ds[0]))
	b.wantDepth(key, 4, 1)
	mustSettle(t, s, act(settle.Done, ds[1]))
	b.wantDepth(key, 4, 0)
	t.Run("held", func(t *testing.T) {
		b := b.on(t)
		back := receive(t, s, 2)
		last := len(d.Topology.Holds) - 1
		mustSettle(t, s, []broker.Settlement{copying(back[0], settle.Action{Kind: settle.Hold, Tier: last, Delay: d.Topology.Holds[last].Delay})})
		b.wantDepth(holdKey(d, last), 1, 0)
		b.wantDepth(key, 2, 1)
		mustSettle(t, s, act(settle.Done, back[1]))
	})
	closeBounded(t, s)
	t.Run("emptied_and_filled_again", func(t *testing.T) { // 7.0 counts what was deleted while the stream was empty
		b := b.on(t)
		d := b.declare(orders(t))
		b.publish(d, messages("m", 3)...)
		ids, err := b.raw.XRange(ctx, main(d), "-", "+").Result()
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range ids {
			if err := b.raw.XDel(ctx, main(d), x.ID).Err(); err != nil {
				t.Fatal(err)
			}
		}
		b.wantDepth(main(d), 0, 0)
		b.publish(d, messages("n", 2)...)
		b.wantDepth(main(d), 2, 0)
	})
	t.Run("group_from_the_middle", func(t *testing.T) {
		b := b.on(t)
		d := b.declare(orders(t))
		b.publish(d, messages("m", 5)...)
		ids, err := b.raw.XRange(ctx, main(d), "-", "+").Result()
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(b.raw.XGroupDestroy(ctx, main(d), d.Topology.Queue).Err(), b.raw.XGroupCreate(ctx, main(d), d.Topology.Queue, ids[1].ID).Err()); err != nil {
			t.Fatal(err)
		}
		b.wantDepth(main(d), 3, 0)
	})
	t.Run("trimmed", func(t *testing.T) { // keda#7835
		b := b.on(t)
		d := b.declare(orders(t))
		b.publish(d, messages("m", 5)...)
		if err := b.raw.XTrimMaxLen(ctx, main(d), 2).Err(); err != nil {
			t.Fatal(err)
		}
		b.wantDepth(main(d), 2, 0)
	})
	t.Run("missing", func(t *testing.T) {
		if got := b.on(t).depth("{" + group + ".absent}"); !got.Missing {
			t.Errorf("%+v", got)
		}
	})
}

func TestDeclareConflicts(t *testing.T) {
	b := newBench(t)
	for _, tc := range []struct {
		name string
		key  func(d broker.Declaration) string
		want string
	}{{"main", main, "stream"}, {"dead", dead, "stream"}, {"hold", func(d broker.Declaration) string { return holdKey(d, 0) }, "sorted set"}} {
		t.Run(tc.name, func(t *testing.T) {
			d := declaration(t, orders(t))
			if err := b.raw.Set(t.Context(), tc.key(d), "in the way", 0).Err(); err != nil {
				t.Fatal(err)
			}
			err := b.admin.Declare(t.Context(), d)
			var c *broker.ConflictError
			if !errors.As(err, &c) || c.Diff.Property != "type" || c.Diff.Want != tc.want || c.Diff.Have != "string" || !strings.Contains(c.Object, tc.key(d)) {
				t.Errorf("got %v", err)
			}
			obs, err := b.admin.Observe(t.Context(), []broker.Declaration{d})
			if err != nil {
				t.Fatal(err)
			}
			found := false
			for _, o := range obs[0].Objects {
				if o.Name == tc.key(d) {
					found = len(o.Diffs) == 1 && !o.Diffs[0].Repairable
				}
			}
			if !found {
				t.Errorf("observed %+v", obs[0])
			}
			if n, err := b.raw.Get(t.Context(), tc.key(d)).Result(); n != "in the way" {
				t.Errorf("it was changed: %q, %v", n, err)
			}
		})
	}
	t.Run("sequenced", func(t *testing.T) {
		spec := orders(t)
		spec.Sequenced = &topology.SequencedSpec{}
		if err := b.admin.Declare(t.Context(), declaration(t, spec)); !errors.Is(err, broker.ErrUnsupported) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("options", func(t *testing.T) {
		d := declaration(t, orders(t))
		d.Options = []byte(`{"partitions":3}`)
		if err := b.admin.Declare(t.Context(), d); !errors.Is(err, broker.ErrUnsupported) || !strings.Contains(err.Error(), "partitions") {
			t.Errorf("got %v", err)
		}
	})
}

func TestServer(t *testing.T) {
	for _, tc := range []struct {
		name string
		opts redisserver.Options
		want []string
	}{
		{"sound", redisserver.Options{}, nil},
		{"evicting", redisserver.Options{Config: []string{"maxmemory 100mb", "maxmemory-policy allkeys-lru"}}, []string{"maxmemory-policy", "allkeys-lru", "noeviction"}},
		{"not_persistent", redisserver.Options{NoPersistence: true}, []string{"append-only"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			srv := testenv.StartRedis(t, tc.opts)
			b := benchOn(t, srv.Addr(), srv.Addr())
			first, err := b.admin.Server(t.Context())
			if err != nil || first.Version == "" {
				t.Fatalf("%+v, %v", first, err)
			}
			all := strings.Join(first.Warnings, "; ")
			for _, w := range tc.want {
				if !strings.Contains(all, w) {
					t.Errorf("warnings %q, want %q in them", all, w)
				}
			}
			if tc.want == nil && all != "" {
				t.Errorf("warnings %q, want none", all)
			}
			if tc.opts.NoPersistence {
				return
			}
			if err := errors.Join(srv.Stop(), srv.Restart(t.Context())); err != nil {
				t.Fatal(err)
			}
			var again broker.Server
			testenv.Eventually(t, bound, func() error { again, err = b.admin.Server(t.Context()); return err })
			if again.ID != first.ID {
				t.Errorf("the server's id %q became %q by a restart", first.ID, again.ID)
			}
		})
	}
	t.Run("unreachable", func(t *testing.T) {
		_, err := Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: endpointOf(standalone, fmt.Sprintf("127.0.0.1:%d", testenv.FreePort(t)))})
		if !errors.Is(err, broker.ErrUnavailable) {
			t.Errorf("got %v", err)
		}
	})
}

// A stream that a foreign program made has no braces in its name. It is read in place, and nothing is written to it.
func TestJ3_ForeignStream(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	spec := orders(t)
	spec.External = true
	d := declaration(t, spec)
	ctx := t.Context()
	if err := b.admin.Declare(ctx, d); !errors.Is(err, broker.ErrNotFound) {
		t.Fatalf("declaring without the stream: %v", err)
	}
	foreign := d.Topology.Queue
	for i := range 4 {
		if err := b.raw.XAdd(ctx, &goredis.XAddArgs{Stream: foreign, ID: fmt.Sprintf("0-%d", i+1), Values: []any{payloadField, fmt.Sprint(i), "tenant", "a"}}).Err(); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.admin.Declare(ctx, d); err != nil {
		t.Fatal(err)
	}
	obs, err := b.admin.Observe(ctx, []broker.Declaration{d})
	if err != nil || !obs[0].UpToDate() || obs[0].Objects[0].Name != foreign {
		t.Errorf("observed %+v, %v", obs, err)
	}
	b.wantDepth(main(d), 4, 0)
	s := b.subscribe(d, 4)
	ds := receive(t, s, 4)
	if ds[0].Headers["tenant"] != "a" || string(ds[0].Body) != "0" || !ds[0].Timestamp.IsZero() || ds[0].Native.MessageID() != "0-1" {
		t.Errorf("got %+v", ds[0])
	}
	b.wantDepth(main(d), 0, 4)
	hold := settle.Action{Kind: settle.Hold, Delay: spec.Holds[0]}
	for _, a := range []settle.Action{hold, {Kind: settle.Copy}} {
		if err := s.Settle(ctx, []broker.Settlement{copying(ds[0], a)}); err == nil {
			t.Errorf("%s was carried out on an external stream", a.Kind)
		}
	}
	mustSettle(t, s, append(act(settle.Done, ds[:3]...), copying(ds[3], settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected})))
	b.wantDepth(main(d), 0, 0)
	if n := b.raw.XLen(ctx, foreign).Val(); n != 4 {
		t.Errorf("%d entries are left in it, want the 4 that were there", n)
	}
	b.wantDepth(dead(d), 1, 0)
	if keys := b.raw.Keys(ctx, "*"+foreign+"*hold*").Val(); len(keys) > 0 {
		t.Errorf("hold queues: %v", keys)
	}

	// Its group is destroyed: it goes on where it was, and does not begin from the first entry.
	if err := b.raw.XAdd(ctx, &goredis.XAddArgs{Stream: foreign, ID: "0-5", Values: []any{payloadField, "4"}}).Err(); err != nil {
		t.Fatal(err)
	}
	pending := receive(t, s, 1)
	testenv.Eventually(t, bound, func() error { // the upkeep has noted where the group is
		v := b.raw.HGet(ctx, consumersKey(foreign, d.Topology.Queue), "#floor:"+foreign).Val()
		if v != "0-5 pending" {
			return fmt.Errorf("noted %q", v)
		}
		return nil
	})
	if err := b.raw.XGroupDestroy(ctx, foreign, d.Topology.Queue).Err(); err != nil {
		t.Fatal(err)
	}
	lostItems(t, s.Settle(ctx, act(settle.Done, pending...)), 0)
	next := b.subscribe(d, 10)
	again := receive(t, next, 1)
	if string(again[0].Body) != "4" {
		t.Errorf("%v came again", bodies(again))
	}
	mustSettle(t, next, act(settle.Done, again...))
}

// Two topologies follow a third one's stream: each gets everything, and a retry of one is not seen by the other.
func TestFanOut(t *testing.T) {
	b := newBench(t)
	source := orders(t)
	log := b.declare(source)
	ctx := t.Context()
	follow := func(name string) broker.Declaration {
		return b.declare(topology.Spec{Queue: name, Source: source.Queue, Holds: []time.Duration{50 * time.Millisecond}, DeadLetter: true})
	}
	audit, billing := follow(source.Queue+".audit"), follow("billing."+source.Queue)
	b.publish(log, messages("m", 3)...)
	b.wantDepth(physical(audit.Topology, audit.Topology.Queue), 3, 0)

	a, c := b.subscribe(audit, 10), b.subscribe(billing, 10)
	for name, s := range map[string]*subscription{"audit": a, "billing": c} {
		var got []*broker.Delivery
		for len(got) < 3 {
			got = append(got, receiveSome(t, s)...)
		}
		if fmt.Sprint(bodies(got)) != "[m000 m001 m002]" {
			t.Errorf("%s got %v", name, bodies(got))
		}
		if name == "billing" {
			mustSettle(t, s, act(settle.Done, got...))
			continue
		}
		mustSettle(t, s, append(act(settle.Done, got[0]), copying(got[1], settle.Action{Kind: settle.Hold, Retries: 1, Delay: 50 * time.Millisecond}),
			copying(got[2], settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected})))
	}
	back := receiveSome(t, a)
	if len(back) != 1 || string(back[0].Body) != "m001" {
		t.Errorf("came back: %v", bodies(back))
	}
	b.wantDepth(physical(audit.Topology, audit.Topology.Queue), 0, 1)
	mustSettle(t, a, act(settle.Done, back...))
	b.wantDepth(physical(audit.Topology, audit.Topology.Queue), 0, 0)
	b.wantDepth(dead(audit), 1, 0)
	b.wantDepth(physical(billing.Topology, billing.Topology.Queue), 0, 0)
	if n := b.raw.XLen(ctx, main(log)).Val(); n != 3 {
		t.Errorf("%d entries in the source, want 3: its own group has read none", n)
	}
	obs, err := b.admin.Observe(ctx, []broker.Declaration{audit})
	if err != nil || !obs[0].UpToDate() {
		t.Errorf("observed %+v, %v", obs, err)
	}
	// Deleting a follower takes its group away from the source, which could not be trimmed otherwise.
	closeBounded(t, a)
	if _, err := b.admin.Delete(ctx, []string{physical(audit.Topology, audit.Topology.Queue)}); err != nil {
		t.Fatal(err)
	}
	groups, err := b.raw.XInfoGroups(ctx, main(log)).Result()
	if err != nil || len(groups) != 2 {
		t.Errorf("groups of the source: %+v, %v", groups, err)
	}
}
