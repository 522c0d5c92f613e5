package orders

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"sigs.k8s.io/yaml"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/kafka"
	"github.com/shove-dev/shove/broker/nats"
	"github.com/shove-dev/shove/broker/rabbitmq"
	"github.com/shove-dev/shove/broker/redis"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/kafkaserver"
	"github.com/shove-dev/shove/internal/testenv/natsserver"
	"github.com/shove-dev/shove/internal/testenv/redisserver"
	"github.com/shove-dev/shove/runtime/config"
)

func TestOrdersOnRabbitMQ(t *testing.T) {
	u, err := url.Parse(testenv.RabbitMQ(t).Vhost(t).URL)
	if err != nil {
		t.Fatal(err)
	}
	password, _ := u.User.Password()
	user := broker.Credentials{Username: u.User.Username(), Password: password}
	u.User = nil
	runOrders(t, rabbitmq.Driver, filepath.Join("brokers", "rabbitmq.yaml"), user, user, func(s *v1alpha1.BrokerSpec) { s.RabbitMQ.URL = u.String() })
}

// TestOrdersOnNATS changes the Broker, and nothing else. The programs have the rights that docs/brokers/nats.md gives a
// workload, and no more.
func TestOrdersOnNATS(t *testing.T) {
	publish := []string{
		"$JS.API.STREAM.INFO.orders", "$JS.API.CONSUMER.INFO.orders.orders", "$JS.API.CONSUMER.INFO.orders.shove-parked", "$JS.API.CONSUMER.MSG.NEXT.orders.orders",
		"$JS.ACK.orders.orders.>", "orders", "orders-hold-1s.>", "orders-hold-3s.>", "orders-hold-6s.>", "orders-dlq",
		"$JS.API.CONSUMER.INFO.orders-dlq.orders-dlq", "$JS.API.CONSUMER.MSG.NEXT.orders-dlq.orders-dlq", "$JS.ACK.orders-dlq.orders-dlq.>", // the drain of dead letters
	}
	admin, app := broker.Credentials{Username: "admin", Password: "admin"}, broker.Credentials{Username: "app", Password: "app"}
	s := natsserver.Start(t, func(o *server.Options) {
		o.Users = []*server.User{{Username: admin.Username, Password: admin.Password}, {Username: app.Username, Password: app.Password, Permissions: &server.Permissions{
			Publish: &server.SubjectPermission{Allow: publish}, Subscribe: &server.SubjectPermission{Allow: []string{"_INBOX.>"}},
		}}}
	})
	runOrders(t, nats.Driver, filepath.Join("brokers", "nats.yaml"), admin, app, func(b *v1alpha1.BrokerSpec) { b.NATS.Servers = []v1alpha1.NATSServer{v1alpha1.NATSServer(s.URL())} })
}

// TestOrdersOnKafka changes the Broker, and nothing else. The users have the rights of docs/brokers/kafka.md, and no more.
func TestOrdersOnKafka(t *testing.T) {
	srv := testenv.SecureKafka(t)
	c, err := kgo.NewClient(kgo.SeedBrokers(srv.Addr(kafkaserver.Plain)), kgo.DisableClientMetrics())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	cluster := kadm.NewClient(c)
	admin, app := broker.Credentials{Username: "shove-operator", Password: "admin"}, broker.Credentials{Username: "shop-orders", Password: "app"}
	for _, u := range []broker.Credentials{admin, app} {
		resp, err := cluster.AlterUserSCRAMs(t.Context(), nil, []kadm.UpsertSCRAM{{User: u.Username, Mechanism: kadm.ScramSha512, Iterations: 4096, Password: u.Password}})
		if err := errors.Join(err, resp.Error()); err != nil {
			t.Fatal(err)
		}
	}
	acl := func(user string, resource func(*kadm.ACLBuilder) *kadm.ACLBuilder, ops ...kadm.ACLOperation) {
		if _, err := cluster.CreateACLs(t.Context(), resource(kadm.NewACLs().AllowHosts().Allow("User:"+user).Operations(ops...).ResourcePatternType(kadm.ACLPatternPrefixed))); err != nil {
			t.Fatal(err)
		}
	}
	topics := func(b *kadm.ACLBuilder) *kadm.ACLBuilder { return b.Topics("orders") }
	groups := func(b *kadm.ACLBuilder) *kadm.ACLBuilder { return b.Groups("orders") }
	acl(admin.Username, topics, kadm.OpCreate, kadm.OpDescribe, kadm.OpDescribeConfigs, kadm.OpAlter, kadm.OpAlterConfigs)
	acl(app.Username, topics, kadm.OpRead, kadm.OpWrite)
	acl(app.Username, groups, kadm.OpRead)
	runOrders(t, kafka.Driver, filepath.Join("brokers", "kafka.yaml"), admin, app, func(b *v1alpha1.BrokerSpec) {
		b.Kafka.BootstrapServers = []v1alpha1.HostPort{v1alpha1.HostPort(srv.Addr(kafkaserver.SASL))}
	})
}

