package render

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/rabbitmq"
	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/topology"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var update = flag.Bool("update", false, "write the golden files anew")

func ptr[T any](v T) *T { return &v }

func rabbit() *v1alpha1.Broker {
	b := &v1alpha1.Broker{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "rabbit"}}
	b.Spec.RabbitMQ = &v1alpha1.RabbitMQBroker{URL: "amqp://rabbit/", Management: &v1alpha1.RabbitMQManagement{URL: "http://rabbit:15672"}}
	return b
}

func topo(namespace, name string) *v1alpha1.Topology {
	t := &v1alpha1.Topology{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	t.Spec.BrokerRef = v1alpha1.BrokerReference{Name: "rabbit", Namespace: "shop"}
	t.Spec.HoldQueues = []v1alpha1.HoldQueue{{Delay: metav1.Duration{Duration: 5 * time.Second}}}
	t.Spec.DeadLetter = &v1alpha1.DeadLetter{}
	return t
}

func consumer(name, topology, container string, age int) *v1alpha1.ConsumerGroup {
	g := &v1alpha1.ConsumerGroup{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(name),
		CreationTimestamp: metav1.NewTime(time.Unix(1_000_000-int64(age), 0))}}
	g.Spec.TopologyRef.Name = topology
	g.Spec.WorkloadRef = &v1alpha1.WorkloadReference{Kind: v1alpha1.WorkloadDeployment, Name: "worker", Container: container}
	return g
}

func world(b *v1alpha1.Broker, ts ...*v1alpha1.Topology) World {
	return World{
		Topology: func(k types.NamespacedName) *v1alpha1.Topology {
			for _, t := range ts {
				if t.Namespace == k.Namespace && t.Name == k.Name {
					return t
				}
			}
			return nil
		},
		Broker: func(k types.NamespacedName) *v1alpha1.Broker {
			if b != nil && b.Namespace == k.Namespace && b.Name == k.Name {
				return b
			}
			return nil
		},
		Labels: func(ns string) map[string]string { return map[string]string{"name": ns} },
		Driver: func(k topology.Kind) (broker.Driver, bool) { return rabbitmq.Driver, k == topology.RabbitMQ },
	}
}

func TestQueueNames(t *testing.T) {
	in, out, given := topo("shop", "orders"), topo("tenant", "orders"), topo("tenant", "orders")
	given.Spec.Queue = "mine"
	for want, o := range map[string]*v1alpha1.Topology{"orders": in, "tenant.orders": out, "mine": given} {
		if got := QueueName(o); got != want {
			t.Errorf("queue of %s/%s: %q, want %q", o.Namespace, o.Name, got, want)
		}
	}
	own := topo("shop", "orders")
	own.Spec.BrokerRef.Namespace = ""
	if got := QueueName(own); got != "orders" {
		t.Errorf("queue beside its Broker: %q", got)
	}
}

