package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/rabbitmq"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/config"
)

// urlVar names the RabbitMQ server to measure on.
const urlVar = "SHOVE_TEST_RABBITMQ_URL"

// onRabbit is a queue on RabbitMQ, filled anew before each run.
type onRabbit struct {
	url string
	setup
	n int
}

func newOnRabbit(queueType string, prefetch, n int, holds ...time.Duration) (*onRabbit, error) {
	url := os.Getenv(urlVar)
	if url == "" {
		return nil, errors.New("set " + urlVar + " to a RabbitMQ server, or run make bench")
	}
	bare, user, password, err := splitURL(url)
	if err != nil {
		return nil, err
	}
	endpoint, err := json.Marshal(map[string]string{"url": bare})
	if err != nil {
		return nil, err
	}
	driver := rabbitmq.Driver
	// The runtime reads credentials from files; here they come from the environment.
	driver.OpenClient = func(ctx context.Context, cfg broker.Config) (broker.Client, error) {
		cfg.Credentials = func(context.Context) (broker.Credentials, error) {
			return broker.Credentials{Username: user, Password: password}, nil
		}
		return rabbitmq.Driver.OpenClient(ctx, cfg)
	}
	r := &onRabbit{url: url, n: n, setup: setup{driver: driver, kind: config.Broker{Kind: "rabbitmq", Endpoint: endpoint},
		options: fmt.Appendf(nil, `{"queueType":%q}`, queueType), prefetch: prefetch, holds: holds}}
	a, err := rabbitmq.Driver.OpenAdmin(context.Background(), broker.Config{Endpoint: endpoint, Credentials: func(context.Context) (broker.Credentials, error) {
		return broker.Credentials{Username: user, Password: password}, nil
	}})
	if err != nil {
		return nil, err
	}
	defer a.Close(context.Background())
	names := []string{"bench", "bench-dlq"}
	for _, h := range r.declaration().Topology.Holds {
		names = append(names, h.Queue)
	}
	if _, err := a.Delete(context.Background(), names); err != nil {
		return nil, err
	}
	return r, a.Declare(context.Background(), r.declaration())
}

func splitURL(url string) (bare, user, password string, err error) {
	u, err := amqp.ParseURI(url)
	if err != nil {
		return "", "", "", err
	}
	return "amqp://" + net.JoinHostPort(u.Host, strconv.Itoa(u.Port)) + "/" + vhostPath(u.Vhost), u.Username, u.Password, nil
}

func vhostPath(v string) string {
	if v == "/" {
		return ""
	}
	return v
}

