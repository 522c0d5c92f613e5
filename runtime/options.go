package runtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/runtime/codec"
	"github.com/shove-dev/shove/runtime/config"
)

// Option configures a Runtime. An option that is used wrongly makes New fail.
type Option func(*Runtime) error

// Drivers makes brokers available. A program links only the drivers that it names.
func Drivers(drivers ...broker.Driver) Option {
	return func(r *Runtime) error {
		for _, d := range drivers {
			r.drivers[d.Kind] = d
		}
		return nil
	}
}

// Config uses a configuration made in code instead of a file.
func Config(c *config.RuntimeConfig) Option {
	return func(r *Runtime) error {
		if c == nil {
			return errors.New("option Config: nil")
		}
		r.config = c
		return nil
	}
}

// ConfigFile reads the configuration from a file and follows its changes. The default is the file that the
// environment variable SHOVE_CONFIG names.
func ConfigFile(path string) Option {
	return func(r *Runtime) error { r.configPath = path; return nil }
}

// Logger sets the logger; the default is slog.Default().
func Logger(l *slog.Logger) Option { return func(r *Runtime) error { r.log = l; return nil } }

// Registerer sets where metrics are registered; the default is prometheus.DefaultRegisterer.
func Registerer(reg prometheus.Registerer) Option {
	return func(r *Runtime) error { r.registerer = reg; return nil }
}

// HTTPAddr sets where /metrics, /healthz, /readyz and /status are served; the default is $SHOVE_HTTP_ADDR, else ":9464",
// and "" serves none.
func HTTPAddr(addr string) Option { return func(r *Runtime) error { r.httpAddr = addr; return nil } }

// Pod names this process in histories and to the broker; the default is $POD_NAME, else the host's name.
func Pod(name string) Option { return func(r *Runtime) error { r.pod = name; return nil } }

// Declare creates missing queues before consuming, for use without the operator.
func Declare() Option { return func(r *Runtime) error { r.declare = true; return nil } }

// Values sets the context whose values handlers see (A13). Its end does not end them.
func Values(ctx context.Context) Option {
	return func(r *Runtime) error { r.values = context.WithoutCancel(ctx); return nil }
}

// OnError says what the end of a consumer with an error means for the process (N4).
type OnError int

const (
	// EndProcess drains the other consumers and ends Run. The default: Kubernetes restarts the container.
	EndProcess OnError = iota
	// Restart begins the consumer anew, with the reconnect backoff.
	Restart
	// Continue leaves the consumer ended and the others running; Run reports the error at its end.
	Continue
)

// OnConsumerError chooses what the end of a consumer with an error means.
func OnConsumerError(o OnError) Option { return func(r *Runtime) error { r.onError = o; return nil } }

// HandleOption configures one handler.
type HandleOption func(*binding) error

// Codec sets how bodies are decoded; the default is JSON.
func Codec(c codec.Codec) HandleOption { return func(b *binding) error { b.codec = c; return nil } }

func option(set func(*config.Options)) HandleOption {
	return func(b *binding) error { set(&b.options); return nil }
}

// Prefetch bounds the unsettled messages of this process; default 100. As with every option given in code, the
// ConsumerGroup's field wins over it, and it wins over the Broker's consumerDefaults (H2).
func Prefetch(n int) HandleOption { return option(func(o *config.Options) { o.Prefetch = &n }) }

// Concurrency is how many handlers run at once; default 10.
func Concurrency(n int) HandleOption { return option(func(o *config.Options) { o.Concurrency = &n }) }

// MaxRetries is the retry budget; default 10.
func MaxRetries(n uint32) HandleOption { return option(func(o *config.Options) { o.MaxRetries = &n }) }

// MaxReconnectAttempts ends the consumer with an error after n failed attempts in a row; default unlimited.
func MaxReconnectAttempts(n int) HandleOption {
	return option(func(o *config.Options) { o.MaxReconnectAttempts = &n })
}

// HandlerTimeout is the deadline of decode and handler; default 30 s, 0 for none.
func HandlerTimeout(d time.Duration) HandleOption {
	return option(func(o *config.Options) { o.HandlerTimeout = new(config.Duration(d)) })
}

// HandlerTimeoutOutcome is what a timeout means; default Retry.
func HandlerTimeoutOutcome(out Outcome) HandleOption {
	return func(b *binding) error {
		name := map[string]string{"ack": "Ack", "retry": "Retry", "reject": "Reject", "defer": "Defer"}[out.Verdict.String()]
		if name == "" {
			return fmt.Errorf("option HandlerTimeoutOutcome: %s is not an outcome", out.Verdict)
		}
		b.options.HandlerTimeoutOutcome = &name
		return nil
	}
}

// InPlace makes retries wait in place instead of in a hold queue (J2).
func InPlace() HandleOption {
	return option(func(o *config.Options) { o.RetryStrategy = new("InPlace") })
}

// MaxMessageSize in bytes; a larger body is dead-lettered unseen. Default 10 MiB.
func MaxMessageSize(n int64) HandleOption {
	return option(func(o *config.Options) { o.MaxMessageSize = &n })
}

// DrainTimeout is how long running handlers may finish at shutdown; default 30 s.
func DrainTimeout(d time.Duration) HandleOption {
	return option(func(o *config.Options) { o.DrainTimeout = new(config.Duration(d)) })
}

// DeferLimit bounds deferrals by number and age; zero does not bind. Default none.
func DeferLimit(maxDefers uint32, maxAge time.Duration) HandleOption {
	return option(func(o *config.Options) {
		o.DeferLimit = &config.DeferLimit{MaxDefers: maxDefers, MaxAge: config.Duration(maxAge)}
	})
}

// CrashLimit dead-letters a message that took so many processes down; default 20 where the broker counts, 0 for never.
func CrashLimit(n uint32) HandleOption { return option(func(o *config.Options) { o.CrashLimit = &n }) }
