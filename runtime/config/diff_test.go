package config

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/shove-dev/shove/topology"
)

func base() *RuntimeConfig {
	return &RuntimeConfig{
		APIVersion: APIVersion, Kind: Kind, Generation: "1",
		Brokers: []Broker{
			{Name: "shop/rabbit", Kind: topology.RabbitMQ, Endpoint: json.RawMessage(`{"url":"amqp://rabbit:5672/"}`), CredentialsDir: "/etc/shove/rabbit"},
			{Name: "shop/mem", Kind: topology.Memory},
		},
		Topologies: []Topology{
			{Name: "orders", Broker: "shop/rabbit", Queue: "orders", DeadLetter: "orders-dlq", HoldQueues: []Hold{{Queue: "orders-hold-5s", Delay: Duration(5 * time.Second)}}},
			{Name: "mails", Broker: "shop/mem", Queue: "mails"},
		},
		Consumers: []Consumer{
			{Group: "workers", Topology: "orders", Options: Options{Prefetch: new(10), RetryStrategy: new("Republish")}},
			{Group: "mailers", Topology: "mails"},
		},
		Publish: []Publish{{Topology: "orders"}},
	}
}

func TestDiff(t *testing.T) {
	cases := map[string]struct {
		change        func(*RuntimeConfig)
		live, restart []string
	}{
		"nothing":    {change: func(*RuntimeConfig) {}},
		"generation": {change: func(c *RuntimeConfig) { c.Generation = "2" }},
		"every live option": {
			change: func(c *RuntimeConfig) {
				o := &c.Consumers[0].Options
				o.Prefetch, o.Concurrency, o.MaxRetries, o.MaxReconnectAttempts = new(20), new(5), new(uint32(3)), new(7)
				o.HandlerTimeout, o.HandlerTimeoutOutcome = new(Duration(time.Minute)), new("Reject")
				o.MaxMessageSize, o.DrainTimeout = new(int64(1024)), new(Duration(0))
				o.DeferLimit, o.CrashLimit = &DeferLimit{MaxDefers: 2}, new(uint32(4))
			},
			live: []string{
				"consumers[orders].options.concurrency: unset -> 5", "consumers[orders].options.crashLimit: unset -> 4",
				`consumers[orders].options.deferLimit: unset -> {"maxDefers":2}`, `consumers[orders].options.drainTimeout: unset -> "0s"`,
				`consumers[orders].options.handlerTimeout: unset -> "1m0s"`, `consumers[orders].options.handlerTimeoutOutcome: unset -> "Reject"`,
				"consumers[orders].options.maxMessageSize: unset -> 1024", "consumers[orders].options.maxReconnectAttempts: unset -> 7",
				"consumers[orders].options.maxRetries: unset -> 3", "consumers[orders].options.prefetch: 10 -> 20",
			},
		},
		"paused": {
			change: func(c *RuntimeConfig) { c.Consumers[0].Paused = true },
			live:   []string{"consumers[orders].paused: unset -> true"},
		},
		"strategy and exactly once": {
			change: func(c *RuntimeConfig) {
				c.Consumers[0].Options.RetryStrategy, c.Consumers[0].Options.ExactlyOnce, c.Consumers[0].Options.Prefetch = new("InPlace"), new(true), nil
			},
			live:    []string{"consumers[orders].options.prefetch: 10 -> unset"},
			restart: []string{"consumers[orders].options.exactlyOnce: unset -> true", `consumers[orders].options.retryStrategy: "Republish" -> "InPlace"`},
		},
		"defaults that reach a consumer": {
			change: func(c *RuntimeConfig) {
				c.Brokers[1].ConsumerDefaults = Options{RetryStrategy: new("InPlace"), Prefetch: new(3)}
			},
			live:    []string{"brokers[shop/mem].consumerDefaults.prefetch: unset -> 3"},
			restart: []string{`brokers[shop/mem].consumerDefaults.retryStrategy: unset -> "InPlace"`},
		},
		"defaults that reach none": {
			change: func(c *RuntimeConfig) { c.Brokers[0].ConsumerDefaults = Options{RetryStrategy: new("InPlace")} },
			live:   []string{`brokers[shop/rabbit].consumerDefaults.retryStrategy: unset -> "InPlace"`},
		},
		"hold tiers": {
			change: func(c *RuntimeConfig) {
				c.Topologies[0].HoldQueues = []Hold{{Queue: "orders-hold-7s", Delay: Duration(7 * time.Second)}}
			},
			live: []string{"topologies[orders].holdQueues"},
		},
		"endpoint, without showing it": {
			change: func(c *RuntimeConfig) { c.Brokers[0].Endpoint = json.RawMessage(`{"url":"amqp://u:secret@other/"}`) },
			live:   []string{"brokers[shop/rabbit].endpoint"},
		},
		"broker kind": {
			change: func(c *RuntimeConfig) {
				c.Brokers[1] = Broker{Name: "shop/mem", Kind: topology.NATS, Endpoint: json.RawMessage(`{}`), ConsumerDefaults: Options{Prefetch: new(9)}}
				c.Topologies[1].Options = json.RawMessage(`{"replicas":3}`)
			},
			live:    []string{"brokers[shop/mem].consumerDefaults.prefetch: unset -> 9"},
			restart: []string{"brokers[shop/mem].endpoint", `brokers[shop/mem].kind: "memory" -> "nats"`, "topologies[mails].options"},
		},
		"topology moves to a broker of another kind, whose old one leaves": {
			change: func(c *RuntimeConfig) {
				c.Topologies[1].Broker = "shop/rabbit"
				c.Brokers = c.Brokers[:1]
			},
			restart: []string{"brokers[shop/mem]: present -> absent", "topologies[mails].broker"},
		},
		"external": {
			change:  func(c *RuntimeConfig) { c.Topologies[1].External = true },
			restart: []string{"topologies[mails].external"},
		},
		"sequenced": {
			change:  func(c *RuntimeConfig) { c.Topologies[0].Sequenced = &Sequenced{Shards: 4} },
			restart: []string{"topologies[orders].sequenced"},
		},
		"consumer leaves with its topology and broker": {
			change: func(c *RuntimeConfig) {
				c.Brokers, c.Topologies, c.Consumers = c.Brokers[:1], c.Topologies[:1], c.Consumers[:1]
			},
			live:    []string{"consumers[mails].paused: unset -> true"},
			restart: []string{"brokers[shop/mem]: present -> absent", "topologies[mails]: present -> absent", "consumers[mails]: present -> absent"},
		},
		"consumer comes": {
			change: func(c *RuntimeConfig) {
				c.Topologies = append(c.Topologies, Topology{Name: "new", Broker: "shop/mem", Queue: "new"})
				c.Consumers = append(c.Consumers, Consumer{Group: "n", Topology: "new"})
			},
			live:    []string{"topologies[new]: absent -> present"},
			restart: []string{"consumers[new]: absent -> present"},
		},
		"group renamed": {
			change:  func(c *RuntimeConfig) { c.Consumers[0].Group = "other" },
			restart: []string{`consumers[orders].group: "workers" -> "other"`},
		},
		"publishing": {
			change: func(c *RuntimeConfig) {
				c.Publish = []Publish{{Topology: "orders", MaxMessageSize: 5}, {Topology: "mails"}}
			},
			live: []string{"publish[mails]: absent -> present", "publish[orders].maxMessageSize"},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			current, next := base(), base()
			c.change(next)
			live, restart := Diff(current, next)
			if d := cmp.Diff(c.live, texts(live)); d != "" {
				t.Errorf("live: %s", d)
			}
			if d := cmp.Diff(c.restart, texts(restart)); d != "" {
				t.Errorf("restart: %s", d)
			}
			kept := KeepFixed(current, next)
			if err := kept.Validate(); err != nil {
				t.Errorf("what is in force then is not valid: %v", err)
			}
			if d := cmp.Diff(base(), current); d != "" {
				t.Errorf("the current configuration was changed: %s", d)
			}
			if kept.Generation != next.Generation {
				t.Errorf("generation %q, want that of the new one", kept.Generation)
			}
			again, left := Diff(kept, next)
			if len(again) > 0 {
				t.Errorf("taking it into use twice changes something: %v", again)
			}
			if d := cmp.Diff(texts(restart), texts(left)); d != "" {
				t.Errorf("what needs a restart is forgotten: %s", d)
			}
		})
	}
}

func texts(changes []Change) []string {
	var all []string
	for _, c := range changes {
		all = append(all, c.String())
	}
	return all
}
