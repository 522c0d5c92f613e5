package orders

import (
	"context"
	"encoding/json"
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

	"sigs.k8s.io/yaml"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/rabbitmq"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/topology"
)

// TestOrdersOnRabbitMQ runs both programs as processes of their own, with the files that the operator would render from
// the manifests, until every kind of order has found its end.
func TestOrdersOnRabbitMQ(t *testing.T) {
	vhost := testenv.RabbitMQ(t).Vhost(t)
	dir := t.TempDir()
	connection := writeConnection(t, dir, vhost.URL)
	var topo v1alpha1.Topology
	var group v1alpha1.ConsumerGroup
	readManifest(t, "topology.yaml", &topo)
	readManifest(t, "consumergroup.yaml", &group)
	decl, err := render.Declaration(&topo, topology.RabbitMQ)
	if err != nil {
		t.Fatal(err)
	}
	declare(t, connection, decl)
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

// writeConnection is the Broker entry for a server, with its credentials in files as a mounted Secret has them.
func writeConnection(t *testing.T, dir, address string) config.Broker {
	t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	password, _ := u.User.Password()
	for name, text := range map[string]string{"username": u.User.Username(), "password": password} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	u.User = nil
	endpoint, err := json.Marshal(map[string]string{"url": u.String()})
	if err != nil {
		t.Fatal(err)
	}
	return config.Broker{Name: "shop/rabbit", Kind: topology.RabbitMQ, Endpoint: endpoint, CredentialsDir: dir}
}

func readManifest(t *testing.T, name string, into any) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("manifests", name))
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(b, into); err != nil {
		t.Fatal(err)
	}
}

// declare does the operator's part.
func declare(t *testing.T, b config.Broker, decl broker.Declaration) {
	t.Helper()
	admin, err := rabbitmq.Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: b.Endpoint, Name: "test",
		Credentials: func(context.Context) (broker.Credentials, error) { return config.ReadCredentials(b) }})
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