// TestOrdersOnRedis changes the Broker, and nothing else. The users have the rules of docs/brokers/redis.md, and no more.
func TestOrdersOnRedis(t *testing.T) {
	admin, app := broker.Credentials{Username: "shove-operator", Password: "admin"}, broker.Credentials{Username: "shop-orders", Password: "app"}
	srv := testenv.StartRedis(t, redisserver.Options{Config: []string{
		"user default off",
		"user shove-operator on >admin ~* resetchannels -@all +@read +@write +@connection +eval +evalsha +time +info +command|info",
		"user shop-orders on >app ~{orders}* resetchannels -@all +@read +@write +@connection +eval +evalsha +time +command|info",
	}})
	runOrders(t, redis.Driver, filepath.Join("brokers", "redis.yaml"), admin, app, func(s *v1alpha1.BrokerSpec) { s.Redis.Addresses = []v1alpha1.HostPort{v1alpha1.HostPort(srv.Addr())} })
}

// runOrders runs both programs as processes of their own, with the files that the operator would render from the
// manifests, until every kind of order has found its end. Only the Broker differs; at has it lead to the test's server.
func runOrders(t *testing.T, driver broker.Driver, manifest string, admin, app broker.Credentials, at func(*v1alpha1.BrokerSpec)) {
	t.Helper()
	dir := t.TempDir()
	var b v1alpha1.Broker
	readManifest(t, manifest, &b)
	at(&b.Spec)
	endpoint, err := render.WorkloadEndpoint(&b)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"username": app.Username, "password": app.Password} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil { // as a mounted Secret has them
			t.Fatal(err)
		}
	}
	connection := config.Broker{Name: "shop/" + b.Name, Kind: driver.Kind, Endpoint: endpoint, CredentialsDir: dir}
	var topo v1alpha1.Topology
	var group v1alpha1.ConsumerGroup
	readManifest(t, filepath.Join("manifests", "topology.yaml"), &topo)
	readManifest(t, filepath.Join("manifests", "consumergroup.yaml"), &group)
	decl, err := render.Declaration(&topo, driver.Kind)
	if err != nil {
		t.Fatal(err)
	}
	declare(t, driver, broker.Config{Endpoint: endpoint, Name: "test", Credentials: func(context.Context) (broker.Credentials, error) { return admin, nil }}, decl)
	options, err := render.Options(&group.Spec.ConsumerOptions)
	if err != nil {
		t.Fatal(err)
	}
	base := config.RuntimeConfig{APIVersion: config.APIVersion, Kind: config.Kind, Generation: "1", Brokers: []config.Broker{connection},
		Topologies: []config.Topology{config.FromDeclaration(topo.Name, "shop", connection.Name, decl)}}
	work, publish := base, base
	work.Consumers = []config.Consumer{{Group: group.Name, Topology: topo.Name, Options: options}}
	publish.Publish = []config.Publish{{Topology: topo.Name}}

	worker := start(t, dir, "worker", &work)
	publisher := start(t, dir, "publisher", &publish)
	want := []string{
		`shove_messages_consumed_total{consumer_group="orders-worker",outcome="ack",topic="orders"}`,
		`shove_messages_consumed_total{consumer_group="orders-worker",outcome="retry",topic="orders"}`,
		`shove_messages_consumed_total{consumer_group="orders-worker",outcome="reject",topic="orders"}`,
		`shove_messages_consumed_total{consumer_group="orders-worker",outcome="defer",topic="orders"}`,
		`shove_messages_failed_total{consumer_group="orders-worker",reason="timeout",topic="orders"}`,
		`shove_messages_failed_total{consumer_group="orders-worker",reason="panic",topic="orders"}`,
		`shove_messages_failed_total{consumer_group="orders-worker",reason="rejected",topic="orders"}`,
		`shove_messages_failed_total{consumer_group="orders-worker",reason="max_retries_exceeded",topic="orders"}`,
		`shove_dead_letters_handled_total{consumer_group="orders-worker",topic="orders"}`,
	}
	testenv.Eventually(t, 90*time.Second, func() error {
		text, err := worker.get("/metrics")
		if err != nil {
			return err
		}
		for _, series := range want {
			if strings.Contains(text, series+" 0\n") || !strings.Contains(text, series) {
				return fmt.Errorf("%s did not move", series)
			}
		}
		return nil
	})
	for _, p := range []*process{worker, publisher} {
		testenv.Eventually(t, 10*time.Second, func() error { _, err := p.get("/readyz"); return err })
	}
	publisher.terminate(t)
	worker.terminate(t)
}