func TestAccess(t *testing.T) {
	allow := func(from v1alpha1.NamespacesFrom, selector map[string]string, queues ...v1alpha1.QueuePattern) *v1alpha1.AllowedNamespaces {
		a := &v1alpha1.AllowedNamespaces{From: from, Queues: queues}
		if selector != nil {
			a.Selector = &metav1.LabelSelector{MatchLabels: selector}
		}
		return a
	}
	for name, tc := range map[string]struct {
		allowed   *v1alpha1.AllowedNamespaces
		namespace string
		queue     string
		want      string // reason
	}{
		"own, nothing said":                 {nil, "shop", "orders", ""},
		"another, nothing said":             {nil, "tenant", "tenant.orders", v1alpha1.ReasonNamespaceNotAllowed},
		"another, Same":                     {allow(v1alpha1.NamespacesSame, nil), "tenant", "tenant.orders", v1alpha1.ReasonNamespaceNotAllowed},
		"own, Same with patterns":           {allow(v1alpha1.NamespacesSame, nil, "a*"), "shop", "orders", v1alpha1.ReasonQueueNotAllowed},
		"own, All with patterns":            {allow(v1alpha1.NamespacesAll, nil, "a*"), "shop", "orders", ""},
		"another, All, its prefix":          {allow(v1alpha1.NamespacesAll, nil), "tenant", "tenant.orders", ""},
		"another, All, no prefix":           {allow(v1alpha1.NamespacesAll, nil), "tenant", "orders", v1alpha1.ReasonQueueNotAllowed},
		"another, All, another's prefix":    {allow(v1alpha1.NamespacesAll, nil), "tenant", "tenant2.orders", v1alpha1.ReasonQueueNotAllowed},
		"another, All, a pattern":           {allow(v1alpha1.NamespacesAll, nil, "x.*", "{namespace}-*-q"), "tenant", "tenant-a-q", ""},
		"another, Selector matches":         {allow(v1alpha1.NamespacesSelector, map[string]string{"name": "tenant"}), "tenant", "tenant.a", ""},
		"another, Selector does not match":  {allow(v1alpha1.NamespacesSelector, map[string]string{"name": "x"}), "tenant", "tenant.a", v1alpha1.ReasonNamespaceNotAllowed},
		"another, Selector without any":     {allow(v1alpha1.NamespacesSelector, nil), "tenant", "tenant.a", v1alpha1.ReasonNamespaceNotAllowed},
		"own, Selector that does not match": {allow(v1alpha1.NamespacesSelector, map[string]string{"name": "x"}), "shop", "a", ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := rabbit()
			b.Spec.AllowedNamespaces = tc.allowed
			got := ""
			if r := Access(b, tc.namespace, map[string]string{"name": tc.namespace}, []topology.Queue{{Name: tc.queue}}); r != nil {
				got = r.Reason
			}
			if got != tc.want {
				t.Errorf("reason %q, want %q", got, tc.want)
			}
		})
	}
}

func TestPatterns(t *testing.T) {
	for _, tc := range []struct {
		pattern, name string
		want          bool
	}{
		{"*", "", true}, {"*", "a", true}, {"a", "a", true}, {"a", "ab", false}, {"a*", "a", true}, {"*b", "ab", true}, {"*b", "ba", false},
		{"a*a", "a", false}, {"a*a", "aa", true}, {"a*b*c", "a-b-c", true}, {"a*b*c", "a-c-b", false}, {"**", "x", true}, {"a.*", "axb", false},
		{"*ab*ab", "ab", false}, {"*ab*ab", "abab", true},
	} {
		if got := matches(tc.pattern, tc.name); got != tc.want {
			t.Errorf("%q matches %q: %t, want %t", tc.pattern, tc.name, got, tc.want)
		}
	}
}

func TestOptionsAndBack(t *testing.T) {
	api := &v1alpha1.ConsumerOptions{
		Prefetch: ptr(int32(7)), MaxRetries: ptr(int32(0)), HandlerTimeout: &metav1.Duration{}, MaxMessageSize: ptr(resource.MustParse("1Mi")),
		DeferLimit: &v1alpha1.DeferLimit{MaxAge: &metav1.Duration{Duration: 36 * time.Hour}}, CrashLimit: ptr(int32(0)), ExactlyOnce: ptr(false),
		HandlerTimeoutOutcome: ptr(v1alpha1.TimeoutReject),
	}
	o, err := Options(api)
	if err != nil {
		t.Fatal(err)
	}
	e, err := config.Resolve(config.Traits{CrashLimitDefault: true}, config.Layer{Name: config.LayerConsumerGroup, Options: o})
	if err != nil {
		t.Fatal(err)
	}
	const own, def = v1alpha1.LayerConsumerGroup, v1alpha1.LayerDefault
	option := func(v string, l v1alpha1.OptionLayer) *v1alpha1.EffectiveOption {
		return &v1alpha1.EffectiveOption{Value: v, Layer: l}
	}
	want := &v1alpha1.EffectiveOptions{
		Prefetch: option("7", own), Concurrency: option("10", def), MaxRetries: option("0", own), MaxReconnectAttempts: option("unlimited", def),
		HandlerTimeout: option("0s", own), HandlerTimeoutOutcome: option("Reject", own), RetryStrategy: option("Republish", def),
		MaxMessageSize: option("1Mi", own), DrainTimeout: option("30s", def), DeferLimit: option("maxAge=36h", own), CrashLimit: option("0", own),
		ExactlyOnce: option("false", own),
	}
	if d := cmp.Diff(want, Effective(e, e.Prefetch)); d != "" {
		t.Errorf("effective (-want +got):\n%s", d)
	}
	for name, bad := range map[string]*v1alpha1.ConsumerOptions{
		"maxRetries":           {MaxRetries: ptr(int32(-1))},
		"crashLimit":           {CrashLimit: ptr(int32(-1))},
		"maxMessageSize":       {MaxMessageSize: ptr(resource.MustParse("500m"))},
		"deferLimit.maxDefers": {DeferLimit: &v1alpha1.DeferLimit{MaxDefers: ptr(int32(-1))}},
	} {
		if _, err := Options(bad); err == nil || !strings.HasPrefix(err.Error(), name) {
			t.Errorf("a bad %s: %v", name, err)
		}
	}
	if o, err := Options(nil); err != nil || o != (config.Options{}) {
		t.Errorf("no layer: %+v %v", o, err)
	}
}

