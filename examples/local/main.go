// Local is a consumer with its broker in the same process: nothing is installed, and messages are in files. Stop it with
// Ctrl-C in the middle and start it again: it goes on where it was.
//
//	go run ./examples/local
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/embedded"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/config"
)

// Job is the message.
type Job struct {
	Number int `json:"number"`
}

func main() {
	dir := filepath.Join(os.TempDir(), "shove-local")
	if len(os.Args) > 1 {
		dir = os.Args[1]
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, dir); err != nil {
		fmt.Fprintln(os.Stderr, "local:", err)
		os.Exit(1)
	}
}

// settings is what the operator would hand to the process as a file.
func settings() *config.RuntimeConfig {
	return &config.RuntimeConfig{
		APIVersion: config.APIVersion, Kind: config.Kind,
		Brokers: []config.Broker{{Name: "local", Kind: "nats"}},
		Topologies: []config.Topology{{
			Name: "jobs", Broker: "local", Queue: "jobs", DeadLetter: "jobs-dlq",
			HoldQueues: []config.Hold{{Delay: config.Duration(500 * time.Millisecond)}},
		}},
		Consumers: []config.Consumer{{Group: "workers", Topology: "jobs"}},
		Publish:   []config.Publish{{Topology: "jobs"}},
	}
}

const jobs = 10

// run works off what is left of an earlier run, or ten new jobs.
func run(ctx context.Context, out io.Writer, dir string) error {
	srv, err := embedded.Start(ctx, embedded.Options{Dir: dir})
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		if err := srv.Stop(ctx); err != nil {
			fmt.Fprintln(out, err)
		}
	}()
	fmt.Fprintf(out, "messages are in %s\n", dir)
	working, done := context.WithCancel(ctx)
	defer done()
	w := &worker{out: out, done: done, left: filepath.Join(dir, "left")}
	r, err := runtime.New(
		runtime.Drivers(srv.Driver()), runtime.Config(settings()), runtime.Declare(),
		runtime.HTTPAddr(""), runtime.Registerer(prometheus.NewRegistry()), runtime.Logger(slog.New(slog.DiscardHandler)),
		runtime.Handle[Job]("jobs", w),
	)
	if err != nil {
		return err
	}
	publisher, err := runtime.NewPublisher[Job](r, "jobs", runtime.PublisherConfig{})
	if err != nil {
		return err
	}
	begun, err := w.begin()
	if err != nil {
		return err
	}
	ran := make(chan error, 1)
	go func() { ran <- r.Run(working) }()
	for n := 1; !begun && n <= jobs; n++ {
		if err := publisher.Publish(ctx, Job{Number: n}); err != nil {
			done()
			return errors.Join(err, <-ran)
		}
	}
	return <-ran
}

// worker does jobs, and keeps how many are left in a file beside the messages.
type worker struct {
	out  io.Writer
	done func()
	left string

	mu sync.Mutex
	n  int
}

// begin says whether an earlier run has left jobs.
func (w *worker) begin() (bool, error) {
	b, err := os.ReadFile(w.left)
	if err == nil {
		_, err = fmt.Sscan(string(b), &w.n)
	}
	if err == nil && w.n > 0 {
		fmt.Fprintf(w.out, "%d jobs are left of an earlier run\n", w.n)
		return true, nil
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return false, err
	}
	w.n = jobs
	return false, w.save()
}

func (w *worker) save() error { return os.WriteFile(w.left, fmt.Appendln(nil, w.n), 0o600) }

// Handle does a job; every third one fails first and is held.
func (w *worker) Handle(ctx context.Context, j Job, m *runtime.Metadata) runtime.Outcome {
	select {
	case <-ctx.Done():
		return runtime.FromError(ctx.Err())
	case <-time.After(100 * time.Millisecond):
	}
	if j.Number%3 == 0 && m.RetryCount == 0 {
		w.say("job %d fails, and is held", j.Number)
		return runtime.Retry
	}
	w.say("job %d is done, call %d", j.Number, m.RetryCount+1)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.n--
	if err := w.save(); err != nil {
		return runtime.FromError(err)
	}
	if w.n <= 0 {
		w.done()
	}
	return runtime.Ack
}

func (w *worker) say(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	fmt.Fprintf(w.out, format+"\n", args...)
}
