package rabbitmq

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

func TestParseEndpoint(t *testing.T) {
	type want struct {
		Address, Vhost, Management string
		Secure                     bool
		Timeout                    time.Duration
	}
	for name, c := range map[string]struct {
		in   string
		want want
		err  string // a part of it
	}{
		"plain":          {in: `{"url":"amqp://rabbit.shop.svc:5672/"}`, want: want{"rabbit.shop.svc:5672", "/", "", false, 30 * time.Minute}},
		"default port":   {in: `{"url":"amqp://rabbit"}`, want: want{"rabbit:5672", "/", "", false, 30 * time.Minute}},
		"tls":            {in: `{"url":"amqps://rabbit/shop","consumerTimeout":"1h"}`, want: want{"rabbit:5671", "shop", "", true, time.Hour}},
		"encoded vhost":  {in: `{"url":"amqp://rabbit/%2Fshop%2Fa"}`, want: want{"rabbit:5672", "/shop/a", "", false, 30 * time.Minute}},
		"slash vhost":    {in: `{"url":"amqp://rabbit/%2F"}`, want: want{"rabbit:5672", "/", "", false, 30 * time.Minute}},
		"ipv6":           {in: `{"url":"amqp://[::1]:5672"}`, want: want{"[::1]:5672", "/", "", false, 30 * time.Minute}},
		"management":     {in: `{"url":"amqp://r","management":{"url":"https://r:15671/prefix/api/"},"consumerTimeout":"0s"}`, want: want{"r:5672", "/", "https://r:15671/prefix", false, 0}},
		"empty":          {in: ``, err: "is empty"},
		"no url":         {in: `{}`, err: "url: is missing"},
		"unknown field":  {in: `{"url":"amqp://r","uri":"x"}`, err: `unknown field "uri"`},
		"user info":      {in: `{"url":"amqp://me:secret-word@r/"}`, err: "credentials Secret"},
		"user only":      {in: `{"url":"amqp://me@r/"}`, err: "credentials Secret"},
		"unparseable":    {in: `{"url":"amqp://me:secret-word@r:x/"}`, err: "does not parse"},
		"scheme":         {in: `{"url":"http://r"}`, err: "use amqp or amqps"},
		"no host":        {in: `{"url":"amqp:///v"}`, err: "has no host"},
		"query":          {in: `{"url":"amqp://r/?heartbeat=1"}`, err: "query"},
		"two segments":   {in: `{"url":"amqp://r/a/b"}`, err: "%2F"},
		"port":           {in: `{"url":"amqp://r:99999/"}`, err: "1 to 65535"},
		"timeout":        {in: `{"url":"amqp://r","consumerTimeout":"soon"}`, err: "consumerTimeout"},
		"minus":          {in: `{"url":"amqp://r","consumerTimeout":"-1s"}`, err: "consumerTimeout"},
		"no management":  {in: `{"url":"amqp://r","management":{}}`, err: "management.url: is missing"},
		"user in second": {in: `{"url":"amqp://r","management":{"url":"http://me:secret-word@r"}}`, err: "credentials Secret"},
		"ftp":            {in: `{"url":"amqp://r","management":{"url":"ftp://r"}}`, err: "use http or https"},
		"trailing":       {in: `{"url":"amqp://r"} {}`, err: "after its end"},
	} {
		t.Run(name, func(t *testing.T) {
			e, err := parseEndpoint(json.RawMessage(c.in))
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) || strings.Contains(err.Error(), "secret-word") {
					t.Fatalf("got %v, want an error with %q and without the password", err, c.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			got := want{Address: e.address(), Vhost: e.vhost, Secure: e.secure, Timeout: e.consumerTimeout}
			if e.management != nil {
				got.Management = e.management.String()
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseOptions(t *testing.T) {
	for name, c := range map[string]struct {
		in   string
		want options
		err  string
	}{
		"absent":         {in: ``, want: options{QueueType: "quorum"}},
		"null":           {in: `null`, want: options{QueueType: "quorum"}},
		"classic":        {in: `{"queueType":"classic"}`, want: options{QueueType: "classic"}},
		"bindings":       {in: `{"bindings":[{"exchange":"shop","routingKey":"order.*"},{"exchange":"shop"}]}`, want: options{QueueType: "quorum", Bindings: []binding{{"shop", "order.*"}, {"shop", ""}}}},
		"stream":         {in: `{"queueType":"stream"}`, err: "use quorum or classic"},
		"no exchange":    {in: `{"bindings":[{"routingKey":"x"}]}`, err: "bindings[0].exchange"},
		"twice":          {in: `{"bindings":[{"exchange":"a"},{"exchange":"a"}]}`, err: "listed twice"},
		"long":           {in: `{"bindings":[{"exchange":"a","routingKey":"` + strings.Repeat("k", 256) + `"}]}`, err: "AMQP allows 255"},
		"unknown":        {in: `{"quorum":true}`, err: `unknown field "quorum"`},
		"not an object":  {in: `[]`, err: "cannot unmarshal array"},
		"exchange a num": {in: `{"bindings":[{"exchange":1}]}`, err: "cannot unmarshal number"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseOptions(json.RawMessage(c.in))
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Fatalf("got %v, want an error with %q", err, c.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestObjects(t *testing.T) {
	main := map[string]any{"durable": true, argType: "quorum", argLimit: deliveryLimit, argExchange: "", argRoutingKey: "orders-dlq", argStrategy: atLeastOnce, argOverflow: rejectPublish}
	dead := map[string]any{"durable": true, argType: "quorum", argLimit: deliveryLimit}
	hold := func(ms int64) map[string]any {
		return map[string]any{"durable": true, argType: "quorum", argTTL: ms, argExchange: "", argRoutingKey: "orders", argStrategy: atLeastOnce, argOverflow: rejectPublish}
	}
	for name, c := range map[string]struct {
		spec    topology.Spec
		options string
		want    []broker.Object
	}{
		"quorum": {spec: orders(), options: `{"bindings":[{"exchange":"shop","routingKey":"k"}]}`, want: []broker.Object{
			{Kind: "queue", Name: "orders-dlq", Role: topology.RoleDeadLetter, Properties: dead},
			{Kind: "queue", Name: "orders", Role: topology.RoleMain, Properties: main},
			{Kind: "queue", Name: "orders-hold-100ms", Role: topology.RoleHold, Properties: hold(100)},
			{Kind: "queue", Name: "orders-hold-400ms", Role: topology.RoleHold, Properties: hold(400)},
			{Kind: "binding", Name: "shop -> orders (k)", Properties: map[string]any{"source": "shop", "destination": "orders", "routing_key": "k"}},
		}},
		"classic": {spec: topology.Spec{Queue: "orders", DeadLetter: true}, options: `{"queueType":"classic"}`, want: []broker.Object{
			{Kind: "queue", Name: "orders-dlq", Role: topology.RoleDeadLetter, Properties: dead},
			{Kind: "queue", Name: "orders", Role: topology.RoleMain, Properties: map[string]any{"durable": true, argType: "classic", argExchange: "", argRoutingKey: "orders-dlq"}},
		}},
		"alone": {spec: topology.Spec{Queue: "orders"}, want: []broker.Object{
			{Kind: "queue", Name: "orders", Role: topology.RoleMain, Properties: map[string]any{"durable": true, argType: "quorum", argLimit: deliveryLimit}},
		}},
		"external": {spec: topology.Spec{Queue: "orders", External: true, DeadLetter: true}, want: []broker.Object{
			{Kind: "queue", Name: "orders", Role: topology.RoleMain},
			{Kind: "queue", Name: "orders-dlq", Role: topology.RoleDeadLetter, Properties: dead},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Driver.Objects(declaration(t, c.spec, c.options))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestObjectsThatAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		spec    topology.Spec
		options string
		field   string // of a *topology.FieldError; else ErrUnsupported
	}{
		"sequenced":         {spec: topology.Spec{Queue: "q", Holds: []time.Duration{time.Second}, DeadLetter: true, Sequenced: &topology.SequencedSpec{}}},
		"options":           {spec: topology.Spec{Queue: "q"}, options: `{"queueType":"x"}`},
		"source":            {spec: topology.Spec{Queue: "q", Source: "log"}, field: "source"},
		"external bindings": {spec: topology.Spec{Queue: "q", External: true}, options: `{"bindings":[{"exchange":"e"}]}`, field: "rabbitmq.bindings"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Driver.Objects(declaration(t, c.spec, c.options))
			var f *topology.FieldError
			if c.field == "" && !errors.Is(err, broker.ErrUnsupported) || c.field != "" && (!errors.As(err, &f) || f.Field != c.field) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// The texts are as RabbitMQ 3.10.8, 4.0.5 and 4.3.6 wrote them.
func TestParseConflict(t *testing.T) {
	for _, c := range []struct {
		code           int
		text           string
		object         string
		property, want string
		have           string
	}{
		{406, "PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': received '61000' but current is '60000'", `queue "q"`, "x-message-ttl", "61000", "60000"},
		{406, "PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': received none but current is the value '60000' of type 'long'", `queue "q"`, "x-message-ttl", "none", "60000"},
		{406, "PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': received '60000' but current is '60000'", `queue "q"`, "x-message-ttl", "60000 (as a value of another type)", "60000"},
		{406, "PRECONDITION_FAILED - inequivalent arg 'x-dead-letter-exchange' for queue 'q' in vhost 'a'b': received 'amq.direct' but current is ''", `queue "q"`, "x-dead-letter-exchange", "amq.direct", `""`},
		{406, "PRECONDITION_FAILED - inequivalent arg 'x-dead-letter-strategy' for queue 'it's' in vhost '/': received the value 'at-least-once' of type 'longstr' but current is none", `queue "it's"`, "x-dead-letter-strategy", "at-least-once", "none"},
		{406, "PRECONDITION_FAILED - inequivalent arg 'durable' for queue 'q' in vhost '/': received 'false' but current is 'true'", `queue "q"`, "durable", "false", "true"},
		{406, "PRECONDITION_FAILED - inequivalent arg 'type' for exchange 'q5.x' in vhost '/': received 'direct' but current is ''x-consistent-hash''", `exchange "q5.x"`, "type", "direct", "x-consistent-hash"},
		{405, "RESOURCE_LOCKED - cannot obtain exclusive access to locked queue 'q5' in vhost '/'. It could be originally declared on another connection or the exclusive property value does not match that of the original declaration.", `queue "q5"`, "exclusive", "false", "true"},
	} {
		got := parseConflict(fmt.Errorf("wrapped: %w", &amqp.Error{Code: c.code, Reason: c.text, Server: true}))
		want := &broker.ConflictError{Object: c.object, Diff: broker.Diff{Property: c.property, Want: c.want, Have: c.have}}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s\n(-want +got):\n%s", c.text, diff)
		}
	}
	for _, text := range []string{"PRECONDITION_FAILED - invalid arg 'x-max-priority' for queue 'q' in vhost '/' of queue type rabbit_quorum_queue", "PRECONDITION_FAILED - unknown delivery tag 3", ""} {
		if got := parseConflict(&amqp.Error{Code: 406, Reason: text}); got != nil {
			t.Errorf("%q: got %v", text, got)
		}
	}
}

func TestMapError(t *testing.T) {
	for _, c := range []struct {
		in   error
		want error
	}{
		{&amqp.Error{Code: 403, Reason: "ACCESS_REFUSED - access to queue 'q' in vhost '/' refused for user 'u'"}, broker.ErrUnauthorized},
		{amqp.ErrCredentials, broker.ErrUnauthorized},
		{amqp.ErrSASL, broker.ErrUnauthorized},
		{&amqp.Error{Code: 404, Reason: "NOT_FOUND - no queue 'q' in vhost '/'"}, broker.ErrNotFound},
		{&amqp.Error{Code: 530, Reason: "NOT_ALLOWED - vhost nope not found"}, broker.ErrNotFound},
		{&amqp.Error{Code: 530, Reason: "NOT_ALLOWED - access to vhost 'a' refused for user 'u'"}, broker.ErrUnauthorized},
		{&amqp.Error{Code: 530, Reason: "NOT_ALLOWED - access to vhost '/' refused for user 'guest': vhost connection limit (1) is reached"}, broker.ErrUnavailable},
		{&amqp.Error{Code: 540, Reason: "NOT_IMPLEMENTED - x"}, broker.ErrUnsupported},
		{&amqp.Error{Code: 406, Reason: "PRECONDITION_FAILED - invalid arg 'x-max-priority' for queue 'q'"}, broker.ErrUnsupported},
		{&amqp.Error{Code: 320, Reason: "CONNECTION_FORCED - Closed via management plugin"}, broker.ErrUnavailable},
		{amqp.ErrClosed, broker.ErrUnavailable},
		{errors.New("read tcp: connection reset by peer"), broker.ErrUnavailable},
		{fmt.Errorf("x: %w", broker.ErrClosed), broker.ErrClosed},
	} {
		if got := mapError(c.in); !errors.Is(got, c.want) || !errors.Is(got, c.in) {
			t.Errorf("%v: got %v, want %v", c.in, got, c.want)
		}
	}
	if mapError(nil) != nil {
		t.Error("nil becomes an error")
	}
}

func TestCounting(t *testing.T) {
	quorum := counting{quorum: true}
	dead := counting{quorum: true, deadLetter: true}
	for name, c := range map[string]struct {
		by                  counting
		redelivered         bool
		headers             amqp.Table
		deliveries, crashes uint32
	}{
		"I2_first":                  {by: quorum, deliveries: 1},
		"forged on first":           {by: quorum, headers: amqp.Table{deliveryCount: int64(18)}, deliveries: 1},
		"returned twice":            {by: quorum, redelivered: true, headers: amqp.Table{deliveryCount: int64(2)}, deliveries: 3, crashes: 2},
		"4.3: nacked":               {by: quorum, redelivered: true, headers: amqp.Table{acquiredCount: int64(1)}, deliveries: 2},
		"4.3: nacked and crashed":   {by: quorum, redelivered: true, headers: amqp.Table{acquiredCount: int64(3), deliveryCount: int64(2)}, deliveries: 4, crashes: 2},
		"unknown":                   {by: quorum, redelivered: true},
		"nonsense":                  {by: quorum, redelivered: true, headers: amqp.Table{deliveryCount: "many"}},
		"negative":                  {by: quorum, redelivered: true, headers: amqp.Table{deliveryCount: int64(-1)}},
		"classic":                   {by: counting{}, redelivered: true, headers: amqp.Table{deliveryCount: int64(2)}},
		"carried over a death":      {by: dead, redelivered: true, headers: amqp.Table{deliveryCount: int64(5), deathHeader: []any{}}},
		"our own dead letter again": {by: dead, redelivered: true, headers: amqp.Table{deliveryCount: int64(1)}, deliveries: 2, crashes: 1},
	} {
		t.Run(name, func(t *testing.T) {
			d, cr := c.by.of(&amqp.Delivery{Redelivered: c.redelivered, Headers: c.headers})
			if d != c.deliveries || cr != c.crashes {
				t.Errorf("got %d deliveries and %d crashes, want %d and %d", d, cr, c.deliveries, c.crashes)
			}
		})
	}
}

func TestE3_DeathOfTheBroker(t *testing.T) {
	at := time.Unix(1700000000, 0)
	death := func(queue, reason string, n int64) amqp.Table {
		return amqp.Table{"queue": queue, "reason": reason, "count": n, "time": at, "exchange": "", "routing-keys": []any{queue}}
	}
	for name, c := range map[string]struct {
		in   amqp.Table
		want header.Death
	}{
		"none":    {},
		"expired": {in: amqp.Table{deathHeader: []any{death("orders", "expired", 1)}}, want: header.Death{Reason: settle.Expired, Count: 1, OriginalQueue: "orders", DiedAt: at}},
		"newest first": {in: amqp.Table{deathHeader: []any{death("orders", "delivery_limit", 2), death("orders-hold-5s", "expired", 7)}},
			want: header.Death{Reason: settle.CrashLoop, Count: 2, OriginalQueue: "orders", DiedAt: at}},
		"named": {in: amqp.Table{deathHeader: []any{death("a", "expired", 1), death("b", "rejected", 3)}, "x-last-death-queue": "b", "x-last-death-reason": "rejected"},
			want: header.Death{Reason: settle.Rejected, Count: 3, OriginalQueue: "b", DiedAt: at}},
		"maxlen":         {in: amqp.Table{deathHeader: []any{death("orders", "maxlen", 1)}}, want: header.Death{Reason: "maxlen", Count: 1, OriginalQueue: "orders", DiedAt: at}},
		"not a list":     {in: amqp.Table{deathHeader: "x"}},
		"not a table":    {in: amqp.Table{deathHeader: []any{"x"}}},
		"foreign values": {in: amqp.Table{deathHeader: []any{amqp.Table{"queue": int64(1), "reason": nil, "count": "x", "time": "y"}}}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, parseDeath(c.in), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseVersion(t *testing.T) {
	for in, want := range map[string]version{"3.10.8": {3, 10, 8}, "4.3.0-rc.1": {4, 3, 0}, "4": {4, 0, 0}, "": {}, "x.y": {}, "99999999.1": {999999, 1, 0}} {
		if got := parseVersion(in); got != want {
			t.Errorf("%q: got %v, want %v", in, got, want)
		}
	}
}

func TestCapabilities(t *testing.T) {
	quorum, classic := Driver.Capabilities(nil), Driver.Capabilities(json.RawMessage(`{"queueType":"classic"}`))
	if !quorum.CountsDeliveries || classic.CountsDeliveries || quorum.Sequenced {
		t.Errorf("quorum %+v, classic %+v", quorum, classic)
	}
	if d, err := Driver.LeaseLimit(json.RawMessage(`{"url":"amqp://r","consumerTimeout":"5m"}`)); d != 5*time.Minute || err != nil {
		t.Errorf("lease limit %v, %v", d, err)
	}
}

func TestTableSize(t *testing.T) {
	deep := amqp.Table{}
	for range maxDepth + 2 {
		deep = amqp.Table{"d": deep}
	}
	for name, c := range map[string]struct {
		p   amqp.Publishing
		max int
		err error
	}{
		"fits":        {p: amqp.Publishing{Headers: amqp.Table{"k": strings.Repeat("x", 100)}}, max: 14 + 10 + 4 + 2 + 105 + 8},
		"one more":    {p: amqp.Publishing{Headers: amqp.Table{"k": strings.Repeat("x", 101)}}, max: 14 + 10 + 4 + 2 + 105 + 8, err: broker.ErrTooLarge},
		"no limit":    {p: amqp.Publishing{Headers: amqp.Table{"k": strings.Repeat("x", 1<<20)}}},
		"long name":   {p: amqp.Publishing{Headers: amqp.Table{strings.Repeat("x", 256): 1}}, err: broker.ErrTooLarge},
		"nested name": {p: amqp.Publishing{Headers: amqp.Table{"a": []any{amqp.Table{strings.Repeat("x", 256): nil}}}}, err: broker.ErrTooLarge},
		"long id":     {p: amqp.Publishing{MessageId: strings.Repeat("x", 256)}, err: broker.ErrTooLarge},
		"deep":        {p: amqp.Publishing{Headers: deep}, err: broker.ErrTooLarge},
		"type":        {p: amqp.Publishing{Headers: amqp.Table{"x": complex(1, 1)}}, err: broker.ErrUnsupported},
	} {
		t.Run(name, func(t *testing.T) {
			if err := fits(&c.p, c.max); !errors.Is(err, c.err) || (err == nil) != (c.err == nil) {
				t.Errorf("got %v, want %v", err, c.err)
			}
		})
	}
}

func FuzzParseEndpoint(f *testing.F) {
	f.Add(`{"url":"amqp://rabbit:5672/v","management":{"url":"http://r"},"consumerTimeout":"30m"}`)
	f.Add(`{"url":"amqp://u:p@h/%2f"}`)
	f.Fuzz(func(t *testing.T, in string) {
		e, err := parseEndpoint(json.RawMessage(in))
		if err == nil && (e.host == "" || e.port < 1 || e.vhost == "") {
			t.Errorf("%q: accepted as %+v", in, e)
		}
	})
}

func FuzzParseOptions(f *testing.F) {
	f.Add(`{"queueType":"classic","bindings":[{"exchange":"a","routingKey":"b"}]}`)
	f.Fuzz(func(t *testing.T, in string) {
		o, err := parseOptions(json.RawMessage(in))
		if err == nil && o.QueueType != quorumQueue && o.QueueType != classicQueue {
			t.Errorf("%q: accepted as %+v", in, o)
		}
	})
}

func FuzzParseConflict(f *testing.F) {
	f.Add("PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': received none but current is the value '60000' of type 'long'")
	f.Add("inequivalent arg '' for queue '' in vhost '': received ' but current is '")
	f.Fuzz(func(t *testing.T, text string) {
		if c := parseConflict(&amqp.Error{Code: 406, Reason: text}); c != nil && (c.Diff.Want == "" || c.Diff.Have == "" || c.Diff.Want == c.Diff.Have) {
			t.Errorf("%q: %+v", text, c)
		}
	})
}

// Whatever headers come, reading them neither panics nor fails, and what is copied of them can be sent.
func FuzzHeaders(f *testing.F) {
	f.Add(`{"x-death":[{"queue":"a","reason":"expired","count":1}],"x-last-death-queue":"a","x-delivery-count":3}`)
	f.Add(`{"x-death":{},"x-acquired-count":-1,"CC":["a"],"x-shove-retry-count":"7"}`)
	f.Fuzz(func(t *testing.T, in string) {
		var m map[string]any
		if json.Unmarshal([]byte(in), &m) != nil {
			return
		}
		d := amqp.Delivery{Headers: toField(m).(amqp.Table), Redelivered: true}
		e := &entry{raw: d}
		e.fill(counting{quorum: true})
		e.Death()
		p := copyOf(e, &broker.Settlement{Delivery: &e.Delivery}, "q")
		if err := fits(&p.msg, 0); err != nil && !errors.Is(err, broker.ErrTooLarge) {
			t.Errorf("%s: %v", in, err)
		}
		if err := p.msg.Headers.Validate(); err != nil {
			t.Errorf("%s: %v", in, err)
		}
		for _, name := range []string{"CC", "BCC", deathHeader, deliveryCount} {
			if _, ok := p.msg.Headers[name]; ok {
				t.Errorf("%s: the copy keeps %s", in, name)
			}
		}
	})
}
