package kafka

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/topology"
)

// desk is what a test of the operator's side has at hand, on the real broker.
type desk struct {
	t     *testing.T
	raw   *raw
	admin broker.Admin
	queue string
}

func newDesk(t *testing.T) *desk {
	t.Helper()
	srv := testenv.Kafka(t)
	d := &desk{t: t, raw: newRaw(t, srv.Servers...), admin: openTestAdmin(t, broker.Config{Endpoint: endpointOf(t, srv.Servers...)}), queue: srv.Name("orders")}
	t.Cleanup(func() { d.cleanUp() })
	return d
}

func openTestAdmin(t *testing.T, cfg broker.Config) broker.Admin {
	t.Helper()
	a, err := Driver.OpenAdmin(t.Context(), cfg)
	must(t, err)
	t.Cleanup(func() { must(t, a.Close(context.Background())) })
	return a
}

// cleanUp deletes what the test made.
func (d *desk) cleanUp() {
	ctx, cancel := short()
	defer cancel()
	all, err := d.raw.admin.ListTopics(ctx)
	must(d.t, err)
	names := slices.DeleteFunc(all.Names(), func(n string) bool { return !strings.HasPrefix(n, d.queue) })
	if len(names) > 0 {
		_, err = d.raw.admin.DeleteTopics(ctx, names...)
		must(d.t, err)
	}
}

// decl derives a declaration of the desk's queue with tiers of 5 and 30 s and a dead-letter queue.
func (d *desk) decl(options string, change ...func(*topology.Spec)) broker.Declaration {
	d.t.Helper()
	s := topology.Spec{Queue: d.queue, Holds: []time.Duration{5 * time.Second, 30 * time.Second}, DeadLetter: true}
	for _, c := range change {
		c(&s)
	}
	topo, err := topology.Derive(s)
	must(d.t, err)
	out := broker.Declaration{Topology: topo}
	if options != "" {
		out.Options = []byte(options)
	}
	return out
}

func (d *desk) declare(decl broker.Declaration) {
	d.t.Helper()
	must(d.t, d.admin.Declare(d.t.Context(), decl))
}

func (d *desk) observe(decl broker.Declaration) broker.Observation {
	d.t.Helper()
	out, err := d.admin.Observe(d.t.Context(), []broker.Declaration{decl})
	must(d.t, err)
	return out[0]
}

// topic is how a topic stands, read by the plain library.
func (d *desk) topic(name string) (partitions int, config map[string]string) {
	d.t.Helper()
	ctx, cancel := short()
	defer cancel()
	m, err := d.raw.admin.Metadata(ctx, name)
	must(d.t, err)
	if m.Topics[name].Err != nil {
		return 0, nil
	}
	all, err := d.raw.admin.DescribeTopicConfigs(ctx, name)
	must(d.t, err)
	config = map[string]string{}
	for _, c := range all[0].Configs {
		config[c.Key] = c.MaybeValue()
	}
	return len(m.Topics[name].Partitions), config
}

// foreign makes a topic as somebody else does.
func (d *desk) foreign(name string, partitions int32, config map[string]string) {
	d.t.Helper()
	ctx, cancel := short()
	defer cancel()
	ptrs := map[string]*string{}
	for k, v := range config {
		ptrs[k] = &v
	}
	_, err := d.raw.admin.CreateTopic(ctx, partitions, 1, ptrs, name)
	must(d.t, err)
	testenv.Eventually(d.t, bound, func() error { // the controller knows it before the broker does
		if n, _ := d.topic(name); n != int(partitions) {
			return fmt.Errorf("topic %q has %d partitions", name, n)
		}
		return nil
	})
}

func (d *desk) alter(name, key, value string) {
	d.t.Helper()
	ctx, cancel := short()
	defer cancel()
	resp, err := d.raw.admin.AlterTopicConfigs(ctx, []kadm.AlterConfig{{Op: kadm.SetConfig, Name: key, Value: &value}}, name)
	must(d.t, err)
	must(d.t, resp[0].Err)
	testenv.Eventually(d.t, bound, func() error { // the controller knows it before the broker does
		if _, c := d.topic(name); c[key] != value {
			return fmt.Errorf("%s of topic %q is %s", key, name, c[key])
		}
		return nil
	})
}

