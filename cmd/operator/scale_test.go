package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/kubeenv"
	"github.com/shove-dev/shove/internal/testenv/rabbitserver"
)

// BenchmarkThousandTopologies runs the built operator against a real API server and a real RabbitMQ: 1,000 Topologies
// of three quorum queues each on one Broker. Targets: all Ready within 60 s on two cores, under 150 MB resident, one
// connection, and a resync that writes nothing. Most of the time is the broker's: it is given beside what declaring a
// quorum queue by hand takes, over 16 channels at once. SHOVE_BENCH_TOPOLOGIES is another number.
func BenchmarkThousandTopologies(b *testing.B) {
	n := 1000
	if s := os.Getenv("SHOVE_BENCH_TOPOLOGIES"); s != "" {
		var err error
		if n, err = strconv.Atoi(s); err != nil {
			b.Fatal(err)
		}
	}
	bin := build(b)
	for range b.N {
		thousand(b, bin, n)
	}
}

func thousand(b *testing.B, bin string, n int) {
	b.Helper()
	cfg := kubeenv.ControlPlane(b)
	ns := kubeenv.Namespace(b, cfg)
	c := newClient(b, cfg)
	server := *testenv.StartRabbitMQ(b, rabbitserver.Options{}) // thousands of queues take long to delete
	b.ReportMetric(byHand(b, server), "ms/queue-by-hand")
	vhost := server.Vhost(b)
	metrics := "127.0.0.1:" + freePort(b)
	op := startOperator(b, bin, cfg, "--namespaces="+ns, "--metrics-address="+metrics, "--health-address=0")

	const resync = 30 * time.Second
	onRabbit(b, c, ns, vhost, resync)
	start := time.Now()
	create(b, c, ns, n)
	created := time.Since(start)
	testenv.Eventually(b, 10*time.Minute, func() error { return allReady(c, ns, n) })
	ready := time.Since(start)

	settle := countInterval + resync // the first counts are written once
	time.Sleep(settle)
	before := writes(b, metrics)
	time.Sleep(2 * resync)
	b.ReportMetric(created.Seconds(), "s-to-create")
	b.ReportMetric(ready.Seconds(), "s-to-ready")
	b.ReportMetric(float64(ready.Milliseconds())/float64(3*n), "ms/queue")
	b.ReportMetric(float64(writes(b, metrics)-before), "writes/2-resyncs")
	b.ReportMetric(residentPeak(b, op), "MB-resident-peak")
	b.ReportMetric(float64(connections(b, vhost)), "connections")
	b.ReportMetric(cpuSeconds(b, op), "CPU-s")
	b.ReportMetric(0, "ns/op")
}

// byHand is how long the broker takes for a quorum queue when nothing else is done, over 16 channels at once.
func byHand(b *testing.B, server testenv.RabbitMQServer) float64 {
	b.Helper()
	const queues, channels = 300, 16
	conn, err := amqp.Dial(server.Vhost(b).URL)
	if err != nil {
		b.Fatal("cannot connect to the test server")
	}
	defer conn.Close()
	free := make(chan *amqp.Channel, channels)
	for range channels {
		ch, err := conn.Channel()
		if err != nil {
			b.Fatal(err)
		}
		free <- ch
	}
	var work errgroup.Group
	work.SetLimit(channels)
	start := time.Now()
	for i := range queues {
		work.Go(func() error {
			ch := <-free
			defer func() { free <- ch }()
			_, err := ch.QueueDeclare(fmt.Sprintf("q-%d", i), true, false, false, false, amqp.Table{"x-queue-type": "quorum"})
			return err
		})
	}
	if err := work.Wait(); err != nil {
		b.Fatal(err)
	}
	return float64(time.Since(start).Milliseconds()) / queues
}

// countInterval is the time between two counts of all messages, as in the controllers.
const countInterval = 15 * time.Second

