package nats

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	natsgo "github.com/nats-io/nats.go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/topology"
)

func TestParseEndpoint(t *testing.T) {
	for name, tc := range map[string]struct {
		in     string
		want   []string
		secure bool
		says   string // part of the error
	}{
		"one":                {in: `{"servers": ["nats://nats.shop.svc:4222"]}`, want: []string{"nats://nats.shop.svc:4222"}},
		"without_a_scheme":   {in: `{"servers": ["nats-1:4222", "nats-2"]}`, want: []string{"nats://nats-1:4222", "nats://nats-2:4222"}},
		"tls":                {in: `{"servers": ["tls://nats/"]}`, want: []string{"tls://nats:4222"}, secure: true},
		"websocket":          {in: `{"servers": ["wss://nats:443"]}`, want: []string{"wss://nats:443"}, secure: true},
		"ipv6":               {in: `{"servers": ["nats://[::1]:4222"]}`, want: []string{"nats://[::1]:4222"}},
		"none":               {in: `{"servers": []}`, says: "give at least one address"},
		"empty":              {in: ``, says: "is empty"},
		"unknown_field":      {in: `{"servers": ["a"], "url": "b"}`, says: `"url"`},
		"something_after_it": {in: `{"servers": ["a"]} {}`, says: "after its end"},
		"user_information":   {in: `{"servers": ["nats://u:s3cret@nats"]}`, says: "user information"},
		"scheme":             {in: `{"servers": ["http://nats"]}`, says: `scheme "http"`},
		"path":               {in: `{"servers": ["nats://nats/x"]}`, says: "a path"},
		"no_host":            {in: `{"servers": ["nats://:4222"]}`, says: "no host"},
		"garbage":            {in: `{"servers": ["nats://s3cret%zz"]}`, says: "does not parse"},
		"twice":              {in: `{"servers": ["a", "nats://a:4222"]}`, says: "listed twice"},
	} {
		t.Run(name, func(t *testing.T) {
			e, err := parseEndpoint(json.RawMessage(tc.in))
			if tc.says != "" {
				if err == nil || !strings.Contains(err.Error(), tc.says) || strings.Contains(err.Error(), "s3cret") {
					t.Errorf("got %v, want %q in it and no secret", err, tc.says)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, e.servers); diff != "" || e.secure != tc.secure {
				t.Errorf("secure %v %s", e.secure, diff)
			}
		})
	}
}

func TestParseOptions(t *testing.T) {
	for name, tc := range map[string]struct {
		in   string
		want options
		says string
	}{
		"absent":        {in: "", want: options{ackWait: defaultAckWait}},
		"empty":         {in: "{}", want: options{ackWait: defaultAckWait}},
		"all":           {in: `{"replicas": 3, "storage": "Memory", "ackWait": "1m"}`, want: options{3, storageMemory, time.Minute}},
		"file":          {in: `{"storage": "File"}`, want: options{storage: storageFile, ackWait: defaultAckWait}},
		"replicas":      {in: `{"replicas": 6}`, says: "replicas: 6"},
		"storage":       {in: `{"storage": "disk"}`, says: `storage: "disk"`},
		"ack_wait":      {in: `{"ackWait": "5"}`, says: `ackWait: "5"`},
		"short_wait":    {in: `{"ackWait": "10ms"}`, says: "ackWait"},
		"unknown_field": {in: `{"retention": "limits"}`, says: "retention"},
	} {
		t.Run(name, func(t *testing.T) {
			o, err := parseOptions(json.RawMessage(tc.in))
			if tc.says != "" {
				if err == nil || !strings.Contains(err.Error(), tc.says) {
					t.Errorf("got %v, want %q in it", err, tc.says)
				}
				return
			}
			if err != nil || o != tc.want {
				t.Errorf("got %+v, %v; want %+v", o, err, tc.want)
			}
		})
	}
}

func TestVersion(t *testing.T) {
	for text, want := range map[string]struct{ supported, schedules bool }{
		"2.9.25": {}, "2.10.0": {true, false}, "2.11.17": {true, false}, "2.12.0": {true, true}, "2.12.0-RC.1": {true, true},
		"v2.15.3": {true, true}, "3.0": {true, true}, "": {}, "x": {},
	} {
		v := parseVersion(text)
		if v.supported() != want.supported || v.schedules() != want.schedules {
			t.Errorf("%q: supported %v, schedules %v", text, v.supported(), v.schedules())
		}
	}
}

func TestParseReply(t *testing.T) {
	want := origin{delivered: 2, seq: 17, stamp: 1700000000000000001}
	for name, tc := range map[string]struct {
		in string
		ok bool
	}{
		"before_2.15":     {"$JS.ACK.orders.orders.2.17.23.1700000000000000001.5", true},
		"with_the_domain": {"$JS.ACK._.hash.orders.orders.2.17.23.1700000000000000001.5.token", true},
		"without_a_token": {"$JS.ACK.hub.hash.orders.orders.2.17.23.1700000000000000001.5", true},
		"of_a_request":    {"_INBOX.abc.1", false},
		"too_short":       {"$JS.ACK.orders.orders.2", false},
		"no_number":       {"$JS.ACK.orders.orders.x.17.23.1700000000000000001.5", false},
		"empty":           {"", false},
	} {
		got, prefix, ok := parseReply(tc.in, "")
		if ok != tc.ok || ok && got != want {
			t.Errorf("%s: %+v, %v", name, got, ok)
		}
		if again, _, ok := parseReply(tc.in, prefix); ok != tc.ok || ok && again != want {
			t.Errorf("%s, once more: %+v, %v", name, again, ok)
		}
	}
}

func TestHeadersOf(t *testing.T) {
	h := natsgo.Header{
		"tenant": {"a"}, "many": {"a", "b"}, contentType: {"text/plain"}, headerMsgID: {"id"}, headerScheduler: {"orders-hold-5s.at.1"}, "none": nil,
	}
	if diff := cmp.Diff(header.Map{"tenant": "a", "many": "a,b", headerMsgID: "id"}, headersOf(h)); diff != "" {
		t.Error(diff)
	}
	h[header.MessageID] = []string{"m"}
	if _, shown := headersOf(h)[headerMsgID]; shown {
		t.Error("two message ids are shown")
	}
}

func TestHeaderValues(t *testing.T) {
	for _, tc := range []struct {
		in   any
		want string
	}{
		{nil, ""}, {"s", "s"}, {[]byte{0, 254}, "\x00\xfe"}, {int64(-7), "-7"}, {7, "7"}, {true, "true"}, {2.5, "2.5"}, {uint64(1) << 63, "9223372036854775808"},
		{time.UnixMilli(1).UTC(), "1970-01-01T00:00:00.001Z"}, {[]any{"a", 1}, `["a",1]`}, {map[string]any{"a": 1}, `{"a":1}`},
	} {
		if got := text(tc.in); got != tc.want {
			t.Errorf("%#v: %q, want %q", tc.in, got, tc.want)
		}
	}
	if got := oneLine(" a\r\nb\n"); got != "a  b" {
		t.Errorf("one line: %q", got)
	}
	for name, bad := range map[string][2]string{"space": {"a b", "v"}, "colon": {"a:b", "v"}, "empty": {"", "v"}, "not_ASCII": {"ä", "v"}, "line_break": {"a", "v\nw"}, "blank_at_the_end": {"a", "v "}} {
		if err := checkHeader(bad[0], bad[1]); !errors.Is(err, broker.ErrUnsupported) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := checkHeader("x-a_B.1", "ä \x00 b"); err != nil {
		t.Error(err)
	}
}

func TestReadAnswer(t *testing.T) {
	for name, tc := range map[string]struct {
		data, status, stream string
		want                 error // nil: stored
	}{
		"stored":            {data: `{"stream":"orders","seq":7}`, stream: "orders"},
		"a_duplicate":       {data: `{"stream":"orders","seq":7,"duplicate":true}`, stream: "orders"},
		"with_spaces":       {data: `{"seq": 7, "stream": "orders"}`, stream: "orders"},
		"another_stream":    {data: `{"stream":"orders2","seq":7}`, stream: "orders", want: broker.ErrRejected},
		"no_stream":         {status: "503", stream: "orders", want: broker.ErrUnroutable},
		"full":              {data: `{"error":{"code":503,"err_code":10077,"description":"maximum messages exceeded"},"stream":"orders","seq":0}`, stream: "orders", want: broker.ErrRejected},
		"too_large":         {data: `{"error":{"code":400,"err_code":10054,"description":"x"}}`, stream: "orders", want: broker.ErrTooLarge},
		"no_leader":         {data: `{"error":{"code":503,"err_code":10008,"description":"x"}}`, stream: "orders", want: broker.ErrUnavailable},
		"not_of_a_stream":   {data: `hello`, stream: "orders", want: broker.ErrUnknown},
		"acknowledged":      {},
		"consumer_is_gone":  {status: "503", want: broker.ErrLost},
		"schedule_disabled": {data: `{"error":{"code":400,"err_code":10188,"description":"message schedules is disabled"}}`, stream: "orders", want: broker.ErrRejected},
	} {
		m := &natsgo.Msg{Data: []byte(tc.data)}
		if tc.status != "" {
			m.Header = natsgo.Header{"Status": {tc.status}}
		}
		if err := readAnswer(m, tc.stream); !errors.Is(err, tc.want) || tc.want == nil && err != nil {
			t.Errorf("%s: %v, want %v", name, err, tc.want)
		}
	}
}

func TestObjects(t *testing.T) {
	derive := func(s topology.Spec) topology.Topology {
		top, err := topology.Derive(s)
		if err != nil {
			t.Fatal(err)
		}
		return top
	}
	names := func(d broker.Declaration) []string {
		objects, err := Driver.Objects(d)
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, o := range objects {
			out = append(out, o.Kind+" "+o.Name)
		}
		return out
	}
	holds := []time.Duration{5 * time.Second, 30 * time.Second}
	for name, tc := range map[string]struct {
		spec topology.Spec
		want []string
	}{
		"own": {topology.Spec{Queue: "shop.orders", Holds: holds, DeadLetter: true}, []string{
			"stream shop~orders-dlq", "stream shop~orders", "consumer shop~orders-dlq > shop~orders-dlq", "consumer shop~orders > shop~orders",
			"subject shop~orders-hold-5s", "subject shop~orders-hold-30s"}},
		"external": {topology.Spec{Queue: "orders", Holds: holds, DeadLetter: true, External: true}, []string{
			"stream orders", "stream orders-dlq", "consumer orders-dlq > orders-dlq", "consumer orders > orders"}},
		"source": {topology.Spec{Queue: "billing", Source: "orders-log", Holds: holds}, []string{
			"stream orders-log", "stream billing", "consumer orders-log > billing", "consumer billing > billing", "subject billing-hold-5s", "subject billing-hold-30s"}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, names(broker.Declaration{Topology: derive(tc.spec)})); diff != "" {
				t.Error(diff)
			}
		})
	}
	d := broker.Declaration{Topology: derive(topology.Spec{Queue: "orders"}), Options: json.RawMessage(`{"replicas": 9}`)}
	if _, err := Driver.Objects(d); !errors.Is(err, broker.ErrUnsupported) {
		t.Errorf("bad options: %v", err)
	}
	d = broker.Declaration{Topology: derive(topology.Spec{Queue: "orders", Holds: holds, DeadLetter: true, Sequenced: &topology.SequencedSpec{}})}
	if _, err := Driver.Objects(d); !errors.Is(err, broker.ErrUnsupported) {
		t.Errorf("sequenced: %v", err)
	}
	if c := Driver.Capabilities(json.RawMessage(`{"storage": "Memory"}`)); c.Durable {
		t.Error("a stream in memory is durable")
	}
}

