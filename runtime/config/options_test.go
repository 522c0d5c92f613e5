package config

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// TestT_Defaults is the table of rule T, as far as it is about consumers.
func TestT_Defaults(t *testing.T) {
	cases := map[string]struct {
		traits Traits
		want   Effective
	}{
		"owned": {want: Effective{Prefetch: 100, Concurrency: 10, MaxRetries: 10, MaxReconnectAttempts: 0, HandlerTimeout: 30 * time.Second,
			TimeoutOutcome: settle.VerdictUnset, Strategy: settle.Republish, MaxMessageSize: 10 << 20, DrainTimeout: 30 * time.Second}},
		"where crashes are counted": {traits: Traits{CrashLimitDefault: true}, want: Effective{Prefetch: 100, Concurrency: 10, MaxRetries: 10,
			HandlerTimeout: 30 * time.Second, Strategy: settle.Republish, MaxMessageSize: 10 << 20, DrainTimeout: 30 * time.Second, CrashLimit: 20}},
		"external": {traits: Traits{External: true}, want: Effective{Prefetch: 100, Concurrency: 10, MaxRetries: 10,
			HandlerTimeout: 30 * time.Second, Strategy: settle.InPlace, MaxMessageSize: 10 << 20, DrainTimeout: 30 * time.Second}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			got, err := Resolve(c.traits)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(c.want, got, cmpopts.IgnoreFields(Effective{}, "From")); d != "" {
				t.Error(d)
			}
			for _, option := range optionNames {
				if got.From[option] != LayerDefault {
					t.Errorf("%s comes from %q", option, got.From[option])
				}
			}
		})
	}
}

func TestH2_FirstLayerThatSetsAnOptionWins(t *testing.T) {
	seconds := func(n int) Options { return Options{HandlerTimeout: new(Duration(time.Duration(n) * time.Second))} }
	cases := map[string]struct {
		group, code, broker Options
		want                time.Duration
		from                string
	}{
		"nobody":                    {want: 30 * time.Second, from: LayerDefault},
		"the group":                 {group: seconds(1), code: seconds(2), broker: seconds(3), want: time.Second, from: LayerConsumerGroup},
		"the code":                  {code: seconds(2), broker: seconds(3), want: 2 * time.Second, from: LayerCode},
		"the broker":                {broker: seconds(3), want: 3 * time.Second, from: LayerBroker},
		"zero is a value, not none": {group: seconds(0), broker: seconds(3), want: 0, from: LayerConsumerGroup},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			got, err := Resolve(Traits{}, Layer{LayerConsumerGroup, c.group}, Layer{LayerCode, c.code}, Layer{LayerBroker, c.broker})
			if err != nil {
				t.Fatal(err)
			}
			if got.HandlerTimeout != c.want || got.From["handlerTimeout"] != c.from {
				t.Errorf("got %v from %s, want %v from %s", got.HandlerTimeout, got.From["handlerTimeout"], c.want, c.from)
			}
		})
	}
}

// TestH2_EveryOptionIsTakenByItself: options of one layer do not hide those of another.
func TestH2_EveryOptionIsTakenByItself(t *testing.T) {
	full := Options{
		Prefetch: new(1), Concurrency: new(2), MaxRetries: new(uint32(0)), MaxReconnectAttempts: new(4), HandlerTimeout: new(Duration(5)),
		HandlerTimeoutOutcome: new("Defer"), RetryStrategy: new("InPlace"), MaxMessageSize: new(int64(8)), DrainTimeout: new(Duration(9)),
		DeferLimit: &DeferLimit{MaxDefers: 10, MaxAge: Duration(11)}, CrashLimit: new(uint32(12)), ExactlyOnce: new(true),
	}
	got, err := Resolve(Traits{}, Layer{LayerConsumerGroup, Options{Prefetch: new(77)}}, Layer{LayerBroker, full})
	if err != nil {
		t.Fatal(err)
	}
	want := Effective{Prefetch: 77, Concurrency: 2, MaxReconnectAttempts: 4, HandlerTimeout: 5, TimeoutOutcome: settle.VerdictDefer, Strategy: settle.InPlace,
		MaxMessageSize: 8, DrainTimeout: 9, DeferLimit: DeferLimit{MaxDefers: 10, MaxAge: 11}, CrashLimit: 12, ExactlyOnce: true, From: map[string]string{}}
	for _, option := range optionNames {
		want.From[option] = LayerBroker
	}
	want.From["prefetch"] = LayerConsumerGroup
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if len(want.From) != 12 {
		t.Errorf("there are %d options; the test knows 12", len(want.From))
	}
}

