package redis

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/topology"
)

func TestEndpoint(t *testing.T) {
	tests := map[string]struct {
		in   string
		want endpoint
		err  string
	}{
		"standalone":    {`{"addresses":["redis.shop.svc:6379"]}`, endpoint{Addresses: []string{"redis.shop.svc:6379"}, Mode: standalone}, ""},
		"explicit":      {`{"addresses":["[::1]:6379"],"mode":"Standalone"}`, endpoint{Addresses: []string{"[::1]:6379"}, Mode: standalone}, ""},
		"cluster":       {`{"addresses":["a:1","b:2"],"mode":"Cluster"}`, endpoint{Addresses: []string{"a:1", "b:2"}, Mode: cluster}, ""},
		"sentinel":      {`{"addresses":["a:1"],"mode":"Sentinel","masterName":"m"}`, endpoint{Addresses: []string{"a:1"}, Mode: sentinel, MasterName: "m"}, ""},
		"empty":         {``, endpoint{}, "is empty"},
		"none":          {`{}`, endpoint{}, "addresses"},
		"two":           {`{"addresses":["a:1","b:2"]}`, endpoint{}, "mode Standalone"},
		"no master":     {`{"addresses":["a:1"],"mode":"Sentinel"}`, endpoint{}, "masterName"},
		"a master":      {`{"addresses":["a:1"],"masterName":"m"}`, endpoint{}, "masterName"},
		"mode":          {`{"addresses":["a:1"],"mode":"cluster"}`, endpoint{}, `"cluster"`},
		"port":          {`{"addresses":["a:0"]}`, endpoint{}, "1 to 65535"},
		"no port":       {`{"addresses":["a"]}`, endpoint{}, "host:port"},
		"URL":           {`{"addresses":["redis://user:secret@a:1"]}`, endpoint{}, "credentials Secret"},
		"unknown field": {`{"addresses":["a:1"],"db":3}`, endpoint{}, "db"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := parseEndpoint(json.RawMessage(tc.in))
			if tc.err == "" {
				if err != nil || cmp.Diff(tc.want, got) != "" {
					t.Errorf("got %+v, %v", got, err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tc.err) || strings.Contains(err.Error(), "secret") {
				t.Errorf("got %v, want %q in it", err, tc.err)
			}
		})
	}
}

// Keys of one topology have one slot, also those of a stream that somebody else named.
func TestKeys(t *testing.T) {
	for _, spec := range []topology.Spec{
		{Queue: "orders", Holds: []time.Duration{time.Second}, DeadLetter: true},
		{Queue: "shop.orders", Holds: []time.Duration{time.Second}, DeadLetter: true, DeadLetterQueue: "my-dead"},
		{Queue: "audit", Source: "orders", Holds: []time.Duration{time.Second}, DeadLetter: true},
		{Queue: "orders", External: true, Holds: []time.Duration{time.Second}, DeadLetter: true},
	} {
		top, err := topology.Derive(spec)
		if err != nil {
			t.Fatal(err)
		}
		p, err := newPlan(broker.Declaration{Topology: top})
		if err != nil {
			t.Fatal(err)
		}
		slot := slotOf(spec.Queue)
		if spec.Source != "" {
			slot = slotOf(spec.Source)
		}
		keys := []string{p.registry}
		for _, s := range p.streams {
			keys = append(keys, s.key, consumersKey(s.key, s.group))
			if got := queueOf(s.key); got != s.group {
				t.Errorf("the queue of %q is %q, want %q", s.key, got, s.group)
			}
		}
		for _, h := range p.holds {
			keys = append(keys, h.key)
			if got := queueOf(h.key); got != h.queue.Name {
				t.Errorf("the queue of %q is %q, want %q", h.key, got, h.queue.Name)
			}
		}
		if p.verify != "" {
			keys = append(keys, p.verify, untagged(p.verify))
		}
		for _, k := range keys {
			if slotOf(k) != slot {
				t.Errorf("%+v: key %q has the slot %d, want %d", spec, k, slotOf(k), slot)
			}
		}
	}
	// Of the cluster specification, and CLUSTER KEYSLOT of Redis 7.0.
	for key, want := range map[string]int{"123456789": 12739, "foo{}{bar}": slotOf("foo{}{bar}"), "{user1000}.following": slotOf("user1000"), "foo{{bar}}zap": slotOf("{bar")} {
		if got := slotOf(key); got != want {
			t.Errorf("slot of %q is %d, want %d", key, got, want)
		}
	}
}

// What is packed here is unpacked by the server's cmsgpack.
func TestPack(t *testing.T) {
	c := goredis.NewClient(&goredis.Options{Addr: testenv.Redis(t).Addr(t), Protocol: 2, DisableIdentity: true})
	defer c.Close()
	for _, n := range []int{1, 8, 300} {
		var want []string
		var list []byte
		list = fmt.Appendf(list, "*%d\r\n", 2*n)
		for i := range 2 * n {
			v := strings.Repeat(string(rune('a'+i%26)), []int{1, 31, 32, 255, 256, 65535, 65536, 100_000}[i%8])
			if i == 0 {
				v = payloadField
			}
			want = append(want, v)
			list = fmt.Appendf(list, "$%d\r\n%s\r\n", len(v), v)
		}
		want = append(want, header.RetryCount, "3")
		r := respReader{b: list}
		fields, err := r.fields()
		if err != nil {
			t.Fatal(err)
		}
		e := &entry{}
		e.fill([]byte("5-6"), fields)
		packed, count := appendCopy(nil, e, &broker.Settlement{Stamp: []header.Field{{Name: header.RetryCount, Value: int64(3)}}}, 0)
		got, err := c.Eval(context.Background(), "return cmsgpack.unpack(ARGV[1])", nil, packed).StringSlice()
		if err != nil || count != n+1 || cmp.Diff(want, got) != "" {
			t.Errorf("%d fields: %d, %v", n, count, err)
		}
	}
}

// FuzzAnswer feeds answers that no server gives: they are refused, and nothing panics.
func FuzzAnswer(f *testing.F) {
	f.Add([]byte("*1\r\n*2\r\n$1\r\ns\r\n*1\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$7\r\npayload\r\n$1\r\nx\r\n"))
	f.Add([]byte("*-1\r\n"))
	f.Add([]byte("*1\r\n*2\r\n$1\r\ns\r\n*1\r\n*2\r\n$3\r\n1-1\r\n*-1\r\n"))
	f.Fuzz(func(t *testing.T, answer []byte) {
		s := &subscription{streams: []string{"s"}, logger: slog.New(slog.DiscardHandler)}
		entries, err := s.parse(answer)
		if err != nil {
			return
		}
		for _, e := range entries {
			appendCopy(nil, e, &broker.Settlement{}, 0)
		}
	})
}

func TestErrors(t *testing.T) {
	for text, want := range map[string]error{
		"NOAUTH Authentication required.":                                                         broker.ErrUnauthorized,
		"NOPERM User app has no permissions to run the 'xadd' command":                            broker.ErrUnauthorized,
		"WRONGPASS invalid username-password pair or user is disabled.":                           broker.ErrUnauthorized,
		"NOGROUP No such key 's' or consumer group 'g'":                                           broker.ErrNotFound,
		"UNBLOCKED the stream key no longer exists":                                               broker.ErrNotFound,
		"WRONGTYPE Operation against a key holding the wrong kind of value":                       broker.ErrConflict,
		"WRONGTYPE Operation against a key script: abc, on @user_script:3.":                       broker.ErrConflict,
		"OOM command not allowed when used memory > 'maxmemory'. script: abc, on @user_script:1.": broker.ErrRejected,
		"MISCONF Redis is configured to save RDB snapshots, but it's currently unable to":         broker.ErrRejected,
		"LOADING Redis is loading the dataset in memory":                                          broker.ErrUnavailable,
		"READONLY You can't write against a read only replica.":                                   broker.ErrUnavailable,
		"CLUSTERDOWN The cluster is down":                                                         broker.ErrUnavailable,
		"ERR unknown command 'XACKDEL', with args beginning with: ":                               broker.ErrUnsupported,
		"CROSSSLOT Keys in request don't hash to the same slot":                                   broker.ErrUnsupported,
		"ERR Error running script (call to f_1): @user_script:1: -NOGROUP No such key":            broker.ErrNotFound,
	} {
		if err := mapError(replyError(text)); !errors.Is(err, want) {
			t.Errorf("%q: %v, want %v", text, err, want)
		}
	}
	if err := mapError(context.DeadlineExceeded); !errors.Is(err, broker.ErrUnavailable) {
		t.Errorf("got %v", err)
	}
}

func TestWithHost(t *testing.T) {
	for _, tc := range [][3]string{
		{"10.0.0.1:6379", "seed:1", "10.0.0.1:6379"},
		{":6379", "seed:1", "seed:6379"},
		{"?:6379", "seed:1", "seed:6379"},
		{"[::1]:6379", "seed:1", "[::1]:6379"},
	} {
		if got := withHost(tc[0], tc[1]); got != tc[2] {
			t.Errorf("%q asked at %q: %q, want %q", tc[0], tc[1], got, tc[2])
		}
	}
}
