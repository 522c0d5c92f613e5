package runtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/runtime/config"
)

// PanicError is a panic outside a handler.
type PanicError struct{ Value any }

func (e *PanicError) Error() string { return fmt.Sprintf("panic outside a handler: %v", e.Value) }

// Exit codes of a process (N2). The highest that applies wins.
const (
	ExitClean         = 0
	ExitConsumerError = 1
	ExitPanic         = 2
	ExitDrainTimeout  = 3
)

// ExitCode is what a process should exit with after Run returned err.
func ExitCode(err error) int {
	if err == nil {
		return ExitClean
	}
	if errors.Is(err, ErrDrainTimeout) {
		return ExitDrainTimeout
	}
	if _, ok := errors.AsType[*PanicError](err); ok {
		return ExitPanic
	}
	return ExitConsumerError
}

// Main runs until SIGTERM or SIGINT, drains, and returns the exit code: os.Exit(runtime.Main(…)).
func Main(opts ...Option) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	r, err := New(opts...)
	if err != nil {
		slog.Error("cannot start", "error", err) //nolint:sloglint // without a runtime there is no logger of ours
		return ExitConsumerError
	}
	if err := r.Run(ctx); err != nil {
		r.log.Error("ended", "error", err)
		return ExitCode(err)
	}
	return ExitClean
}

// Run consumes until the context ends and then drains (N1), or until a consumer's end ends the process (N4). The
// error joins what every consumer ended with; nil is a clean drain.
func (r *Runtime) Run(ctx context.Context) error {
	ctx, end := context.WithCancel(ctx)
	defer end()
	if r.declare {
		if err := r.declareAll(ctx); err != nil {
			return err
		}
	}
	side, stopSide := context.WithCancel(context.WithoutCancel(ctx))
	var sides sync.WaitGroup
	serving, err := r.serveHTTP(side, &sides)
	if err != nil {
		stopSide()
		return err
	}
	r.log.Info("running", "pod", r.pod, "consumers", len(r.consumers), "endpoints", serving, "version", Version)
	r.spawn(&sides, func() { r.followConfig(side) })

	var (
		mu   sync.Mutex
		errs []error
		wg   sync.WaitGroup
	)
	report := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		errs = append(errs, err)
	}
	for _, c := range r.consumers {
		r.spawn(&wg, func() {
			if err := r.keep(ctx, c); err != nil {
				report(fmt.Errorf("consumer of %q: %w", c.topology, err))
				if r.onError == EndProcess {
					end()
				}
			}
		})
	}
	allDone := make(chan struct{})
	go func() { wg.Wait(); close(allDone) }()
	select {
	case <-ctx.Done():
	case err := <-r.failure:
		report(err)
		end()
	case <-r.idle(allDone):
	}
	end()
	select {
	case <-allDone:
	case err := <-r.failure:
		report(err)
		<-allDone
	}
	stopSide()
	sides.Wait()
	r.flushAudits()
	if err := r.closeClients(); err != nil {
		r.log.Warn("could not close every connection", "error", err)
	}
	select {
	case err := <-r.failure:
		report(err)
	default:
	}
	return errors.Join(errs...)
}

// idle ends Run when all consumers ended, unless there were none to begin with: a process that only publishes runs
// until its context ends.
func (r *Runtime) idle(allDone <-chan struct{}) <-chan struct{} {
	if len(r.consumers) == 0 {
		return nil
	}
	return allDone
}

// keep runs a consumer, again and again where its end means that (N4).
func (r *Runtime) keep(ctx context.Context, c *consumer) error {
	b := newBackoff(reconnectFirst, reconnectMax, reconnectJitter)
	for {
		err := c.run(ctx)
		if err == nil || ctx.Err() != nil || r.onError != Restart {
			return err
		}
		wait := b.NextBackOff()
		c.log.Error("consumer ended; beginning anew", "error", err, "wait", wait)
		if !sleep(ctx, wait) {
			return nil
		}
		c.queue.reopen()
	}
}

// declareAll creates what the configuration names, for use without the operator.
func (r *Runtime) declareAll(ctx context.Context) error {
	admins := map[string]broker.Admin{}
	defer func() {
		for _, a := range admins {
			_ = a.Close(context.WithoutCancel(ctx)) // nothing is left to do with it
		}
	}()
	for _, t := range r.config.Topologies {
		decl, err := t.Declaration()
		if err != nil {
			return err
		}
		a, ok := admins[t.Broker]
		if !ok {
			b, _ := r.config.Broker(t.Broker)
			driver, known := r.drivers[b.Kind]
			if !known {
				return fmt.Errorf("topology %q: no driver for %s", t.Name, b.Kind)
			}
			cfg, err := r.connection(b)
			if err != nil {
				return err
			}
			if a, err = driver.OpenAdmin(ctx, cfg); err != nil {
				return fmt.Errorf("connect to broker %q: %w", b.Name, err)
			}
			admins[t.Broker] = a
		}
		if err := a.Declare(ctx, decl); err != nil {
			return fmt.Errorf("declare topology %q: %w", t.Name, err)
		}
	}
	return nil
}

// followConfig takes changes of the configuration file into use.
func (r *Runtime) followConfig(ctx context.Context) {
	if r.configPath == "" {
		return
	}
	config.Watch(ctx, r.configPath, r.currentConfig(), r.log, func(c *config.RuntimeConfig, err error) { r.reload(c, err) })
}
