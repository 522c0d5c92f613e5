package main

import (
	"errors"
	"flag"
	"fmt"
	"strings"
	"time"
)

// options are the operator's flags.
type options struct {
	metricsAddress, healthAddress             string
	namespaces, secretNamespaces, agentImage  string
	embeddedImage                             string
	concurrency                               int
	apiQPS                                    float64
	leaderElect                               bool
	leaderNamespace                           string
	leaseDuration, renewDeadline, retryPeriod time.Duration
	shutdown                                  time.Duration
}

func defaults() options {
	return options{
		metricsAddress: ":8080", healthAddress: ":8081", concurrency: 256, apiQPS: 200,
		leaseDuration: 30 * time.Second, renewDeadline: 20 * time.Second, retryPeriod: 4 * time.Second, shutdown: 20 * time.Second,
	}
}

// bind puts the options on a flag set; their present values are the defaults.
func (o *options) bind(fs *flag.FlagSet) {
	fs.StringVar(&o.metricsAddress, "metrics-address", o.metricsAddress, "where Prometheus metrics are served; 0 switches them off")
	fs.StringVar(&o.healthAddress, "health-address", o.healthAddress, "where /healthz and /readyz are served; 0 switches them off")
	fs.StringVar(&o.namespaces, "namespaces", o.namespaces, "namespaces to watch, separated by commas; empty: all")
	fs.StringVar(&o.secretNamespaces, "secret-namespaces", o.secretNamespaces, "namespaces whose Secrets may be read, separated by commas; empty: those of --namespaces")
	fs.StringVar(&o.agentImage, "agent-image", o.agentImage, "image of the sidecar where a ConsumerGroup names none; empty: it must")
	fs.StringVar(&o.embeddedImage, "embedded-image", o.embeddedImage, "image that runs the embedded brokers: this operator's own; empty: Brokers with spec.embedded are refused")
	fs.IntVar(&o.concurrency, "concurrency", o.concurrency, "topologies that are worked on at once; most of them wait for a joint call to a broker")
	fs.Float64Var(&o.apiQPS, "api-qps", o.apiQPS, "requests per second to the API server; bursts may be twice that")
	fs.BoolVar(&o.leaderElect, "leader-elect", o.leaderElect, "elect a leader, so that several operators may run")
	fs.StringVar(&o.leaderNamespace, "leader-election-namespace", o.leaderNamespace, "namespace of the lease; empty: the operator's own")
	fs.DurationVar(&o.leaseDuration, "lease-duration", o.leaseDuration, "how long a leader that does not renew is waited for")
	fs.DurationVar(&o.renewDeadline, "renew-deadline", o.renewDeadline, "how long a leader tries to renew before it gives up; below the lease duration")
	fs.DurationVar(&o.retryPeriod, "retry-period", o.retryPeriod, "time between two attempts to get or renew the lease; below the renew deadline")
	fs.DurationVar(&o.shutdown, "shutdown-timeout", o.shutdown, "how long running work may take to end")
}

// validate names the flag that is wrong.
func (o options) validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(o.concurrency >= 1 && o.concurrency <= 1000, "--concurrency: %d: use 1 to 1000", o.concurrency)
	check(o.apiQPS >= 1 && o.apiQPS <= 10000, "--api-qps: %v: use 1 to 10000", o.apiQPS)
	check(o.retryPeriod > 0 && o.retryPeriod < o.renewDeadline && o.renewDeadline < o.leaseDuration,
		"--retry-period (%s) has to be below --renew-deadline (%s), and that below --lease-duration (%s)", o.retryPeriod, o.renewDeadline, o.leaseDuration)
	check(o.shutdown > 0, "--shutdown-timeout: %s: use more than 0", o.shutdown)
	return errors.Join(errs...)
}

// list splits a flag at commas.
func list(s string) []string {
	var out []string
	for _, n := range strings.Split(s, ",") {
		if n = strings.TrimSpace(n); n != "" {
			out = append(out, n)
		}
	}
	return out
}