func TestDurationsAreWrittenAsPeopleDo(t *testing.T) {
	for d, want := range map[time.Duration]string{0: "0s", 30 * time.Second: "30s", 90 * time.Second: "1m30s", 10 * time.Minute: "10m", 24 * time.Hour: "24h",
		time.Hour + time.Minute: "1h1m", time.Hour + time.Second: "1h0m1s", 250 * time.Millisecond: "250ms", 100 * time.Minute: "1h40m"} {
		if got := duration(d); got != want {
			t.Errorf("duration(%s) = %q, want %q", d, got, want)
		}
	}
}

// TestPlansDoNotDependOnOrder: the same objects in any order are the same file.
func TestPlansDoNotDependOnOrder(t *testing.T) {
	a, b := topo("shop", "a"), topo("shop", "b")
	a.Spec.Publishers = []v1alpha1.WorkloadReference{{Kind: v1alpha1.WorkloadDeployment, Name: "worker"}}
	w := world(rabbit(), a, b)
	own := consumer("own", "b", "app", 4)
	own.Spec.Credentials = &v1alpha1.CredentialsSource{SecretRef: v1alpha1.SecretReference{Name: "mine"}}
	groups := []*v1alpha1.ConsumerGroup{consumer("old", "a", "app", 5), own, consumer("again", "a", "app", 3), consumer("proxy", "b", "proxy", 2)}
	render := func() (string, map[string]string) {
		var cs []*Consumer
		for _, g := range groups {
			cs = append(cs, Assess(g, w))
		}
		p := NewPlan(TargetOf(groups[0]), []string{"app", "proxy"}, cs, []*Publisher{AssessPublisher(a, v1alpha1.WorkloadReference{Kind: v1alpha1.WorkloadDeployment, Name: "worker", Container: "app"}, w)})
		c, err := Config(p, OfflineFacts)
		if err != nil {
			t.Fatal(err)
		}
		out, err := config.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		refused := map[string]string{}
		for _, c := range cs {
			for _, f := range c.Findings {
				refused[c.Group.Name] = f.Reason
			}
		}
		return string(out), refused
	}
	want, refused := render()
	if d := cmp.Diff(map[string]string{"again": v1alpha1.ReasonTopologyConsumedByOther, "proxy": v1alpha1.ReasonWorkloadModeConflict}, refused); d != "" {
		t.Errorf("refused (-want +got):\n%s", d)
	}
	for range 50 {
		rand.Shuffle(len(groups), func(i, j int) { groups[i], groups[j] = groups[j], groups[i] })
		got, _ := render()
		if d := cmp.Diff(want, got); d != "" {
			t.Fatalf("another order, another file:\n%s", d)
		}
	}
}

