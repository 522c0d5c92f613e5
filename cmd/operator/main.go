// Command operator runs shove's controllers: in a cluster, or anywhere with KUBECONFIG. As "operator embedded" it is the
// server of a Broker with spec.embedded.
package main

import (
	"flag"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/controllers"
	"github.com/shove-dev/shove/internal/drivers"
)

// version is set when a release is built.
var version = "unknown"

func main() {
	if len(os.Args) > 1 && os.Args[1] == "embedded" {
		if err := runEmbedded(os.Args[2:], os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "operator embedded:", err)
			os.Exit(1)
		}
		return
	}
	opts := defaults()
	opts.bind(flag.CommandLine)
	logging := zap.Options{}
	logging.BindFlags(flag.CommandLine)
	flag.Parse()
	ctrl.SetLogger(zap.New(zap.UseFlagOptions(&logging)))
	ctrl.Log.Info("Starting", "version", version)
	if err := run(opts); err != nil {
		fmt.Fprintln(os.Stderr, "operator:", err)
		os.Exit(1)
	}
}

// run runs the operator until it is told to stop, and returns an error when it could not go on.
func run(o options) error {
	if err := o.validate(); err != nil {
		return err
	}
	cfg, err := ctrl.GetConfig()
	if err != nil {
		return fmt.Errorf("find the cluster: %w", err)
	}
	cfg.QPS, cfg.Burst = float32(o.apiQPS), int(2*o.apiQPS)
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			return fmt.Errorf("build the scheme: %w", err)
		}
	}
	namespaces, secrets := list(o.namespaces), list(o.secretNamespaces)
	if len(secrets) == 0 {
		secrets = namespaces
	}
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme:                        scheme,
		Cache:                         controllers.CacheOptions(namespaces, secrets),
		Metrics:                       metricsserver.Options{BindAddress: o.metricsAddress},
		HealthProbeBindAddress:        o.healthAddress,
		LeaderElection:                o.leaderElect,
		LeaderElectionID:              "shove-operator.shove.dev",
		LeaderElectionNamespace:       o.leaderNamespace,
		LeaseDuration:                 &o.leaseDuration,
		RenewDeadline:                 &o.renewDeadline,
		RetryPeriod:                   &o.retryPeriod,
		LeaderElectionReleaseOnCancel: true, // the process ends right after
		GracefulShutdownTimeout:       &o.shutdown,
	})
	if err != nil {
		return fmt.Errorf("make the manager: %w", err)
	}
	ctx := ctrl.SetupSignalHandler()
	err = controllers.Controllers(ctx, mgr, controllers.Options{
		Drivers: drivers.All(), Namespaces: namespaces, Concurrency: o.concurrency, AgentImage: o.agentImage, EmbeddedImage: o.embeddedImage,
	})
	if err != nil {
		return fmt.Errorf("set up the controllers: %w", err)
	}
	for _, add := range []func(string, healthz.Checker) error{mgr.AddHealthzCheck, mgr.AddReadyzCheck} {
		if err := add("ping", healthz.Ping); err != nil {
			return fmt.Errorf("set up the health endpoint: %w", err)
		}
	}
	return mgr.Start(ctx)
}
