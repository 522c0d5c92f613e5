package runtime_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/broker/memory"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/codec"
	"github.com/shove-dev/shove/runtime/config"
)

// exampleConfig is what the operator would mount: one queue with a tier of 10 ms and a dead-letter queue.
func exampleConfig() *config.RuntimeConfig {
	return &config.RuntimeConfig{
		APIVersion: config.APIVersion, Kind: config.Kind,
		Brokers: []config.Broker{{Name: "local", Kind: "memory"}},
		Topologies: []config.Topology{{Name: "greetings", Broker: "local", Queue: "greetings", DeadLetter: "greetings-dlq",
			HoldQueues: []config.Hold{{Delay: config.Duration(10 * time.Millisecond)}}}},
		Consumers: []config.Consumer{{Group: "greeters", Topology: "greetings"}},
		Publish:   []config.Publish{{Topology: "greetings"}},
	}
}

// runExample runs a runtime with a handler of text, publishes, and ends it when the handler calls done.
func runExample(handler func(done func()) runtime.Option, texts ...string) {
	ctx, done := context.WithTimeout(context.Background(), 10*time.Second)
	defer done()
	r, err := runtime.New(
		runtime.Drivers(memory.Driver(memory.New(memory.Options{}))), runtime.Config(exampleConfig()), runtime.Declare(),
		runtime.HTTPAddr(""), runtime.Registerer(prometheus.NewRegistry()), runtime.Logger(slog.New(slog.DiscardHandler)), handler(done),
	)
	if err != nil {
		fmt.Println(err)
		return
	}
	p, err := runtime.NewPublisher[string](r, "greetings", runtime.PublisherConfig{Codec: codec.Raw})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, text := range texts {
		if err := p.Publish(ctx, text); err != nil {
			fmt.Println(err)
		}
	}
	if err := r.Run(ctx); err != nil {
		fmt.Println(err)
	}
}

// A handler sees how often a message was retried.
func ExampleHandle() {
	runExample(func(done func()) runtime.Option {
		return runtime.Handle("greetings", runtime.HandlerFunc[string](func(_ context.Context, text string, m *runtime.Metadata) runtime.Outcome {
			if m.RetryCount == 0 {
				fmt.Println(text, "- not today")
				return runtime.Retry.Because("in a bad mood")
			}
			fmt.Println(text, "- hello to you")
			done()
			return runtime.Ack
		}), runtime.Codec(codec.Raw))
	}, "hello")
	// Output:
	// hello - not today
	// hello - hello to you
}

// A handler that returns an error: nil is Ack, an error made by an outcome's Err is that outcome, any other is a retry.
func ExampleErrorFunc() {
	errRude := errors.New("that was rude")
	runExample(func(done func()) runtime.Option {
		return runtime.Handle("greetings", runtime.ErrorFunc[string](func(_ context.Context, text string, m *runtime.Metadata) error {
			defer done()
			fmt.Println(text, "is rejected")
			return runtime.Reject.Err(errRude)
		}), runtime.Codec(codec.Raw))
	}, "hey you")
	// Output:
	// hey you is rejected
}

// A dead handler learns why a message died.
func ExampleHandleDead() {
	runExample(func(done func()) runtime.Option {
		both := struct {
			runtime.Handler[string]
			runtime.DeadHandler[string]
		}{
			runtime.HandlerFunc[string](func(context.Context, string, *runtime.Metadata) runtime.Outcome {
				return runtime.Reject.Because("nobody is here")
			}),
			runtime.DeadHandlerFunc[string](func(_ context.Context, text string, m *runtime.DeadMetadata) {
				fmt.Println(text, "died:", m.Death.Reason, "-", m.Death.Detail)
				done()
			}),
		}
		return runtime.Handle[string]("greetings", both, runtime.Codec(codec.Raw))
	}, "hello")
	// Output:
	// hello died: rejected - nobody is here
}

// Every call of an audited handler is recorded.
func ExampleAudited() {
	sink := runtime.AuditSinkFunc(func(_ context.Context, records []runtime.AuditRecord) error {
		for _, r := range records {
			fmt.Printf("%s: %s %q: %s (%s)\n", r.Topology, r.Event, r.Payload, r.Outcome, r.Reason)
		}
		return nil
	})
	runExample(func(done func()) runtime.Option {
		h := runtime.HandlerFunc[string](func(context.Context, string, *runtime.Metadata) runtime.Outcome {
			done()
			return runtime.Ack.Because("said hello")
		})
		return runtime.Handle("greetings", runtime.Audited[string](h, sink, runtime.AuditConfig{}), runtime.Codec(codec.Raw))
	}, "hello")
	// Output:
	// greetings: handled "hello": ack (said hello)
}

// A batch reports each message by its index.
func ExamplePublisher_PublishBatch() {
	r, err := runtime.New(runtime.Drivers(memory.Driver(memory.New(memory.Options{}))), runtime.Config(exampleConfig()), runtime.Declare(),
		runtime.Registerer(prometheus.NewRegistry()), runtime.Handle("greetings", runtime.HandlerFunc[string](func(context.Context, string, *runtime.Metadata) runtime.Outcome { return runtime.Ack })))
	if err != nil {
		fmt.Println(err)
		return
	}
	p, err := runtime.NewPublisher[string](r, "greetings", runtime.PublisherConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = p.PublishBatch(context.Background(), []runtime.Item[string]{
		{Value: "hello"},
		{Value: "hi", Options: []runtime.PublishOption{runtime.WithHeader("x-shove-retry-count", 3)}},
		{Value: "good day", Options: []runtime.PublishOption{runtime.WithHeader("language", "en"), runtime.WithType("greeting")}},
	})
	if e, ok := errors.AsType[*runtime.PublishError](err); ok {
		fmt.Println("confirmed:", e.Confirmed)
		for _, f := range e.Failed {
			fmt.Printf("failed: %d: %v\n", f.Index, f.Err)
		}
	}
	// Output:
	// confirmed: [0 2]
	// failed: 1: reserved header: "x-shove-retry-count": use a name of your own
}

// A program's main is one call. The configuration is the file that SHOVE_CONFIG names.
func ExampleMain() {
	_ = os.Unsetenv(config.EnvPath)
	code := runtime.Main(
		runtime.Drivers(memory.Default),
		runtime.Logger(slog.New(slog.DiscardHandler)),
		runtime.Handle("greetings", runtime.HandlerFunc[string](func(context.Context, string, *runtime.Metadata) runtime.Outcome { return runtime.Ack })),
	)
	fmt.Println("exit code without a configuration:", code)
	// Output:
	// exit code without a configuration: 1
}
