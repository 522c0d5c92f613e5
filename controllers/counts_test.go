package controllers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/topology"
)

func TestMoved(t *testing.T) {
	k, unknown := broker.Known, broker.Count{}
	for name, tc := range map[string]struct {
		from, to broker.Count
		want     bool
	}{
		"same":              {k(5), k(5), false},
		"from zero":         {k(0), k(1), true},
		"to zero":           {k(1000), k(0), true},
		"a tenth up":        {k(100), k(110), false},
		"more than a tenth": {k(100), k(111), true},
		"a tenth down":      {k(100), k(90), false},
		"more down":         {k(100), k(89), true},
		"small numbers":     {k(3), k(4), true},
		"becomes unknown":   {k(3), unknown, true},
		"becomes known":     {unknown, k(0), true},
		"stays unknown":     {unknown, unknown, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := moved(tc.from, tc.to); got != tc.want {
				t.Errorf("got %v", got)
			}
		})
	}
}

func TestCountsOf(t *testing.T) {
	queues := []trackedQueue{{"q", topology.RoleMain}, {"h1", topology.RoleHold}, {"h2", topology.RoleRetired}, {"d", topology.RoleDeadLetter}, {"state", topology.RoleState}}
	k := broker.Known
	depths := map[string]broker.Depth{
		"q": {Ready: k(5), InFlight: k(2)}, "h1": {Ready: k(3), Stuck: k(1)}, "h2": {Ready: k(4)}, "d": {Ready: k(1)}, "state": {Ready: k(99)},
	}
	want := counts{ready: k(5), inFlight: k(2), held: k(7), dead: k(1), stuck: true}
	if got := countsOf(queues, depths); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	delete(depths, "h2")
	want.held = broker.Count{}
	if got := countsOf(queues, depths); got != want {
		t.Errorf("a part is unknown: got %+v, want %+v", got, want)
	}
}

func TestCounts_AtTheirPace(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	b := s.connected("rabbit")
	topo := s.declared(orders("orders", "rabbit"))
	told := s.told()
	observer := s.deps.pool.entry(b.UID).observer
	// counted makes a count after d and says whether the Topology is to be looked at.
	counted := func(d time.Duration, change func()) bool {
		t.Helper()
		f.change(change)
		s.clock.Step(d)
		observer.countAll(t.Context())
		return len(told()) > 0
	}
	if counted(countInterval, func() { f.queues["orders"].ready = 100 }) {
		t.Error("a second write within 30 s")
	}
	if !counted(countInterval, func() {}) {
		t.Fatal("the count crossed zero 30 s ago, and nothing happens")
	}
	s.topology(topo)
	if got := *topo.Status.Counts.Ready; got != 100 || *topo.Status.Queues[1].Ready != 100 {
		t.Errorf("%d messages in the status, %+v", got, topo.Status.Queues)
	}
	writes := s.writes.count()
	if counted(time.Minute, func() { f.queues["orders"].ready = 110 }) {
		t.Error("a tenth more is worth a write")
	}
	if s.topology(topo); s.writes.count() != writes {
		t.Error("a pass for another reason wrote counts that hardly moved")
	}
	if !counted(time.Minute, func() { f.queues["orders"].ready = 120 }) {
		t.Error("a fifth more is not worth a write")
	}
	s.topology(topo)
	if s.writes.count() != writes+1 || *topo.Status.Counts.Ready != 120 {
		t.Errorf("%d writes, %d messages", s.writes.count()-writes, *topo.Status.Counts.Ready)
	}
	at := topo.Status.CountsObservedAt
	if s.topology(topo); !topo.Status.CountsObservedAt.Equal(at) {
		t.Error("the time of the counts moves without them")
	}
	for _, c := range topo.Status.Conditions {
		if strings.Contains(c.Message, "120") {
			t.Errorf("condition %s holds a counter: %s", c.Type, c.Message)
		}
	}
}