func TestGenerationsFollowTheContent(t *testing.T) {
	generation := func(change func(*v1alpha1.Broker, *v1alpha1.Topology, *v1alpha1.ConsumerGroup)) string {
		b, o, g := rabbit(), topo("shop", "a"), consumer("g", "a", "app", 1)
		change(b, o, g)
		p := NewPlan(TargetOf(g), []string{"app"}, []*Consumer{Assess(g, world(b, o))}, nil)
		c, err := Config(p, OfflineFacts)
		if err != nil {
			t.Fatal(err)
		}
		return c.Generation
	}
	base := generation(func(*v1alpha1.Broker, *v1alpha1.Topology, *v1alpha1.ConsumerGroup) {})
	for name, change := range map[string]func(*v1alpha1.Broker, *v1alpha1.Topology, *v1alpha1.ConsumerGroup){
		"status": func(_ *v1alpha1.Broker, o *v1alpha1.Topology, _ *v1alpha1.ConsumerGroup) { o.Status.Queue = "a" },
		"management URL": func(b *v1alpha1.Broker, _ *v1alpha1.Topology, _ *v1alpha1.ConsumerGroup) {
			b.Spec.RabbitMQ.Management = nil
		},
		"scaling": func(_ *v1alpha1.Broker, _ *v1alpha1.Topology, g *v1alpha1.ConsumerGroup) {
			g.Spec.Replicas = &v1alpha1.ReplicaBounds{Max: 3}
		},
	} {
		if got := generation(change); got != base {
			t.Errorf("%s is none of the workload's business and changed its generation", name)
		}
	}
	for name, change := range map[string]func(*v1alpha1.Broker, *v1alpha1.Topology, *v1alpha1.ConsumerGroup){
		"paused": func(_ *v1alpha1.Broker, _ *v1alpha1.Topology, g *v1alpha1.ConsumerGroup) { g.Spec.Paused = true },
		"option": func(_ *v1alpha1.Broker, _ *v1alpha1.Topology, g *v1alpha1.ConsumerGroup) {
			g.Spec.Prefetch = ptr(int32(3))
		},
		"default": func(b *v1alpha1.Broker, _ *v1alpha1.Topology, _ *v1alpha1.ConsumerGroup) {
			b.Spec.ConsumerDefaults = &v1alpha1.ConsumerOptions{Prefetch: ptr(int32(3))}
		},
		"tier": func(_ *v1alpha1.Broker, o *v1alpha1.Topology, _ *v1alpha1.ConsumerGroup) { o.Spec.HoldQueues = nil },
	} {
		if generation(change) == base {
			t.Errorf("a changed %s kept the generation", name)
		}
	}
}

func TestObjectNamesNeverMeet(t *testing.T) {
	long := strings.Repeat("a", 250)
	seen := map[string]Target{}
	for _, name := range []string{"worker", "worker.deployment.shove", "worker-shove", long, long + "b"} {
		for _, kind := range []string{"Deployment", "StatefulSet", "ConsumerGroup"} {
			target := Target{Kind: kind, Namespace: "n", Name: name}
			got := target.ObjectName()
			if len(got) > 253 {
				t.Errorf("%s: %d characters", target, len(got))
			}
			if other, dup := seen[got]; dup {
				t.Errorf("%s and %s are both rendered to %q", target, other, got)
			}
			seen[got] = target
		}
	}
	if got := (Target{Kind: "ConsumerGroup", Name: "orders"}).ObjectName(); got != "orders-shove" {
		t.Errorf("a group is rendered to %q, want the fixed orders-shove", got)
	}
}

func TestSecretData(t *testing.T) {
	c := Connection{Prefix: "shop.rabbit."}
	keys := func(m map[string][]byte) []string {
		var out []string
		for k := range m {
			out = append(out, k)
		}
		slices.Sort(out)
		return out
	}
	credentials := map[string][]byte{"username": []byte("u"), "password": []byte("p"), "other": []byte("stays")}
	ca, pair := map[string][]byte{"ca.crt": []byte("c"), "ca.key": []byte("stays")}, map[string][]byte{"tls.crt": []byte("b"), "tls.key": []byte("b")}
	data, facts := SecretData(c, credentials, ca, pair)
	want := []string{"shop.rabbit.ca.crt", "shop.rabbit.password", "shop.rabbit.tls.crt", "shop.rabbit.tls.key", "shop.rabbit.username"}
	if d := cmp.Diff(want, keys(data)); d != "" || !facts.ClientCert {
		t.Errorf("keys (-want +got), %+v:\n%s", facts, d)
	}
	credentials["tls.crt"], credentials["tls.key"] = []byte("own"), []byte("own")
	if data, _ = SecretData(c, credentials, ca, pair); string(data["shop.rabbit.tls.key"]) != "own" {
		t.Error("the certificate in the credentials does not win")
	}
	delete(credentials, "tls.key")
	if data, facts = SecretData(c, credentials, nil, nil); facts.ClientCert || data["shop.rabbit.tls.crt"] != nil {
		t.Error("a certificate without its key was taken")
	}
}