// fill publishes n messages and waits for every confirm.
func (r *onRabbit) fill() error {
	conn, err := amqp.Dial(r.url)
	if err != nil {
		return err
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	if err := ch.Confirm(false); err != nil {
		return err
	}
	const window = 1000
	var pending []*amqp.DeferredConfirmation
	for range r.n {
		d, err := ch.PublishWithDeferredConfirm("", "bench", false, false, amqp.Publishing{DeliveryMode: amqp.Persistent, Body: body})
		if err != nil {
			return err
		}
		if pending = append(pending, d); len(pending) == window {
			for _, d := range pending {
				if !d.Wait() {
					return errors.New("fill: not confirmed")
				}
			}
			pending = pending[:0]
		}
	}
	for _, d := range pending {
		if !d.Wait() {
			return errors.New("fill: not confirmed")
		}
	}
	return nil
}

// ours consumes everything with the runtime.
func (r *onRabbit) ours(handle func(*runtime.Metadata) runtime.Outcome) run {
	return func() (sample, error) {
		if err := r.fill(); err != nil {
			return sample{}, err
		}
		c := newCountdown(r.n)
		return r.consume(r.n, func(m *runtime.Metadata) runtime.Outcome {
			o := handle(m)
			if o.Verdict == runtime.Ack.Verdict {
				c.tick()
			}
			return o
		}, c.done, nil)
	}
}

// byHand runs a hand-written loop over the deliveries.
func (r *onRabbit) byHand(loop func(conn *amqp.Connection, ch *amqp.Channel, ds <-chan amqp.Delivery) error) run {
	return func() (sample, error) {
		if err := r.fill(); err != nil {
			return sample{}, err
		}
		stop := watch(r.n)
		conn, err := amqp.Dial(r.url)
		if err != nil {
			return sample{}, err
		}
		defer conn.Close()
		ch, err := conn.Channel()
		if err != nil {
			return sample{}, err
		}
		if err := ch.Qos(r.prefetch, 0, false); err != nil {
			return sample{}, err
		}
		ds, err := ch.Consume("bench", "", false, false, false, false, nil)
		if err != nil {
			return sample{}, err
		}
		if err := loop(conn, ch, ds); err != nil {
			return sample{}, err
		}
		return stop(), nil
	}
}

// ackEach acknowledges every message by itself.
func (r *onRabbit) ackEach(_ *amqp.Connection, _ *amqp.Channel, ds <-chan amqp.Delivery) error {
	for range r.n {
		d := <-ds
		if err := d.Ack(false); err != nil {
			return err
		}
	}
	return nil
}

// ackRuns acknowledges what came together with one frame.
func (r *onRabbit) ackRuns(_ *amqp.Connection, ch *amqp.Channel, ds <-chan amqp.Delivery) error {
	most := max(1, r.prefetch/4)
	for n := 0; n < r.n; {
		d := <-ds
		n++
		last, run := d.DeliveryTag, 1
	more:
		for run < most && n < r.n {
			select {
			case d := <-ds:
				last = d.DeliveryTag
				run, n = run+1, n+1
			default:
				break more
			}
		}
		if err := ch.Ack(last, true); err != nil {
			return err
		}
	}
	return nil
}

// retryOnce sends every message through the hold queue once: publish with a confirm, acknowledge the original when it
// is confirmed, with up to prefetch confirms on their way.
func (r *onRabbit) retryOnce(conn *amqp.Connection, ch *amqp.Channel, ds <-chan amqp.Delivery) error {
	pub, err := conn.Channel()
	if err != nil {
		return err
	}
	if err := pub.Confirm(false); err != nil {
		return err
	}
	hold := r.declaration().Topology.Holds[0].Queue
	type flight struct {
		tag     uint64
		confirm *amqp.DeferredConfirmation
	}
	flights := make(chan flight, r.prefetch)
	failed := make(chan error, 1)
	go func() {
		for f := range flights {
			if !f.confirm.Wait() {
				failed <- errors.New("not confirmed")
				return
			}
			if err := ch.Ack(f.tag, false); err != nil {
				failed <- err
				return
			}
		}
		failed <- nil
	}()
	for done := 0; done < r.n; {
		d := <-ds
		if d.Headers["x-shove-retry-count"] != nil {
			done++
			if err := ch.Ack(d.DeliveryTag, false); err != nil {
				return err
			}
			continue
		}
		c, err := pub.PublishWithDeferredConfirm("", hold, true, false, amqp.Publishing{
			Headers: amqp.Table{"x-shove-retry-count": int64(1)}, DeliveryMode: amqp.Persistent, Body: d.Body})
		if err != nil {
			return err
		}
		flights <- flight{d.DeliveryTag, c}
	}
	close(flights)
	return <-failed
}

func noop(*runtime.Metadata) runtime.Outcome { return runtime.Ack }

func retryFirst(m *runtime.Metadata) runtime.Outcome {
	if m.RetryCount == 0 {
		return runtime.Retry
	}
	return runtime.Ack
}

// rabbitPairs are the comparisons on RabbitMQ. Each declares its queues when it is about to run.
func rabbitPairs() []lazyPair {
	var all []lazyPair
	for _, queueType := range []string{"quorum", "classic"} {
		for _, prefetch := range []int{100, 500} {
			each, runs := 0.0, 0.9
			if queueType == "quorum" {
				each = 1.3
			} else {
				each = 1.0
			}
			where := fmt.Sprintf("rabbitmq %s, prefetch %d", queueType, prefetch)
			all = append(all,
				lazyPair{where + ", vs ack each", func(name string) (pair, error) {
					r, err := newOnRabbit(queueType, prefetch, 30_000)
					if err != nil {
						return pair{}, err
					}
					return pair{name: name, goal: each, maxAllocs: 6, ours: r.ours(noop), baseline: r.byHand(r.ackEach)}, nil
				}},
				lazyPair{where + ", vs ack runs", func(name string) (pair, error) {
					r, err := newOnRabbit(queueType, prefetch, 30_000)
					if err != nil {
						return pair{}, err
					}
					return pair{name: name, goal: runs, maxAllocs: 6, ours: r.ours(noop), baseline: r.byHand(r.ackRuns)}, nil
				}},
				lazyPair{where + ", retried once", func(name string) (pair, error) {
					r, err := newOnRabbit(queueType, prefetch, 5_000, 10*time.Millisecond)
					if err != nil {
						return pair{}, err
					}
					return pair{name: name, goal: 0.85, ours: r.ours(retryFirst), baseline: r.byHand(r.retryOnce)}, nil
				}})
		}
	}
	return append(all, lazyPair{"rabbitmq quorum, latency at 3000/s", latencyPair})
}

// latencyPair compares the time from publishing to the handler at a steady 3,000 messages a second.
func latencyPair(name string) (pair, error) {
	const n, rate = 6_000, 3_000
	r, err := newOnRabbit("quorum", 100, n)
	if err != nil {
		return pair{}, err
	}
	return pair{name: name, latency: 1.3,
		ours: func() (sample, error) {
			l := newLatencies(n)
			s, err := r.consume(n, func(m *runtime.Metadata) runtime.Outcome { l.seen(m.Body()); return runtime.Ack }, l.done, func() {
				l.publishAt(r.url, rate)
			})
			return l.into(s), l.err(err)
		},
		baseline: func() (sample, error) {
			l := newLatencies(n)
			b := *r
			b.n = 0 // nothing is filled in before
			s, err := b.byHand(func(_ *amqp.Connection, ch *amqp.Channel, ds <-chan amqp.Delivery) error {
				l.publishAt(r.url, rate)
				for range n {
					d := <-ds
					l.seen(d.Body)
					if err := d.Ack(false); err != nil {
						return err
					}
				}
				return nil
			})()
			s.n = n
			return l.into(s), l.err(err)
		}}, nil
}

func percentile(ds []time.Duration, p float64) time.Duration {
	if len(ds) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(ds))
	return s[min(len(s)-1, int(float64(len(s))*p))]
}
