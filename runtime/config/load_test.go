package config

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/shove-dev/shove/topology"
)

const example = `
apiVersion: runtime.shove.dev/v1alpha1
kind: RuntimeConfig
generation: "abc"
requires: [hold-queues, dead-letter]
brokers:
- name: shop/rabbit
  kind: rabbitmq
  endpoint: {url: "amqp://rabbit:5672/"}
  credentialsDir: /etc/shove/rabbit
  tls: {caFile: /etc/shove/ca.crt, serverName: rabbit}
  consumerDefaults: {handlerTimeout: 15s}
topologies:
- name: orders
  broker: shop/rabbit
  queue: orders
  holdQueues: [{queue: orders-hold-5s, delay: 5s}, {delay: 1500ms}]
  deadLetter: orders-dlq
consumers:
- group: workers
  topology: orders
  options: {prefetch: 20, deferLimit: {maxDefers: 3, maxAge: 1h}}
publish:
- topology: orders
`

// valid is the example without the tier that is out of order.
var valid = strings.Replace(example, ", {delay: 1500ms}", "", 1)

func TestRoundTrip(t *testing.T) {
	c, warnings, err := Parse([]byte(valid))
	if err != nil || len(warnings) > 0 {
		t.Fatalf("got %v, warnings %q", err, warnings)
	}
	b, err := Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	again, warnings, err := Parse(b)
	if err != nil || len(warnings) > 0 {
		t.Fatalf("what was written does not read: %v, %q\n%s", err, warnings, b)
	}
	if d := cmp.Diff(c, again); d != "" {
		t.Error(d)
	}
	decl, err := c.Topologies[0].Declaration()
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(c.Topologies[0], FromDeclaration("orders", "", "shop/rabbit", decl)); d != "" {
		t.Errorf("from the declaration: %s", d)
	}
}

func TestUnknownFieldsAreWarnings(t *testing.T) {
	text := valid + "future: 1\n"
	text = strings.Replace(text, "prefetch: 20,", "prefetch: 20, teleport: true,", 1)
	c, warnings, err := Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if len(warnings) != 2 || !strings.Contains(strings.Join(warnings, "\n"), "teleport") || !strings.Contains(strings.Join(warnings, "\n"), "future") {
		t.Errorf("got warnings %q", warnings)
	}
	if *c.Consumers[0].Options.Prefetch != 20 {
		t.Error("the known fields beside it are lost")
	}
}