func TestCounts_StuckMessages(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	b := s.connected("rabbit")
	topo := s.declared(orders("orders", "rabbit"))
	told := s.told()
	observer := s.deps.pool.entry(b.UID).observer
	for _, stuck := range []int64{3, 0} {
		f.change(func() { f.queues["orders-hold-5s"].stuck = stuck })
		s.clock.Step(time.Minute)
		observer.countAll(t.Context())
		if got := told(); len(got) != 1 {
			t.Fatalf("%d stuck: %v are looked at", stuck, got)
		}
		s.topology(topo)
		got := condition(topo, v1alpha1.ConditionHeldMessagesStuck)
		if (got.Type != "") != (stuck > 0) || stuck > 0 && !strings.Contains(got.Message, `"orders-hold-5s"`) {
			t.Errorf("%d stuck: %+v", stuck, got)
		}
		s.clock.Step(time.Minute)
		observer.countAll(t.Context())
		if got := told(); len(got) != 0 {
			t.Errorf("%d stuck is known, and %v are looked at again", stuck, got)
		}
	}
}

func TestMetrics_DepthsAreLive(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	b := s.connected("rabbit")
	topo := s.declared(withPolicy("orders", v1alpha1.DeletionDelete))
	observer := s.deps.pool.entry(b.UID).observer
	f.change(func() { f.queues["orders"].ready, f.queues["orders"].inFlight = 12, 3 })
	observer.countAll(t.Context())
	collector := newDepthCollector(s.deps.pool)
	want := `
# HELP shove_queue_inflight Messages of a queue that consumers have received and not settled. Without a series: unknown.
# TYPE shove_queue_inflight gauge
shove_queue_inflight{namespace="NS",queue="orders",role="Main",topic="orders"} 3
shove_queue_inflight{namespace="NS",queue="orders-dlq",role="DeadLetter",topic="orders"} 0
shove_queue_inflight{namespace="NS",queue="orders-hold-30s",role="Hold",topic="orders"} 0
shove_queue_inflight{namespace="NS",queue="orders-hold-5s",role="Hold",topic="orders"} 0
`
	if err := testutil.CollectAndCompare(collector, strings.NewReader(strings.ReplaceAll(want, "NS", s.ns)), "shove_queue_inflight"); err != nil {
		t.Error(err)
	}
	f.change(func() { f.blind = true })
	observer.countAll(t.Context())
	if n := testutil.CollectAndCount(collector, "shove_queue_inflight"); n != 0 {
		t.Errorf("unknown has %d series", n)
	}
	if n := testutil.CollectAndCount(collector, "shove_queue_backlog"); n != 4 {
		t.Errorf("%d series of the backlog", n)
	}
	f.breaks("Depths", broker.ErrUnauthorized)
	observer.countAll(t.Context())
	if n := testutil.CollectAndCount(collector); n != 0 {
		t.Errorf("what cannot be counted has %d series", n)
	}
	f.breaks("Depths", nil)
	s.delete(topo)
	s.topology(topo)
	observer.countAll(t.Context())
	if n := testutil.CollectAndCount(collector); n != 0 {
		t.Errorf("a Topology that is gone has %d series", n)
	}
}

func TestFingerprint(t *testing.T) {
	obj := func(name string, missing bool, diffs ...broker.Diff) broker.ObservedObject {
		return broker.ObservedObject{Object: broker.Object{Kind: "queue", Name: name}, Missing: missing, Diffs: diffs}
	}
	clean := broker.Observation{Objects: []broker.ObservedObject{obj("a", false), {Object: broker.Object{Role: topology.RoleRetired}, Missing: true}}}
	if got := fingerprint(clean); got != "" {
		t.Errorf("all is well, and the fingerprint is %q", got)
	}
	seen := map[string]bool{}
	for _, o := range []broker.Observation{
		{Objects: []broker.ObservedObject{obj("a", true)}},
		{Objects: []broker.ObservedObject{obj("b", true)}},
		{Objects: []broker.ObservedObject{obj("a", false, broker.Diff{Property: "ttl", Want: "1", Have: "2"})}},
		{Objects: []broker.ObservedObject{obj("a", false, broker.Diff{Property: "ttl", Want: "1", Have: "3"})}},
		{Warnings: []string{"policy"}},
	} {
		seen[fingerprint(o)] = true
	}
	if diff := cmp.Diff(5, len(seen)); diff != "" {
		t.Errorf("different findings look alike: %v", seen)
	}
}

