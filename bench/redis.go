package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/redis"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/config"
)

// redisURLVar names the Redis server to measure on.
const redisURLVar = "SHOVE_TEST_REDIS_URL"

// onRedis is a queue on Redis, filled anew before each run.
type onRedis struct {
	setup
	c    *goredis.Client
	opts *goredis.Options
	n    int
}

func newOnRedis(prefetch, n int, holds ...time.Duration) (*onRedis, error) {
	text := os.Getenv(redisURLVar)
	if text == "" {
		return nil, errors.New("set " + redisURLVar + " to a Redis server, or run make bench")
	}
	u, err := url.Parse(text)
	if err != nil {
		return nil, errors.New(redisURLVar + " does not parse")
	}
	opts, err := goredis.ParseURL(text)
	if err != nil {
		return nil, errors.New(redisURLVar + " does not parse")
	}
	endpoint, err := json.Marshal(map[string]any{"addresses": []string{u.Host}})
	if err != nil {
		return nil, err
	}
	opts.Protocol, opts.DisableIdentity = 2, true
	credentials := func(context.Context) (broker.Credentials, error) {
		return broker.Credentials{Username: opts.Username, Password: opts.Password}, nil
	}
	driver := redis.Driver
	driver.OpenClient = func(ctx context.Context, cfg broker.Config) (broker.Client, error) {
		cfg.Credentials = credentials
		return redis.Driver.OpenClient(ctx, cfg)
	}
	r := &onRedis{c: goredis.NewClient(opts), opts: opts, n: n, setup: setup{driver: driver, kind: config.Broker{Kind: "redis", Endpoint: endpoint}, prefetch: prefetch, holds: holds}}
	a, err := redis.Driver.OpenAdmin(context.Background(), broker.Config{Endpoint: endpoint, Credentials: credentials})
	if err != nil {
		return nil, err
	}
	defer a.Close(context.Background())
	objects, err := driver.Objects(r.declaration())
	if err != nil {
		return nil, err
	}
	var names []string
	for _, o := range objects {
		names = append(names, o.Name)
	}
	if _, err := a.Delete(context.Background(), names); err != nil {
		return nil, err
	}
	return r, a.Declare(context.Background(), r.declaration())
}

// Keys of the queue "bench".
const (
	benchStream = "{bench}"
	benchGroup  = "bench"
	benchHold   = "{bench}-by-hand"
)

// fill empties the stream and appends n messages.
func (r *onRedis) fill() error {
	ctx := context.Background()
	if err := errors.Join(r.c.Del(ctx, benchStream, benchHold).Err(), r.c.XGroupCreateMkStream(ctx, benchStream, benchGroup, "0").Err()); err != nil {
		return err
	}
	for left := r.n; left > 0; {
		p := r.c.Pipeline()
		for range min(left, 1000) {
			p.XAdd(ctx, &goredis.XAddArgs{Stream: benchStream, Values: []any{"payload", body}})
		}
		if _, err := p.Exec(ctx); err != nil {
			return err
		}
		left -= min(left, 1000)
	}
	return nil
}