func (d *desk) depth(name string) broker.Depth {
	d.t.Helper()
	ds, err := d.admin.Depths(d.t.Context(), []string{name})
	must(d.t, err)
	return ds[0]
}

func TestDeclareMakesTopics(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	decl := d.decl(`{"partitions": 3, "replicationFactor": 1, "config": {"retention.ms": "86400000", "min.insync.replicas": "1"}}`)
	for _, o := range d.observe(decl).Objects {
		if !o.Missing {
			t.Errorf("%s is there before it is declared", o.Name)
		}
	}
	for range 2 {
		d.declare(decl)
	}
	after := d.observe(decl)
	if !after.UpToDate() || !after.DriftKnown || len(after.Warnings) > 0 {
		t.Errorf("after declaring: %+v", after)
	}
	objects, err := Driver.Objects(decl)
	must(t, err)
	var got []broker.Object
	for _, o := range after.Objects {
		got = append(got, o.Object)
	}
	if diff := cmp.Diff(objects, got); diff != "" {
		t.Errorf("observed objects differ from Objects (-want +got):\n%s", diff)
	}
	type made struct {
		Partitions                                    int
		Retention, RetainSize, Stamp, Cleanup, MinISR string
	}
	week := 7 * 24 * time.Hour
	ms := func(d time.Duration) string { return fmt.Sprint(d.Milliseconds()) }
	want := map[string]made{
		d.queue:               {3, "86400000", "-1", logAppendTime, "delete", "1"},
		d.queue + "-hold-5s":  {3, ms(week + 5*time.Second), "-1", logAppendTime, "delete", "1"},
		d.queue + "-hold-30s": {3, ms(week + 30*time.Second), "-1", logAppendTime, "delete", "1"},
		d.queue + "-dlq":      {1, "-1", "-1", logAppendTime, "delete", "1"},
	}
	have := map[string]made{}
	for name := range want {
		n, c := d.topic(name)
		have[name] = made{n, c[configRetention], c[configRetainSize], c[configTimestamp], c[configCleanup], c[configMinISR]}
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("topics (-want +got):\n%s", diff)
	}
}

func TestRepairsOnlyWhatIsAskedFor(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	decl := d.decl(`{"partitions": 2, "config": {"retention.ms": "86400000"}}`)
	d.declare(decl)
	// What nobody asked for is somebody else's.
	d.alter(d.queue, "segment.ms", "3600000")
	d.alter(d.queue, configTimestamp, "CreateTime")
	d.alter(d.queue+"-dlq", configRetention, "1000000")
	d.alter(d.queue+"-hold-5s", configRetention, forever)
	if o := d.observe(decl); !o.UpToDate() {
		t.Errorf("settings that are not in the spec are taken for drift: %+v", o)
	}
	d.alter(d.queue, configRetention, "3600000")
	d.alter(d.queue+"-hold-5s", configRetention, "3600000")
	d.alter(d.queue+"-hold-30s", configTimestamp, "CreateTime")
	d.alter(d.queue+"-hold-30s", configCleanup, "compact")
	var diffs []string
	for _, o := range d.observe(decl).Objects {
		for _, f := range o.Diffs {
			if !f.Repairable {
				t.Errorf("%s %s cannot be repaired", o.Name, f.Property)
			}
			diffs = append(diffs, strings.TrimPrefix(o.Name, d.queue)+" "+f.Property)
		}
	}
	want := []string{" retention.ms", "-hold-5s retention.ms", "-hold-30s cleanup.policy", "-hold-30s message.timestamp.type"}
	if diff := cmp.Diff(want, diffs); diff != "" {
		t.Errorf("drift (-want +got):\n%s", diff)
	}
	d.declare(decl)
	if o := d.observe(decl); !o.UpToDate() {
		t.Errorf("after the repair: %+v", o)
	}
	if _, c := d.topic(d.queue); c["segment.ms"] != "3600000" || c[configTimestamp] != "CreateTime" {
		t.Errorf("the repair touched what is not in the spec: %v", c)
	}
}

