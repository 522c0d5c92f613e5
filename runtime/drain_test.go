package runtime_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/memory"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/config"
)

func TestN1_N3_Drain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		var started, finished atomic.Int32
		stop := f.run(runtime.Handle("orders", runtime.HandlerFunc[order](func(context.Context, order, *runtime.Metadata) runtime.Outcome {
			started.Add(1)
			time.Sleep(10 * time.Second)
			finished.Add(1)
			return runtime.Ack
		}), runtime.Concurrency(2), runtime.Prefetch(6)))
		for id := range 10 {
			f.publish(id)
		}
		time.Sleep(time.Second)
		began := time.Now()
		drains(t, stop)
		if took := time.Since(began); took != 9*time.Second {
			t.Errorf("the drain took %s, want the 9s that the running handlers needed", took)
		}
		if started.Load() != 2 || finished.Load() != 2 {
			t.Errorf("%d started, %d finished, want 2 and 2", started.Load(), finished.Load())
		}
		ready, unsettled := f.server.Counts("orders")
		if ready != 8 || unsettled != 0 { // N3
			t.Errorf("%d ready, %d unsettled, want 8 and 0", ready, unsettled)
		}
		f.wantLeft(map[string]int{"orders-dlq": 0})
	})
}

func TestN1_DrainGivesBackWhatWaitsInPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		h := script(runtime.Retry)
		stop := f.run(runtime.Handle("orders", h, runtime.InPlace()))
		f.publish(1)
		time.Sleep(time.Second)
		drains(t, stop)
		if ready, unsettled := f.server.Counts("orders"); ready != 1 || unsettled != 0 {
			t.Errorf("%d ready, %d unsettled, want 1 and 0", ready, unsettled)
		}
	})
}

func TestN2_ExitCodes(t *testing.T) {
	drain := errors.Join(errors.New("consumer"), runtime.ErrDrainTimeout)
	for name, tt := range map[string]struct {
		err  error
		want int
	}{
		"clean":            {nil, 0},
		"consumer error":   {errors.New("x"), 1},
		"panic":            {errors.Join(errors.New("x"), &runtime.PanicError{Value: "bug"}), 2},
		"drain timeout":    {drain, 3},
		"the highest wins": {errors.Join(&runtime.PanicError{Value: "bug"}, drain), 3},
	} {
		t.Run(name, func(t *testing.T) {
			if got := runtime.ExitCode(tt.err); got != tt.want {
				t.Errorf("got %d, want %d", got, tt.want)
			}
		})
	}
}

// failing is a driver whose subscriptions to one queue fail.
func failing(d broker.Driver, queue string, err error) broker.Driver {
	open := d.OpenClient
	d.OpenClient = func(ctx context.Context, cfg broker.Config) (broker.Client, error) {
		c, openErr := open(ctx, cfg)
		return failingClient{c, queue, err}, openErr
	}
	return d
}

type failingClient struct {
	broker.Client
	queue string
	err   error
}

func (c failingClient) Subscribe(ctx context.Context, s broker.Subscribe) (broker.Subscription, error) {
	if s.Topology.Queue == c.queue {
		if c.err == nil {
			panic("a bug of ours")
		}
		return nil, c.err
	}
	return c.Client.Subscribe(ctx, s)
}

func twoTopologies(c *config.RuntimeConfig) {
	c.Topologies = append(c.Topologies, config.Topology{Name: "refunds", Broker: "mem", Queue: "refunds"})
	c.Consumers = append(c.Consumers, config.Consumer{Group: "refunders", Topology: "refunds", Options: config.Options{MaxReconnectAttempts: new(3)}})
}

func TestN4_OneConsumerEndsWithAnError(t *testing.T) {
	for name, tt := range map[string]struct {
		policy  runtime.OnError
		endsRun bool
	}{"end the process": {runtime.EndProcess, true}, "continue": {runtime.Continue, false}, "restart": {runtime.Restart, false}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, twoTopologies)
				f.driver = failing(f.driver, "refunds", broker.ErrUnavailable)
				log := &logLines{}
				h := script(runtime.Ack)
				stop := f.run(log.option(), runtime.OnConsumerError(tt.policy), runtime.Handle("orders", h), runtime.Handle("refunds", script(runtime.Ack)))
				time.Sleep(10 * time.Minute)
				ended := log.count("drained") > 0
				if ended != tt.endsRun {
					t.Errorf("the process ended: %v, want %v", ended, tt.endsRun)
				}
				if !ended {
					f.publish(1)
					time.Sleep(time.Second)
					if h.count() != 1 {
						t.Error("the other consumer does not go on")
					}
				}
				err := stop()
				if gaveUp := errors.Is(err, runtime.ErrReconnectLimit); gaveUp != (tt.policy != runtime.Restart) {
					t.Errorf("Run: %v", err)
				}
				if n := log.count("ERROR giving up on the broker"); n == 0 || (tt.policy != runtime.Restart && n != 1) {
					t.Errorf("%d errors logged of the reconnect limit", n)
				}
			})
		})
	}
}

func TestN2_PanicOutsideAHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, twoTopologies)
		f.driver = failing(f.driver, "refunds", nil)
		h := script(runtime.Ack)
		stop := f.run(runtime.Handle("orders", h), runtime.Handle("refunds", script(runtime.Ack)))
		time.Sleep(time.Minute)
		if code := runtime.ExitCode(stop()); code != runtime.ExitPanic {
			t.Errorf("exit code %d, want %d", code, runtime.ExitPanic)
		}
	})
}

