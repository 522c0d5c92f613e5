package kafka

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"go.uber.org/goleak"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/brokertest"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/kafkaserver"
)

func TestMain(m *testing.M) {
	if text := os.Getenv(childVar); text != "" {
		childMain(text)
		os.Exit(0)
	}
	testenv.Main(m)
}

// Two partitions, so that two consumers share them and each has one.
var twoPartitions = json.RawMessage(`{"partitions": 2}`)

func TestConformance(t *testing.T) {
	for name, open := range map[string]func(*testing.T) brokertest.Instance{"real": openReal, "kfake": openFake} {
		t.Run(name, func(t *testing.T) {
			brokertest.Run(t, brokertest.Backend{
				Open:         open,
				Capabilities: Driver.Capabilities,
				Variants:     []brokertest.Variant{{Options: twoPartitions}},
				Patience:     time.Minute,
				// The last one is longer than it may take on a busy machine until a consumer knows that it is cut off.
				Tiers: []time.Duration{50 * time.Millisecond, 300 * time.Millisecond, 2 * time.Second},
				// An external topology declares no topics, so that it takes no options of theirs.
				ExternalOptions: json.RawMessage(`{}`),
				Goroutines:      []goleak.Option{goleak.IgnoreAnyFunction("github.com/twmb/franz-go/pkg/kfake.(*clientConn).write"), goleak.IgnoreAnyFunction("github.com/twmb/franz-go/pkg/kfake.(*clientConn).read")},
			})
		})
	}
}

func instance(t *testing.T, servers ...string) (brokertest.Instance, *network) {
	t.Helper()
	r := newRaw(t, servers...)
	n := r.network
	return brokertest.Instance{
		Driver: n.mode().driver(),
		Client: broker.Config{Endpoint: endpointOf(t, servers...)},
		Admin:  broker.Config{Endpoint: endpointOf(t, servers...)},
		Raw:    r,
		Shared: n.shared,
		Faults: brokertest.Faults{
			Cut:          func(testing.TB) { n.cut() },
			Block:        func(testing.TB) func() { return n.block() },
			HoldConfirms: func(testing.TB) func() { return n.holdConfirms() },
			CutAt:        func(_ testing.TB, at brokertest.Step) func() { return n.arm(at) },
		},
	}, n
}

func restarts(t *testing.T) bool { return strings.HasSuffix(t.Name(), "restarts_under_load") }

// openReal shares a server, but for the test that restarts it.
func openReal(t *testing.T) brokertest.Instance {
	if !restarts(t) {
		in, _ := instance(t, testenv.Kafka(t).Servers...)
		return in
	}
	srv := testenv.StartKafka(t, kafkaserver.Options{})
	in, _ := instance(t, srv.Addr(kafkaserver.Plain))
	in.Faults.Restart = func(t testing.TB) {
		t.Helper()
		must(t, srv.Kill())
		must(t, srv.Restart(t.Context()))
	}
	return in
}

// openFake starts a cluster in this process for one subtest.
func openFake(t *testing.T) brokertest.Instance {
	dir := t.TempDir()
	cluster := startFake(t, dir)
	in, n := instance(t, cluster.ListenAddrs()...)
	if restarts(t) {
		in.Faults.Restart = func(t testing.TB) {
			t.Helper()
			addrs := cluster.ListenAddrs()
			cluster.Close()
			cluster = startFake(t, dir, addrs...)
			n.cut() // else nobody notices: it was away for some milliseconds, and still knows the members of its groups
		}
	}
	return in
}

func startFake(t testing.TB, dir string, addrs ...string) *kfake.Cluster {
	t.Helper()
	opts := []kfake.Opt{kfake.NumBrokers(1), kfake.GroupMinSessionTimeout(100 * time.Millisecond), kfake.DataDir(dir)}
	if len(addrs) > 0 {
		opts = append(opts, kfake.Ports(portsOf(t, addrs)...))
	}
	c, err := kfake.NewCluster(opts...)
	must(t, err)
	t.Cleanup(c.Close)
	return c
}