func TestPartitionsGrowAndNeverShrink(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	d.declare(d.decl(`{"partitions": 2}`))
	larger := d.decl(`{"partitions": 4}`)
	if o := d.observe(larger); o.UpToDate() || !o.Objects[1].Diffs[0].Repairable {
		t.Errorf("growth is not seen: %+v", o)
	}
	d.declare(larger)
	if o := d.observe(larger); !o.UpToDate() {
		t.Errorf("after growing: %+v", o)
	}
	for _, name := range []string{d.queue, d.queue + "-hold-5s", d.queue + "-hold-30s"} {
		if n, _ := d.topic(name); n != 4 {
			t.Errorf("%s has %d partitions, want 4", name, n)
		}
	}
	smaller := d.decl(`{"partitions": 3}`)
	err := d.admin.Declare(t.Context(), smaller)
	conflict, ok := errors.AsType[*broker.ConflictError](err)
	if !ok || conflict.Diff.Property != "partitions" || conflict.Diff.Have != "4" || conflict.Diff.Want != "3" || !strings.Contains(conflict.Diff.Remedy, "kafka.partitions: 4") {
		t.Errorf("shrinking: %v", err)
	}
	if o := d.observe(d.decl("")); !o.UpToDate() {
		t.Errorf("partitions that the spec does not name are drift: %+v", o)
	}
}

func TestReplicationFactor(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	err := d.admin.Declare(t.Context(), d.decl(`{"replicationFactor": 3}`))
	if err == nil || errors.Is(err, broker.ErrUnavailable) || errors.Is(err, broker.ErrUnsupported) || !strings.Contains(err.Error(), "INVALID_REPLICATION_FACTOR") {
		t.Errorf("more replicas than brokers: %v", err)
	}
	d.declare(d.decl(""))
	conflict, ok := errors.AsType[*broker.ConflictError](d.admin.Declare(t.Context(), d.decl(`{"replicationFactor": 3}`)))
	if !ok || conflict.Diff.Have != "1" || !strings.Contains(conflict.Diff.Remedy, "kafka-reassign-partitions") {
		t.Errorf("another number of replicas: %v", conflict)
	}
}

func TestAdoptsTopics(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	d.foreign(d.queue, 5, map[string]string{"segment.bytes": "2097152"})
	decl := d.decl("")
	d.declare(decl)
	if n, c := d.topic(d.queue); n != 5 || c["segment.bytes"] != "2097152" {
		t.Errorf("the adopted topic has %d partitions and %v", n, c)
	}
	if n, _ := d.topic(d.queue + "-hold-5s"); n != defaultPartitions {
		t.Errorf("the hold topic has %d partitions", n)
	}
	d.foreign(d.queue+".wide", 12, nil)
	d.declare(d.decl("", func(s *topology.Spec) { s.Queue = d.queue + ".wide" }))
	if n, _ := d.topic(d.queue + ".wide-hold-5s"); n != 12 {
		t.Errorf("the hold topic beside an adopted one of 12 partitions has %d", n)
	}
}

func TestRefusedSettings(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	for name, tc := range map[string]struct{ options, says string }{
		"unknown setting":    {`{"config": {"retention.weeks": "1"}}`, "retention.weeks"},
		"value out of range": {`{"config": {"min.insync.replicas": "0"}}`, "min.insync.replicas"},
		"value of no number": {`{"config": {"segment.ms": "soon"}}`, "segment.ms"},
		"policy":             {`{"config": {"cleanup.policy": "burn"}}`, "cleanup.policy"},
	} {
		err := d.admin.Declare(t.Context(), d.decl(tc.options))
		if !errors.Is(err, broker.ErrUnsupported) || !strings.Contains(err.Error(), tc.says) || !strings.Contains(err.Error(), d.queue) {
			t.Errorf("%s when it is made: %v", name, err)
		}
	}
	d.declare(d.decl(""))
	for _, options := range []string{`{"config": {"retention.weeks": "1"}}`, `{"config": {"min.insync.replicas": "0"}}`} {
		if err := d.admin.Declare(t.Context(), d.decl(options)); !errors.Is(err, broker.ErrUnsupported) || !strings.Contains(err.Error(), "INVALID_CONFIG") {
			t.Errorf("%s on a topic that exists: %v", options, err)
		}
	}
	// Kafka's metrics take a dot for an underscore.
	d.foreign(d.queue+"_x", 1, nil)
	err := d.admin.Declare(t.Context(), d.decl("", func(s *topology.Spec) { s.Queue = d.queue + ".x" }))
	if !errors.Is(err, broker.ErrUnsupported) || !strings.Contains(err.Error(), "collides") {
		t.Errorf("a name that collides: %v", err)
	}
}

