package runtime

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/runtime/metrics"
	"github.com/shove-dev/shove/settle"
)

// Reconnecting (M1, M2).
const (
	reconnectFirst  = time.Second
	reconnectMax    = 30 * time.Second
	reconnectJitter = 0.5
	// healthyAfter is how long a subscription must stand for the attempts to be forgotten.
	healthyAfter = time.Minute
	// subscribeTimeout bounds one attempt.
	subscribeTimeout = 30 * time.Second
)

// ErrDrainTimeout: handlers were still running when the drain timeout ended; the broker redelivers their messages.
var ErrDrainTimeout = errors.New("drain timeout")

// ErrReconnectLimit: maxReconnectAttempts attempts in a row failed (M2).
var ErrReconnectLimit = errors.New("reconnect limit reached")

// run consumes until the context ends or the consumer does. A nil error is a clean drain.
func (c *consumer) run(ctx context.Context) error {
	watchCtx, stopWatch := context.WithCancel(context.Background())
	poke := make(chan struct{}, 1)
	c.rt.spawn(&c.wg, func() { c.watchDeadlines(watchCtx, poke) })
	defer func() {
		c.retired.Wait()      // bounded by their own drain
		c.abandonRunning(nil) // handlers of sessions that were lost: their outcome goes nowhere, but they must end
		stopWatch()
		c.wg.Wait()
		c.queue.close()
		c.state.set(StateStopped, nil)
		c.meter.Up(false)
	}()
	c.resize(c.settings.Load().options.Concurrency)

	b := newBackoff(reconnectFirst, reconnectMax, reconnectJitter)
	failures := 0
	for {
		if err := c.whilePaused(ctx); err != nil {
			return nil
		}
		began := time.Now()
		err := c.session(ctx, poke)
		switch {
		case err == nil, errors.Is(err, errReload):
			if ctx.Err() != nil {
				return nil
			}
			continue
		case errors.Is(err, ErrDrainTimeout):
			return err
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, broker.ErrUnsupported):
			c.log.Error("the broker cannot do what this consumer needs", "error", err)
			return err
		}
		if time.Since(began) >= healthyAfter {
			failures = 0
			b.Reset()
		}
		failures++
		c.state.set(StateReconnecting, err)
		c.meter.Reconnect()
		c.rt.metrics.BackendError(c.settings.Load().broker.Kind, metrics.Connection)
		if limit := c.settings.Load().options.MaxReconnectAttempts; limit > 0 && failures >= limit {
			err = fmt.Errorf("%w: %d attempts: %w", ErrReconnectLimit, failures, err)
			c.log.Error("giving up on the broker", "error", err)
			return err
		}
		wait := b.NextBackOff()
		c.log.Warn("consuming was interrupted; trying again", "error", err, "attempt", failures, "wait", wait)
		if !sleep(ctx, wait) {
			return nil
		}
	}
}

// errReload ends a session because its settings need another one.
var errReload = errors.New("reload")

// session runs one subscription to its end.
func (c *consumer) session(ctx context.Context, poke chan<- struct{}) error {
	set := c.settings.Load()
	sub, release, err := c.subscribe(ctx, set)
	if err != nil {
		return err
	}
	s := newSession(c, sub, set, release)
	receiveCtx, stopReceiving := context.WithCancel(ctx)
	defer stopReceiving()
	received := s.start(receiveCtx)
	c.state.set(StateConsuming, nil)
	c.meter.Up(true)
	defer c.meter.Up(false)
	c.log.Info("consuming", "queue", s.queue, "prefetch", set.prefetch, "concurrency", set.options.Concurrency)
	for {
		select {
		case err := <-received:
			if ctx.Err() != nil {
				return c.drain(s, set)
			}
			s.close()
			return err
		case <-ctx.Done():
			return c.drain(s, set)
		case <-c.changed:
			select {
			case poke <- struct{}{}:
			default:
			}
			if next := c.settings.Load(); set.needsSession(next) {
				c.log.Info("configuration changed: subscribing anew")
				c.retire(s, set)
				return errReload
			}
		}
	}
}

func (c *consumer) subscribe(ctx context.Context, set *settings) (sub broker.Subscription, release func(), err error) {
	c.state.set(StateConnecting, nil)
	ctx, cancel := context.WithTimeout(ctx, subscribeTimeout)
	defer cancel()
	client, release, err := c.rt.client(ctx, set.broker)
	if err != nil {
		return nil, nil, err
	}
	sub, err = client.Subscribe(ctx, broker.Subscribe{
		Declaration: set.decl, Role: c.role, Prefetch: set.prefetch, Concurrency: min(set.options.Concurrency, set.prefetch),
		Lease: set.lease, InPlace: set.policy.Strategy == settle.InPlace, Consumer: c.rt.pod, Logger: c.log, Lost: c.lost,
	})
	if err != nil {
		release()
	}
	return sub, release, err
}

// drain ends a session at shutdown: it stops fetching, gives back what was not begun, lets running handlers finish
// within the drain timeout and gives up on the rest (N1).
func (c *consumer) drain(s *session, set *settings) error {
	c.state.set(StateDraining, nil)
	ctx, cancel := context.WithTimeout(context.Background(), max(set.options.DrainTimeout, time.Millisecond))
	defer cancel()
	s.stop(ctx)
	err := s.drained(ctx)
	abandoned := 0
	if err != nil {
		abandoned = c.abandonRunning(s)
	}
	s.close()
	if abandoned > 0 {
		return fmt.Errorf("%w: %d handlers of %q were still running after %s", ErrDrainTimeout, abandoned, c.topology, set.options.DrainTimeout)
	}
	c.log.Info("drained")
	return nil
}

// retire drains a session in the background while another one takes over.
func (c *consumer) retire(s *session, set *settings) {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	s.stop(ctx)
	cancel()
	c.rt.spawn(&c.retired, func() {
		limit := max(set.options.DrainTimeout, set.options.HandlerTimeout)
		ctx, cancel := context.WithTimeout(context.Background(), max(limit, time.Millisecond))
		defer cancel()
		if s.drained(ctx) != nil {
			c.abandonRunning(s)
		}
		s.close()
	})
}

// whilePaused blocks while the consumer is paused.
func (c *consumer) whilePaused(ctx context.Context) error {
	for c.settings.Load().paused {
		c.state.set(StatePaused, nil)
		select {
		case <-c.changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return ctx.Err()
}

func newBackoff(first, most time.Duration, jitter float64) *backoff.ExponentialBackOff {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval, b.MaxInterval, b.Multiplier, b.RandomizationFactor = first, most, 2, jitter
	b.Reset()
	return b
}

// sleep waits, or returns false when the context ends first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// consumerState is what /status shows of a consumer.
type consumerState struct {
	mu    sync.Mutex
	state State
	since time.Time
	err   error
	lost  int // attempts to subscribe again
}

func (s *consumerState) set(st State, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state != st {
		s.state, s.since = st, time.Now()
	}
	if st == StateReconnecting {
		s.lost++
	}
	if err != nil || st == StateConsuming {
		s.err = err
	}
}

func (s *consumerState) get() (state State, since time.Time, reconnects int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state == "" {
		return StateConnecting, s.since, s.lost, s.err
	}
	return s.state, s.since, s.lost, s.err
}