func TestClock(t *testing.T) {
	var k clock
	now := time.Now()
	if got := k.after(now, time.Second); !got.Equal(now.Add(time.Second)) {
		t.Error("without a measurement the clocks are taken for equal")
	}
	// The leader is ahead by 2 to 3 s: a wait ends 3 s later on its clock, and 2 s of it may be over already.
	k.bounds.Store(&bounds{least: 2 * time.Second, most: 3 * time.Second})
	if got := k.after(now, time.Second); !got.Equal(now.Add(4 * time.Second)) {
		t.Errorf("after: %s", got.Sub(now))
	}
	if got := k.left(now, now.Add(10*time.Second)); got != 8*time.Second {
		t.Errorf("left: %s", got)
	}
}

func TestWaiting(t *testing.T) {
	var w waiting
	k := waitKey{"orders", "orders", 7}
	w.put(k, waiter{delivered: 2, due: time.Now().Add(time.Hour), fields: []header.Field{{Name: header.RetryCount, Value: int64(1)}, {Name: header.DeferCount, Value: int64(4)}}})
	v, ok := w.take(k)
	if !ok {
		t.Fatal("forgotten")
	}
	if _, again := w.take(k); again {
		t.Error("it is there twice")
	}
	if left := v.early(origin{delivered: 3}, time.Now()); left < 59*time.Minute {
		t.Errorf("the next delivery is early by %s", left)
	}
	if left := v.early(origin{delivered: 4}, time.Now()); left != 0 {
		t.Errorf("a delivery after somebody else's is early by %s", left)
	}
	resumed := func(delivered uint64, v waiter, known bool) header.Facts {
		e := &entry{origin: origin{delivered: delivered}}
		e.Headers = header.Map{header.RetryCount: "1", "tenant": "a"}
		before := len(e.Headers)
		h := e.Headers
		e.resume(v, known)
		if len(h) != before || e.Headers["tenant"] != "a" {
			t.Error("the original's headers were changed or lost")
		}
		return header.Parse(e.Headers)
	}
	if f := resumed(3, v, true); f.Retries != 1 || f.Defers != 4 {
		t.Errorf("known here: %+v", f)
	}
	if f := resumed(5, v, true); f.Retries != 3 {
		t.Errorf("known here, and two deliveries elsewhere: %+v", f)
	}
	if f := resumed(3, waiter{}, false); f.Retries != 3 {
		t.Errorf("not known: its own count and two redeliveries: %+v", f)
	}
	for i := range uint64(maxWaiting + 10) {
		w.put(waitKey{"orders", "orders", i}, waiter{due: time.Now().Add(-time.Hour)})
	}
	if n := len(w.all); n > maxWaiting {
		t.Errorf("%d are remembered", n)
	}
}