// ours consumes everything with the runtime.
func (r *onRedis) ours(handle func(*runtime.Metadata) runtime.Outcome) run {
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

// byHand runs a hand-written loop over batches of messages until it has seen n of them to their end.
func (r *onRedis) byHand(batch func(ctx context.Context, c *goredis.Client, ms []goredis.XMessage) (done int, err error)) run {
	return func() (sample, error) {
		if err := r.fill(); err != nil {
			return sample{}, err
		}
		ctx := context.Background()
		stop := watch(r.n)
		c := goredis.NewClient(r.opts)
		defer c.Close()
		args := &goredis.XReadGroupArgs{Group: benchGroup, Consumer: "hand", Streams: []string{benchStream, ">"}, Count: int64(r.prefetch), Block: time.Second}
		for done := 0; done < r.n; {
			out, err := c.XReadGroup(ctx, args).Result()
			if errors.Is(err, goredis.Nil) {
				continue
			}
			if err != nil {
				return sample{}, err
			}
			n, err := batch(ctx, c, out[0].Messages)
			if err != nil {
				return sample{}, err
			}
			done += n
		}
		return stop(), nil
	}
}

func redisAckEach(ctx context.Context, c *goredis.Client, ms []goredis.XMessage) (int, error) {
	for i := range ms {
		if err := c.XAck(ctx, benchStream, benchGroup, ms[i].ID).Err(); err != nil {
			return 0, err
		}
	}
	return len(ms), nil
}

func redisAckPipelined(ctx context.Context, c *goredis.Client, ms []goredis.XMessage) (int, error) {
	p := c.Pipeline()
	for i := range ms {
		p.XAck(ctx, benchStream, benchGroup, ms[i].ID)
	}
	_, err := p.Exec(ctx)
	return len(ms), err
}

// A retry and a mover as one would write them: one script for each message, in a pipeline.
var (
	handRetry = goredis.NewScript(`
		local t = redis.call('TIME')
		redis.call('ZADD', KEYS[2], t[1] * 1000 + math.ceil(t[2] / 1000) + ARGV[3], ARGV[2] .. ARGV[4])
		redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
		return redis.call('XDEL', KEYS[1], ARGV[2])`)
	handMove = goredis.NewScript(`
		local t = redis.call('TIME')
		local due = redis.call('ZRANGE', KEYS[2], '-inf', t[1] * 1000 + math.floor(t[2] / 1000), 'BYSCORE', 'LIMIT', 0, 100)
		for _, m in ipairs(due) do
			redis.call('XADD', KEYS[1], '*', 'payload', string.sub(m, -128), 'x-shove-retry-count', '1')
			redis.call('ZREM', KEYS[2], m)
		end
		return #due`)
)

// retryOnce sends every message through a sorted set once.
func (r *onRedis) retryOnce(delay time.Duration) run {
	return func() (sample, error) {
		ctx := context.Background()
		if err := errors.Join(handRetry.Load(ctx, r.c).Err(), handMove.Load(ctx, r.c).Err()); err != nil {
			return sample{}, err
		}
		var ended atomic.Bool
		moved := make(chan error, 1)
		go func() {
			for !ended.Load() {
				n, err := handMove.EvalSha(ctx, r.c, []string{benchStream, benchHold}).Int()
				if err != nil {
					moved <- err
					return
				}
				if n < 100 {
					time.Sleep(delay / 2)
				}
			}
			moved <- nil
		}()
		s, err := r.byHand(func(ctx context.Context, c *goredis.Client, ms []goredis.XMessage) (done int, err error) {
			p := c.Pipeline()
			for i := range ms {
				if ms[i].Values["x-shove-retry-count"] != nil {
					done++
					p.XAck(ctx, benchStream, benchGroup, ms[i].ID)
					continue
				}
				handRetry.EvalSha(ctx, p, []string{benchStream, benchHold}, benchGroup, ms[i].ID, delay.Milliseconds(), ms[i].Values["payload"])
			}
			_, err = p.Exec(ctx)
			return done, err
		})()
		ended.Store(true)
		return s, errors.Join(err, <-moved)
	}
}

// redisPairs are the comparisons on Redis.
func redisPairs() []lazyPair {
	var all []lazyPair
	for _, prefetch := range []int{100, 500} {
		where := fmt.Sprintf("redis, prefetch %d", prefetch)
		acks := func(goal float64, base func(context.Context, *goredis.Client, []goredis.XMessage) (int, error)) func(string) (pair, error) {
			return func(name string) (pair, error) {
				r, err := newOnRedis(prefetch, 50_000)
				if err != nil {
					return pair{}, err
				}
				return pair{name: name, goal: goal, ours: r.ours(noop), baseline: r.byHand(base)}, nil
			}
		}
		all = append(all,
			lazyPair{where + ", vs ack each", acks(3, redisAckEach)},
			lazyPair{where + ", vs pipelined acks", acks(0.85, redisAckPipelined)},
			lazyPair{where + ", retried once", func(name string) (pair, error) {
				const delay = 10 * time.Millisecond
				r, err := newOnRedis(prefetch, 20_000, delay)
				if err != nil {
					return pair{}, err
				}
				return pair{name: name, goal: 0.75, ours: r.ours(retryFirst), baseline: r.retryOnce(delay)}, nil
			}})
	}
	return slices.Clip(all)
}

// redisHeld is late by what consumers wait between two looks for due messages, which is at most 100 ms.
func redisHeld() held {
	return held{name: "redis, 100,000 held", p99: 120 * time.Millisecond, make: func() (setup, error) {
		r, err := newOnRedis(500, 0, heldFor)
		if err != nil {
			return setup{}, err
		}
		return r.setup, nil
	}}
}