// TestPatchGolden shows what is applied to a workload.
func TestPatchGolden(t *testing.T) {
	for name, in := range map[string]Injection{
		"library": {Target: Target{Kind: "Deployment", Namespace: "shop", Name: "worker"}, UID: "u", ObjectName: "worker.deployment.shove", Container: "app", GraceSeconds: ptr(int64(35))},
		"sidecar": {Target: Target{Kind: "StatefulSet", Namespace: "shop", Name: "worker"}, UID: "u", ObjectName: "worker.statefulset.shove",
			Agent: &Agent{Image: "shove-agent:1", Resources: &v1alpha1.SidecarResources{Limits: map[string]resource.Quantity{"memory": resource.MustParse("128Mi")}}}},
	} {
		t.Run(name, func(t *testing.T) {
			patch, err := in.Patch()
			if err != nil {
				t.Fatal(err)
			}
			j, err := json.Marshal(patch)
			if err != nil {
				t.Fatal(err)
			}
			got, err := yaml.JSONToYAML(j)
			if err != nil {
				t.Fatal(err)
			}
			golden := filepath.Join("testdata", "patch-"+name+".yaml")
			if *update {
				if err := os.WriteFile(golden, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(string(want), string(got)); d != "" {
				t.Errorf("patch (-golden +got), write it with -update:\n%s", d)
			}
			again, err := in.Patch()
			if err != nil {
				t.Fatal(err)
			}
			if same, err := SamePatch(patch, again); err != nil || !same {
				t.Errorf("a patch differs from itself: %v", err)
			}
		})
	}
	if _, err := (Injection{Target: Target{Kind: "DaemonSet"}}).Patch(); err == nil {
		t.Error("a DaemonSet was patched")
	}
}

func TestGraceNeeded(t *testing.T) {
	w := world(rabbit(), topo("shop", "a"), topo("shop", "b"))
	plan := func(drains ...time.Duration) *Plan {
		p := &Plan{}
		for i, d := range drains {
			g := consumer(fmt.Sprint(i), "a", "app", 0)
			g.Spec.DrainTimeout = &metav1.Duration{Duration: d}
			p.Consumers = append(p.Consumers, Assess(g, w))
		}
		return p
	}
	for want, p := range map[int64]*Plan{0: plan(), 5: plan(0), 35: plan(30 * time.Second), 66: plan(time.Second, 60*time.Second+time.Millisecond)} {
		if got := GraceNeeded(p); got != want {
			t.Errorf("grace %d, want %d", got, want)
		}
	}
}

// What is held in a tier that left the spec: consumers that read hold queues themselves are told of it, others need not.
func TestRetiredTiersOfReaders(t *testing.T) {
	topo := &v1alpha1.Topology{ObjectMeta: metav1.ObjectMeta{Name: "orders"}}
	topo.Status.Queues = []v1alpha1.QueueStatus{
		{Name: "orders-hold-5s", Role: v1alpha1.QueueRoleHold, Delay: &metav1.Duration{Duration: 5 * time.Second}},
		{Name: "orders-hold-9s", Role: v1alpha1.QueueRoleRetired, Delay: &metav1.Duration{Duration: 9 * time.Second}},
	}
	for reads, want := range map[bool][]config.Hold{true: {{Queue: "orders-hold-9s", Delay: config.Duration(9 * time.Second)}}, false: nil} {
		l := Link{Topology: topo, Driver: broker.Driver{Capabilities: func(json.RawMessage) broker.Capabilities { return broker.Capabilities{ReadsHolds: reads} }}}
		if d := cmp.Diff(want, topologyEntry(&Plan{}, l, Credentials{}).RetiredHoldQueues); d != "" {
			t.Errorf("ReadsHolds %v: %s", reads, d)
		}
	}
}