func TestResolveRefuses(t *testing.T) {
	cases := map[string]struct {
		options Options
		traits  Traits
		field   string
	}{
		"no prefetch":           {options: Options{Prefetch: new(0)}, field: "prefetch"},
		"huge prefetch":         {options: Options{Prefetch: new(65536)}, field: "prefetch"},
		"no concurrency":        {options: Options{Concurrency: new(-1)}, field: "concurrency"},
		"huge concurrency":      {options: Options{Concurrency: new(10001)}, field: "concurrency"},
		"no reconnects":         {options: Options{MaxReconnectAttempts: new(0)}, field: "maxReconnectAttempts"},
		"negative timeout":      {options: Options{HandlerTimeout: new(Duration(-1))}, field: "handlerTimeout"},
		"negative drain":        {options: Options{DrainTimeout: new(Duration(-1))}, field: "drainTimeout"},
		"negative age":          {options: Options{DeferLimit: &DeferLimit{MaxAge: -1}}, field: "deferLimit.maxAge"},
		"no size":               {options: Options{MaxMessageSize: new(int64(0))}, field: "maxMessageSize"},
		"huge size":             {options: Options{MaxMessageSize: new(int64(1 << 31))}, field: "maxMessageSize"},
		"unknown outcome":       {options: Options{HandlerTimeoutOutcome: new("retry")}, field: "handlerTimeoutOutcome"},
		"unknown strategy":      {options: Options{RetryStrategy: new("Elsewhere")}, field: "retryStrategy"},
		"J3 external republish": {options: Options{RetryStrategy: new("Republish")}, traits: Traits{External: true}, field: "retryStrategy"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := Resolve(c.traits, Layer{LayerConsumerGroup, c.options})
			field, ok := errors.AsType[*topology.FieldError](err)
			if !ok || field.Field != c.field {
				t.Errorf("got %v, want an error about %s", err, c.field)
			}
		})
	}
	t.Run("the bounds themselves are fine", func(t *testing.T) {
		if _, err := Resolve(Traits{}, Layer{LayerConsumerGroup, Options{Prefetch: new(65535), Concurrency: new(10000), MaxReconnectAttempts: new(1),
			HandlerTimeout: new(Duration(0)), MaxMessageSize: new(int64(1)), CrashLimit: new(uint32(0))}}); err != nil {
			t.Error(err)
		}
	})
}

func TestPolicy(t *testing.T) {
	topo, err := topology.Derive(topology.Spec{Queue: "q", Holds: []time.Duration{time.Second}, DeadLetter: true,
		Sequenced: &topology.SequencedSpec{OnFailure: topology.FailAll, OnDefer: topology.DeferHold}})
	if err != nil {
		t.Fatal(err)
	}
	e := Effective{MaxRetries: 3, Strategy: settle.InPlace, DeferLimit: DeferLimit{MaxDefers: 4, MaxAge: Duration(time.Hour)}, CrashLimit: 5}
	want := settle.Policy{Holds: []time.Duration{time.Second}, DeadLetter: true, MaxRetries: 3, Strategy: settle.InPlace, MaxDefers: 4,
		MaxDeferAge: time.Hour, CrashLimit: 5, Sequenced: true, HoldDeferred: true, FailAll: true}
	if d := cmp.Diff(want, e.Policy(topo)); d != "" {
		t.Error(d)
	}
}