// readManifest reads the last object of a file.
func readManifest(t *testing.T, path string, into any) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	docs := strings.Split(string(b), "\n---\n")
	if err := yaml.UnmarshalStrict([]byte(docs[len(docs)-1]), into); err != nil {
		t.Fatal(err)
	}
}

// declare does the operator's part.
func declare(t *testing.T, driver broker.Driver, cfg broker.Config, decl broker.Declaration) {
	t.Helper()
	admin, err := driver.OpenAdmin(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := admin.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	}()
	if err := admin.Declare(t.Context(), decl); err != nil {
		t.Fatal(err)
	}
}

// process is one of the example's programs.
type process struct {
	cmd  *exec.Cmd
	base string
	done chan error
}

// start builds a program and runs it.
func start(t *testing.T, dir, name string, cfg *config.RuntimeConfig) *process {
	t.Helper()
	text, err := config.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	path, binary := filepath.Join(dir, name+".yaml"), filepath.Join(dir, name)
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "./"+name).CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", name, err, out)
	}
	addr := freeAddr(t)
	p := &process{cmd: exec.Command(binary), base: "http://" + addr, done: make(chan error, 1)}
	p.cmd.Env = append(os.Environ(), config.EnvPath+"="+path, "SHOVE_HTTP_ADDR="+addr, "POD_NAME="+name)
	p.cmd.Stdout, p.cmd.Stderr = t.Output(), t.Output()
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { p.done <- p.cmd.Wait() }()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // it ended already where the test went well
		_ = <-p.done             // how it ended is the test's business, not the cleanup's
		http.DefaultClient.CloseIdleConnections()
	})
	return p
}

func freeAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func (p *process) get(path string) (string, error) {
	resp, err := http.Get(p.base + path)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, resp.Status, b)
	}
	return string(b), err
}

// terminate ends the process as Kubernetes does and expects a clean drain (N2).
func (p *process) terminate(t *testing.T) {
	t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-p.done:
		p.done <- nil // for the cleanup
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			t.Errorf("%s: exit code %d, want 0", filepath.Base(p.cmd.Path), exit.ExitCode())
		} else if err != nil {
			t.Error(err)
		}
	case <-time.After(40 * time.Second):
		t.Errorf("%s: still there after 40 s", filepath.Base(p.cmd.Path))
	}
}