func onRabbit(tb testing.TB, c client.Client, ns string, v testenv.RabbitMQVhost, resync time.Duration) {
	tb.Helper()
	u, err := url.Parse(v.URL)
	if err != nil {
		tb.Fatal("a URL of the test server does not parse")
	}
	password, _ := u.User.Password()
	user := u.User.Username()
	m, err := url.Parse(v.ManagementURL)
	if err != nil {
		tb.Fatal("a URL of the test server does not parse")
	}
	u.User, m.User = nil, nil
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "admin", Namespace: ns}, StringData: map[string]string{"username": user, "password": password}}
	broker := &v1alpha1.Broker{ObjectMeta: metav1.ObjectMeta{Name: "rabbit", Namespace: ns}}
	broker.Spec.RabbitMQ = &v1alpha1.RabbitMQBroker{URL: u.String(), Management: &v1alpha1.RabbitMQManagement{URL: m.String()}}
	broker.Spec.Credentials = &v1alpha1.CredentialsSource{SecretRef: v1alpha1.SecretReference{Name: "admin"}}
	broker.Spec.ResyncInterval = &metav1.Duration{Duration: resync}
	for _, o := range []client.Object{secret, broker} {
		if err := c.Create(context.Background(), o); err != nil {
			tb.Fatal(err)
		}
	}
}

func create(tb testing.TB, c client.Client, ns string, n int) {
	tb.Helper()
	var work errgroup.Group
	work.SetLimit(8)
	for i := range n {
		work.Go(func() error {
			t := &v1alpha1.Topology{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("t-%04d", i), Namespace: ns}}
			t.Spec.BrokerRef.Name = "rabbit"
			t.Spec.HoldQueues = []v1alpha1.HoldQueue{{Delay: metav1.Duration{Duration: 30 * time.Second}}}
			t.Spec.DeadLetter = &v1alpha1.DeadLetter{}
			return c.Create(context.Background(), t)
		})
	}
	if err := work.Wait(); err != nil {
		tb.Fatal(err)
	}
}

func allReady(c client.Client, ns string, n int) error {
	var list v1alpha1.TopologyList
	if err := c.List(context.Background(), &list, client.InNamespace(ns)); err != nil {
		return err
	}
	ready := 0
	for i := range list.Items {
		if meta.IsStatusConditionTrue(list.Items[i].Status.Conditions, v1alpha1.ConditionReady) {
			ready++
		}
	}
	if ready != n {
		time.Sleep(time.Second) // listing is work for the API server
		return fmt.Errorf("%d of %d are ready", ready, n)
	}
	return nil
}

var request = regexp.MustCompile(`(?m)^rest_client_requests_total\{.*method="(PATCH|POST|PUT|DELETE)".*\} ([0-9.e+]+)$`)

// writes are the requests of the operator that write to the API server.
func writes(b *testing.B, address string) int {
	b.Helper()
	res, err := http.Get("http://" + address + "/metrics") //nolint:noctx // of a benchmark
	if err != nil {
		b.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		b.Fatal(err)
	}
	sum := 0.0
	for _, m := range request.FindAllStringSubmatch(string(text), -1) {
		n, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			b.Fatal(err)
		}
		sum += n
	}
	return int(sum)
}

// residentPeak is the most memory that the operator had, in MB.
func residentPeak(b *testing.B, op *exec.Cmd) float64 {
	b.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", op.Process.Pid))
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kb, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
			if err != nil {
				b.Fatal(err)
			}
			return kb / 1024
		}
	}
	b.Fatal("no VmHWM")
	return 0
}

// cpuSeconds is what the operator has used.
func cpuSeconds(b *testing.B, op *exec.Cmd) float64 {
	b.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", op.Process.Pid))
	if err != nil {
		b.Fatal(err)
	}
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	ticks := 0.0
	for _, f := range fields[11:13] { // utime and stime, in hundredths of a second
		t, err := strconv.ParseFloat(f, 64)
		if err != nil {
			b.Fatal(err)
		}
		ticks += t
	}
	return ticks / 100
}

func connections(b *testing.B, v testenv.RabbitMQVhost) int {
	b.Helper()
	var list []struct {
		Name string `json:"name"`
	}
	v.Server.MustCall(b, http.MethodGet, "/api/vhosts/"+v.Name+"/connections", nil, &list)
	return len(list)
}