func TestParseRefuses(t *testing.T) {
	cases := map[string]struct {
		change []string // old, new
		text   string
		want   string
	}{
		"nothing":               {text: "", want: `apiVersion "", kind ""`},
		"not YAML":              {text: "a: [", want: "not YAML"},
		"a list":                {text: "- a", want: "cannot unmarshal"},
		"another kind":          {change: []string{"kind: RuntimeConfig", "kind: ConfigMap"}, want: `kind "ConfigMap": want runtime.shove.dev/v1alpha1, RuntimeConfig`},
		"a version to come":     {change: []string{"v1alpha1", "v9"}, want: "v9"},
		"a feature to come":     {change: []string{"[hold-queues,", "[teleport,"}, want: `requires: this runtime does not know "teleport"`},
		"a broker twice":        {change: []string{"topologies:\n", "- name: shop/rabbit\n  kind: memory\ntopologies:\n"}, want: `brokers[1].name: "shop/rabbit" is there twice`},
		"no such broker":        {change: []string{"broker: shop/rabbit", "broker: elsewhere"}, want: `no broker is called "elsewhere"`},
		"no such topology":      {change: []string{"  topology: orders\n", "  topology: elsewhere\n"}, want: `no topology is called "elsewhere"`},
		"nowhere to publish":    {change: []string{"publish:\n- topology: orders", "publish:\n- topology: elsewhere"}, want: `publish[0].topology: no topology is called "elsewhere"`},
		"negative publish size": {change: []string{"publish:\n- topology: orders", "publish:\n- topology: orders\n  maxMessageSize: -1"}, want: "publish[0].maxMessageSize: -1"},
		"two consumers":         {change: []string{"publish:\n", "- {group: b, topology: orders}\npublish:\n"}, want: `"orders" has two consumers`},
		"tiers out of order":    {change: []string{"1500ms}", "1ms}"}, want: "holdQueues[1].delay"},
		"a tier's wrong name":   {change: []string{"orders-hold-5s", "mine"}, want: `holdQueues[0].queue: "mine" is not the name of this tier, which is "orders-hold-5s"`},
		"a number as duration":  {change: []string{"handlerTimeout: 15s", "handlerTimeout: 15"}, want: `a duration is text like "30s", not 15`},
		"nonsense as duration":  {change: []string{"handlerTimeout: 15s", "handlerTimeout: soon"}, want: `"soon" is not a duration`},
		"a bad option":          {change: []string{"prefetch: 20", "prefetch: 0"}, want: "consumers[0] (workers): prefetch: 0"},
		"a bad default":         {change: []string{"handlerTimeout: 15s", "handlerTimeout: -15s"}, want: "consumers[0] (workers): handlerTimeout: -15s"},
		"negative retries":      {change: []string{"prefetch: 20", "maxRetries: -1"}, want: "cannot unmarshal number -1"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			text := c.text
			if c.change != nil {
				good := example
				if !strings.Contains(c.change[0], "1500ms") {
					good = valid
				}
				text = strings.Replace(good, c.change[0], c.change[1], 1)
				if text == good {
					t.Fatalf("the example has no %q", c.change[0])
				}
			}
			_, _, err := Parse([]byte(text))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

func TestValidateTellsEverything(t *testing.T) {
	c := &RuntimeConfig{APIVersion: APIVersion, Kind: Kind, Requires: []string{"a", "b"}, Publish: []Publish{{Topology: "x"}}}
	err := c.Validate()
	for _, want := range []string{`"a"`, `"b"`, `"x"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("without %s: %v", want, err)
		}
	}
}

func TestLoadNamesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	if _, _, err := Load(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	if err := os.WriteFile(path, []byte("kind: x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Load(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v, want the path", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(example))
	f.Add([]byte(valid))
	f.Add([]byte("{}"))
	f.Add([]byte("apiVersion: runtime.shove.dev/v1alpha1\nkind: RuntimeConfig\ntopologies: [{}]"))
	f.Add([]byte("a: &a [*a]"))
	f.Fuzz(func(t *testing.T, text []byte) {
		c, _, err := Parse(text)
		if err != nil {
			return
		}
		// What is accepted can be used: it reads back as it is, every topology derives, every option resolves.
		b, err := Marshal(c)
		if err != nil {
			t.Fatalf("accepted, but cannot be written: %v", err)
		}
		again, _, err := Parse(b)
		if err != nil {
			t.Fatalf("accepted, but what was written is not: %v\n%s", err, b)
		}
		if live, restart := Diff(c, again); len(live)+len(restart) > 0 {
			t.Errorf("reads back as something else: %v %v", live, restart)
		}
		for _, topo := range c.Topologies {
			decl, err := topo.Declaration()
			if err != nil {
				t.Fatal(err)
			}
			if decl.Topology.Physical(topology.RabbitMQ, decl.Topology.Queue) == "" {
				t.Error("a queue without a name was accepted")
			}
		}
	})
}

func FuzzDiff(f *testing.F) {
	f.Add([]byte(valid), []byte(valid))
	f.Add([]byte(valid), []byte(strings.ReplaceAll(valid, "kind: rabbitmq", "kind: memory")))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		current, _, err := Parse(a)
		if err != nil {
			return
		}
		next, _, err := Parse(b)
		if err != nil {
			return
		}
		kept := KeepFixed(current, next)
		if live, _ := Diff(kept, next); len(live) > 0 {
			t.Errorf("taking it into use twice changes something: %v", live)
		}
	})
}

func TestRetiredHoldQueues(t *testing.T) {
	top := Topology{Name: "orders", Queue: "orders", HoldQueues: []Hold{{Queue: "orders-hold-5s", Delay: Duration(5 * time.Second)}},
		RetiredHoldQueues: []Hold{{Queue: "orders-hold-9s", Delay: Duration(9 * time.Second)}}}
	d, err := top.Declaration()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(top.RetiredHoldQueues, FromDeclaration("orders", "", "", d).RetiredHoldQueues); diff != "" {
		t.Error(diff)
	}
	top.RetiredHoldQueues[0] = top.HoldQueues[0]
	if d, err = top.Declaration(); err != nil || len(d.Retired) != 0 {
		t.Errorf("a tier that is back: %v, %v", d.Retired, err)
	}
	for _, wrong := range []Hold{{Delay: Duration(time.Second)}, {Queue: "orders-hold-9s"}} {
		top.RetiredHoldQueues[0] = wrong
		if _, err := top.Declaration(); err == nil {
			t.Errorf("%+v is accepted", wrong)
		}
	}
}
