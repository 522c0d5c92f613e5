package main

import (
	"bytes"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/kubeenv"
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard())
	testenv.Main(m)
}

// The built program, outside of any cluster: it becomes the leader, makes a Topology ready, answers on its endpoints
// and ends in order.
func TestOperator_RunsOutsideACluster(t *testing.T) {
	cfg := kubeenv.ControlPlane(t)
	ns := kubeenv.Namespace(t, cfg)
	c := newClient(t, cfg)
	health := "127.0.0.1:" + freePort(t)
	startOperator(t, build(t), cfg, "--secret-namespaces="+ns, "--metrics-address=0", "--health-address="+health, "--leader-elect", "--leader-election-namespace="+ns)
	onRabbit(t, c, ns, testenv.RabbitMQ(t).Vhost(t), time.Minute)
	create(t, c, ns, 1)
	testenv.Eventually(t, time.Minute, func() error { return allReady(c, ns, 1) })
	for _, path := range []string{"/healthz", "/readyz"} {
		res, err := http.Get("http://" + health + path) //nolint:noctx // of a test
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != http.StatusOK {
			t.Errorf("%s answers %s", path, res.Status)
		}
	}
}

func TestOptions(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*options)
		says   string // "": valid
	}{
		"defaults":               {func(*options) {}, ""},
		"no concurrency":         {func(o *options) { o.concurrency = 0 }, "--concurrency"},
		"too much concurrency":   {func(o *options) { o.concurrency = 100000 }, "--concurrency"},
		"no requests":            {func(o *options) { o.apiQPS = 0 }, "--api-qps"},
		"deadline above lease":   {func(o *options) { o.renewDeadline = o.leaseDuration }, "--renew-deadline"},
		"period above deadline":  {func(o *options) { o.retryPeriod = o.renewDeadline }, "--retry-period"},
		"no time for a shutdown": {func(o *options) { o.shutdown = 0 }, "--shutdown-timeout"},
	} {
		t.Run(name, func(t *testing.T) {
			o := defaults()
			tc.change(&o)
			err := o.validate()
			if (err != nil) != (tc.says != "") || err != nil && !strings.Contains(err.Error(), tc.says) {
				t.Errorf("got %v, want one that names %q", err, tc.says)
			}
		})
	}
	if got := list(" a, b,,c "); strings.Join(got, "|") != "a|b|c" {
		t.Errorf("list: %q", got)
	}
	if got := list(""); got != nil {
		t.Errorf("an empty flag is %q, not all namespaces", got)
	}
}

func build(tb testing.TB) string {
	tb.Helper()
	bin := filepath.Join(tb.TempDir(), "operator")
	if out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput(); err != nil {
		tb.Fatalf("build the operator: %v\n%s", err, out)
	}
	return bin
}

func newClient(tb testing.TB, cfg *rest.Config) client.Client {
	tb.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			tb.Fatal(err)
		}
	}
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

// startOperator starts the built operator, which ends with the benchmark.
func startOperator(tb testing.TB, bin string, cfg *rest.Config, args ...string) *exec.Cmd {
	tb.Helper()
	kubeconfig := clientcmdapi.NewConfig()
	kubeconfig.Clusters["test"] = &clientcmdapi.Cluster{Server: cfg.Host, CertificateAuthorityData: cfg.CAData}
	kubeconfig.AuthInfos["test"] = &clientcmdapi.AuthInfo{ClientCertificateData: cfg.CertData, ClientKeyData: cfg.KeyData}
	kubeconfig.Contexts["test"] = &clientcmdapi.Context{Cluster: "test", AuthInfo: "test"}
	kubeconfig.CurrentContext = "test"
	path := filepath.Join(tb.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*kubeconfig, path); err != nil {
		tb.Fatal(err)
	}
	var log bytes.Buffer
	op := exec.Command(bin, args...)
	op.Env = append(os.Environ(), "KUBECONFIG="+path)
	op.Stdout, op.Stderr = &log, &log
	op.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := op.Start(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		_ = op.Process.Signal(syscall.SIGTERM)
		if err := op.Wait(); err != nil {
			tb.Errorf("the operator ended with: %v\n%s", err, log.String())
		}
	})
	return op
}

func freePort(tb testing.TB) string {
	tb.Helper()
	return strconv.Itoa(testenv.FreePort(tb))
}