func TestM1_M2_Reconnecting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *config.RuntimeConfig) { c.Consumers[0].Options.MaxReconnectAttempts = new(5) })
		h := script(runtime.Ack)
		began := time.Now()
		stop := f.run(runtime.Handle("orders", h))
		f.server.Stop()
		time.Sleep(4 * time.Second) // within the five attempts, which take at least 0.5+1+2+4 s
		f.server.Start()
		time.Sleep(10 * time.Second)
		f.publish(1)
		time.Sleep(time.Second)
		if h.count() != 1 {
			t.Fatal("it did not come back")
		}
		time.Sleep(2 * time.Minute) // healthy: the attempts are forgotten
		f.server.Stop()
		time.Sleep(4 * time.Second)
		f.server.Start()
		time.Sleep(10 * time.Second)
		f.publish(2)
		time.Sleep(time.Second)
		if h.count() != 2 {
			t.Fatal("it did not come back the second time")
		}
		f.server.Stop()
		time.Sleep(10 * time.Minute)
		if err := stop(); !errors.Is(err, runtime.ErrReconnectLimit) {
			t.Errorf("Run: %v after %s", err, time.Since(began))
		}
	})
}

func TestM3_LateOutcomeGoesNowhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		var first, later atomic.Int32
		stop := f.run(runtime.Handle("orders", runtime.HandlerFunc[order](func(_ context.Context, o order, m *runtime.Metadata) runtime.Outcome {
			if !m.Redelivered {
				first.Add(1)
				time.Sleep(10 * time.Second)
				return runtime.Reject // too late: its delivery is lost
			}
			later.Add(1)
			return runtime.Ack
		}), runtime.Concurrency(20), runtime.Prefetch(20)))
		for id := range 10 {
			f.publish(id)
		}
		time.Sleep(time.Second)
		f.server.Cut("")
		time.Sleep(time.Minute)
		drains(t, stop)
		if first.Load() != 10 || later.Load() != 10 {
			t.Errorf("%d first and %d later calls, want 10 and 10", first.Load(), later.Load())
		}
		f.wantLeft(map[string]int{"orders": 0, "orders-dlq": 0})
	})
}

func TestC10_OnlyTheGuiltyOneDies(t *testing.T) {
	const guilty = 4
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		// A process that dies is a client that is killed: what it had comes back, counted.
		var dying atomic.Bool
		handled := map[int]int{}
		life := func() {
			dying.Store(false)
			stop := f.run(runtime.OnConsumerError(runtime.Continue), runtime.Handle("orders", runtime.HandlerFunc[order](func(ctx context.Context, o order, _ *runtime.Metadata) runtime.Outcome {
				if o.ID == guilty {
					dying.Store(true)
					f.server.Kill("")
					return runtime.Ack
				}
				if dying.Load() {
					return runtime.Ack // the process is gone already
				}
				handled[o.ID]++
				return runtime.Ack
			}), runtime.Prefetch(10), runtime.Concurrency(1), runtime.MaxReconnectAttempts(1)))
			time.Sleep(time.Minute)
			_ = stop() // a killed process has nothing to say
		}
		setup := f.run(runtime.Handle("orders", script(runtime.Ack)))
		drains(t, setup)
		for id := range 10 {
			f.publish(id)
		}
		for range 25 {
			life()
		}
		dead := f.server.Peek("orders-dlq")
		if len(dead) != 1 || string(dead[0].Body) != `{"id":4}` || dead[0].Headers["x-shove-death-reason"] != "crash_loop" {
			t.Errorf("dead letters: %v", dead)
		}
		for id := range 10 {
			if id != guilty && handled[id] == 0 {
				t.Errorf("innocent message %d was never handled", id)
			}
		}
		f.wantLeft(map[string]int{"orders": 0})
	})
}

func TestConsumerWithoutHandlerIsAStartError(t *testing.T) {
	f := newFixture(t, nil)
	_, err := runtime.New(runtime.Drivers(f.driver), runtime.Config(f.cfg), runtime.Registerer(prometheus.NewRegistry()))
	if err == nil {
		t.Error("accepted")
	}
}

func TestHandlerWithoutConsumerIsNotReady(t *testing.T) {
	f := newFixture(t, nil)
	r, err := runtime.New(runtime.Drivers(memory.Default), runtime.Config(f.cfg), runtime.Registerer(prometheus.NewRegistry()),
		runtime.Handle("orders", script(runtime.Ack)), runtime.Handle("nobody", script(runtime.Ack)))
	if err != nil {
		t.Fatal(err)
	}
	if r.Ready() {
		t.Error("ready although a handler has no consumer")
	}
}

func TestN4_RestartWhileAHandlerRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *config.RuntimeConfig) { c.Consumers[0].Options.MaxReconnectAttempts = new(1) })
		var calls, atOnce, most atomic.Int32
		stop := f.run(runtime.OnConsumerError(runtime.Restart), runtime.Handle("orders", runtime.HandlerFunc[order](func(context.Context, order, *runtime.Metadata) runtime.Outcome {
			n := atOnce.Add(1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			time.Sleep(5 * time.Second) // outlives the loss of its connection
			atOnce.Add(-1)
			calls.Add(1)
			return runtime.Ack
		}), runtime.Concurrency(2)))
		f.publish(1, 2, 3, 4)
		time.Sleep(time.Second)
		f.server.Cut("")
		time.Sleep(time.Minute)
		synctest.Wait()
		drains(t, stop)
		if calls.Load() != 6 || most.Load() > 4 {
			t.Errorf("%d calls, %d at once: want the two overtaken and four more", calls.Load(), most.Load())
		}
		f.wantLeft(map[string]int{"orders": 0, "orders-dlq": 0})
	})
}