func TestObserver_ReadsAtIntervals(t *testing.T) {
	f := newFakeServer("cluster-a")
	s := step(t, f.driver())
	s.deps.pool.byHand = false
	b := s.connected("rabbit")
	s.declared(orders("orders", "rabbit"))
	told := s.told()
	observes, depths := f.count("Observe"), f.count("Depths")
	advance := func(d time.Duration) {
		testenv.Eventually(t, patience, func() error {
			if s.clock.Waiters() < 2 {
				return errors.New("the observer does not wait for its timers")
			}
			return nil
		})
		s.clock.Step(d)
	}
	advance(countInterval)
	testenv.Eventually(t, patience, func() error {
		if got := f.count("Depths") - depths; got != 1 {
			return fmt.Errorf("%d counts after %s", got, countInterval)
		}
		return nil
	})
	f.change(func() { delete(f.queues, "orders") })
	advance(defaultResync + defaultResync/5)
	testenv.Eventually(t, patience, func() error {
		if got := f.count("Observe") - observes; got != 1 {
			return fmt.Errorf("%d looks after the resync interval", got)
		}
		if got := told(); len(got) != 1 {
			return fmt.Errorf("%v are told", got)
		}
		return nil
	})
	// A shorter interval counts from the change on.
	s.edit(b, func() { b.Spec.ResyncInterval = &metav1.Duration{Duration: 20 * time.Second} })
	s.broker(b)
	advance(30 * time.Second)
	testenv.Eventually(t, patience, func() error {
		if got := f.count("Observe") - observes; got != 2 {
			return fmt.Errorf("%d looks", got)
		}
		return nil
	})
}

func TestObserver_JoinsReads(t *testing.T) {
	f := newFakeServer("cluster-a")
	f.latency = 20 * time.Millisecond
	s := step(t, f.driver())
	b := s.connected("rabbit")
	observer := s.deps.pool.entry(b.UID).observer
	const readers = 200
	var work errgroup.Group
	for i := range readers {
		work.Go(func() error {
			topo := orders(fmt.Sprintf("t-%d", i), "rabbit")
			d, err := render.Declaration(topo, topology.RabbitMQ)
			if err != nil {
				return err
			}
			o, err := observer.observe(t.Context(), d)
			if err == nil && o.Objects[1].Name != topo.Name {
				return fmt.Errorf("asked for %q, got %q", topo.Name, o.Objects[1].Name)
			}
			return err
		})
	}
	if err := work.Wait(); err != nil {
		t.Fatal(err)
	}
	if n := f.count("Observe"); n > 10 {
		t.Errorf("%d calls for %d reads at once", n, readers)
	}
	// What is wrong with one is not wrong with the others.
	f.latency = 0
	for i := range 3 {
		work.Go(func() error {
			d, err := render.Declaration(orders(fmt.Sprintf("t-%d", i), "rabbit"), topology.RabbitMQ)
			if err != nil {
				return err
			}
			if i == 1 {
				d.Topology.Sequenced = &topology.Sequenced{} // which the fake refuses
			}
			if _, err = observer.observe(t.Context(), d); (err != nil) != (i == 1) {
				return fmt.Errorf("declaration %d: %v", i, err)
			}
			return nil
		})
	}
	if err := work.Wait(); err != nil {
		t.Error(err)
	}
	// A caller that gives up does not fail the others.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := observer.observe(ctx, broker.Declaration{}); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled read ends with %v", err)
	}
}

// docs/metrics.md has a row for each of the operator's metrics, with its labels.
func TestMetrics_AreDocumented(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(testenv.RepositoryRoot(t), "docs", "metrics.md"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := newOperatorMetrics(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	descriptions := make(chan *prometheus.Desc, 100)
	for _, c := range []prometheus.Collector{m.connections, m.brokerUp, m.backendErrors, m.repairs, newDepthCollector(nil)} {
		c.Describe(descriptions)
	}
	close(descriptions)
	described := regexp.MustCompile(`fqName: "([^"]+)".*variableLabels: \{([^}]*)\}`)
	for d := range descriptions {
		found := described.FindStringSubmatch(d.String())
		if found == nil {
			t.Fatalf("cannot read %s", d)
		}
		labels := "`" + strings.ReplaceAll(found[2], ",", "`, `") + "`"
		row := regexp.MustCompile("(?m)^\\| `" + found[1] + "` \\| \\w+ \\| " + labels + " \\|")
		if !row.Match(text) {
			t.Errorf("docs/metrics.md has no row for %s with the labels %s", found[1], labels)
		}
	}
}