func TestDangerousSettingsAreWarnings(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	decl := d.decl(`{"config": {"cleanup.policy": "compact"}}`)
	d.declare(decl)
	o := d.observe(decl)
	if !o.UpToDate() || len(o.Warnings) != 1 || !strings.Contains(o.Warnings[0], "only the last is kept") {
		t.Errorf("got %+v", o)
	}
}

func TestExternalAndSource(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	external := d.decl("", func(s *topology.Spec) { s.External = true })
	err := d.admin.Declare(t.Context(), external)
	if !errors.Is(err, broker.ErrNotFound) || !strings.Contains(err.Error(), d.queue) {
		t.Errorf("external and missing: %v", err)
	}
	sourced := d.decl(`{"partitions": 2}`, func(s *topology.Spec) { s.Queue, s.Source = d.queue+".audit", d.queue })
	if err := d.admin.Declare(t.Context(), sourced); !errors.Is(err, broker.ErrNotFound) {
		t.Errorf("source missing: %v", err)
	}
	// The broker would make a topic for whoever asks in the wrong way.
	if n, _ := d.topic(d.queue); n != 0 {
		t.Fatal("looking for a topic made it")
	}
	d.foreign(d.queue, 1, nil)
	d.declare(external)
	d.declare(sourced)
	for _, decl := range []broker.Declaration{external, sourced} {
		if o := d.observe(decl); !o.UpToDate() {
			t.Errorf("after declaring: %+v", o)
		}
	}
	ctx, cancel := short()
	defer cancel()
	all, err := d.raw.admin.ListTopics(ctx)
	must(t, err)
	names := slices.DeleteFunc(all.Names(), func(n string) bool { return !strings.HasPrefix(n, d.queue) })
	want := []string{d.queue, d.queue + "-dlq", d.queue + ".audit", d.queue + ".audit-dlq", d.queue + ".audit-hold-30s", d.queue + ".audit-hold-5s"}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("topics (-want +got):\n%s", diff)
	}
	if n, _ := d.topic(d.queue); n != 1 {
		t.Error("the source was changed")
	}
}

func TestDelete(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	decl := d.decl(`{"partitions": 2}`)
	d.declare(decl)
	d.produce(d.queue, 5)
	d.commit(d.queue, d.queue, map[int32]kadm.Offset{0: {At: 2, LeaderEpoch: -1}})
	names := []string{d.queue + "-hold-5s", d.queue, d.queue + ".absent"}
	got, err := d.admin.Delete(t.Context(), names)
	must(t, err)
	want := []broker.Deleted{{Queue: names[0], Messages: broker.Known(0)}, {Queue: names[1], Messages: broker.Known(3)}, {Queue: names[2], Messages: broker.Known(0)}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("deleted (-want +got):\n%s", diff)
	}
	if o := d.observe(decl); !o.Objects[1].Missing || o.Objects[0].Missing {
		t.Errorf("after deleting: %+v", o)
	}
	d.declare(decl)
	if o := d.observe(decl); !o.UpToDate() {
		t.Errorf("declared anew: %+v", o)
	}
	// Positions went with the topic: nothing of the new one is taken for handled.
	d.produce(d.queue, 1)
	if n := d.depth(d.queue); n.Ready != broker.Known(1) {
		t.Errorf("after making it anew: %+v", n)
	}
}

// produce writes n records to partition 0.
func (d *desk) produce(topic string, n int, opts ...kgo.Opt) {
	d.t.Helper()
	ctx, cancel := short()
	defer cancel()
	c, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(d.raw.servers...), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerLinger(0)}, opts...)...)
	must(d.t, err)
	defer c.Close()
	transactional := len(opts) > 0
	if transactional {
		must(d.t, c.BeginTransaction())
	}
	for range n {
		must(d.t, c.ProduceSync(ctx, &kgo.Record{Topic: topic, Value: []byte("m")}).FirstErr())
	}
	if transactional {
		must(d.t, c.EndTransaction(ctx, kgo.TryCommit))
	}
}

func (d *desk) commit(group, topic string, at map[int32]kadm.Offset) {
	d.t.Helper()
	ctx, cancel := short()
	defer cancel()
	all := kadm.Offsets{}
	for p, o := range at {
		o.Topic, o.Partition = topic, p
		all.Add(o)
	}
	must(d.t, d.raw.admin.CommitAllOffsets(ctx, group, all))
}
