package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/nats"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/config"
)

// serverVar makes this program a NATS server that stores in the folder it names.
const serverVar = "SHOVE_BENCH_NATS_STORE"

// serveNATS runs a server until its standard input ends, and prints its address.
func serveNATS(dir string) error {
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: dir, NoLog: true, NoSigs: true})
	if err != nil {
		return err
	}
	s.Start()
	if !s.ReadyForConnections(20 * time.Second) {
		return errors.New("the server is not ready")
	}
	fmt.Println(s.ClientURL())
	_, err = io.Copy(io.Discard, os.Stdin)
	s.Shutdown()
	s.WaitForShutdown()
	return err
}

// natsServer is a server in a process of its own, so that what it costs is not counted.
var natsServer struct {
	url  string
	stop func()
}

func natsURL() (string, error) {
	if natsServer.url != "" {
		return natsServer.url, nil
	}
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "shove-bench-nats-")
	if err != nil {
		return "", err
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), serverVar+"="+dir)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return "", err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	natsServer.stop = func() {
		_ = in.Close()
		_ = cmd.Wait()
		_ = os.RemoveAll(dir)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		natsServer.stop()
		return "", fmt.Errorf("start a NATS server: %w", err)
	}
	natsServer.url = strings.TrimSpace(line)
	return natsServer.url, nil
}

// onNATS is a queue on NATS, filled anew before each run.
type onNATS struct {
	setup
	url string
	n   int
}

func newOnNATS(prefetch, n int, holds ...time.Duration) (*onNATS, error) {
	url, err := natsURL()
	if err != nil {
		return nil, err
	}
	endpoint, err := json.Marshal(map[string][]string{"servers": {url}})
	if err != nil {
		return nil, err
	}
	o := &onNATS{url: url, n: n, setup: setup{driver: nats.Driver, kind: config.Broker{Kind: "nats", Endpoint: endpoint}, prefetch: prefetch, holds: holds}}
	ctx := context.Background()
	a, err := nats.Driver.OpenAdmin(ctx, broker.Config{Endpoint: endpoint})
	if err != nil {
		return nil, err
	}
	defer a.Close(ctx)
	if _, err := a.Delete(ctx, []string{"bench", "bench-dlq"}); err != nil {
		return nil, err
	}
	return o, a.Declare(ctx, o.declaration())
}

func (o *onNATS) connect() (*natsgo.Conn, jetstream.JetStream, error) {
	c, err := natsgo.Connect(o.url)
	if err != nil {
		return nil, nil, err
	}
	js, err := jetstream.New(c, jetstream.WithPublishAsyncMaxPending(1000))
	return c, js, err
}

// fill publishes n messages and waits for every confirm.
func (o *onNATS) fill() error {
	c, js, err := o.connect()
	if err != nil {
		return err
	}
	defer c.Close()
	for i := range o.n {
		if _, err := js.PublishAsync("bench", body); err != nil {
			return err
		}
		if i%500 != 499 && i != o.n-1 {
			continue
		}
		select {
		case <-js.PublishAsyncComplete():
		case <-time.After(time.Minute):
			return errors.New("fill: not confirmed")
		}
	}
	s, err := js.Stream(context.Background(), "bench")
	if err != nil {
		return err
	}
	if n := s.CachedInfo().State.Msgs; n != uint64(o.n) {
		return fmt.Errorf("fill: the stream has %d messages, want %d", n, o.n)
	}
	return nil
}

func (o *onNATS) ours(handle func(*runtime.Metadata) runtime.Outcome) run {
	return func() (sample, error) {
		if err := o.fill(); err != nil {
			return sample{}, err
		}
		c := newCountdown(o.n)
		return o.consume(o.n, func(m *runtime.Metadata) runtime.Outcome {
			r := handle(m)
			if r.Verdict == runtime.Ack.Verdict {
				c.tick()
			}
			return r
		}, c.done, nil)
	}
}

// byHand consumes with the client library's own loop until every message was acknowledged.
func (o *onNATS) byHand(handle func(js jetstream.JetStream, m jetstream.Msg) (acked bool, err error)) run {
	return func() (sample, error) {
		if err := o.fill(); err != nil {
			return sample{}, err
		}
		c, js, err := o.connect()
		if err != nil {
			return sample{}, err
		}
		defer c.Close()
		k, err := js.Consumer(context.Background(), "bench", "bench")
		if err != nil {
			return sample{}, err
		}
		left := newCountdown(o.n)
		failed := make(chan error, 1)
		stop := watch(o.n)
		loop, err := k.Consume(func(m jetstream.Msg) {
			acked, err := handle(js, m)
			if err != nil {
				select {
				case failed <- err:
				default:
				}
			}
			if acked {
				left.tick()
			}
		}, jetstream.PullMaxMessages(o.prefetch))
		if err != nil {
			return sample{}, err
		}
		defer loop.Stop()
		select {
		case <-left.done:
		case err := <-failed:
			return sample{}, err
		case <-time.After(2 * time.Minute):
			return sample{}, errors.New("not done within 2 minutes")
		}
		if err := c.Flush(); err != nil { // the acknowledgements
			return sample{}, err
		}
		return stop(), nil
	}
}

// ackAsync acknowledges without waiting for an answer.
func ackAsync(_ jetstream.JetStream, m jetstream.Msg) (bool, error) { return true, m.Ack() }

// scheduleOnce holds every message once: a scheduled copy with a confirm, the original acknowledged when it is there,
// with as many on their way as the prefetch allows.
func (o *onNATS) scheduleOnce() func(jetstream.JetStream, jetstream.Msg) (bool, error) {
	type flight struct {
		m jetstream.Msg
		f jetstream.PubAckFuture
	}
	flights := make(chan flight, o.prefetch)
	go func() {
		for x := range flights {
			<-x.f.Ok()
			_ = x.m.Ack()
		}
	}()
	n := 0
	return func(js jetstream.JetStream, m jetstream.Msg) (bool, error) {
		if m.Headers().Get("x-shove-retry-count") != "" {
			return true, m.Ack()
		}
		n++
		f, err := js.PublishMsgAsync(&natsgo.Msg{Subject: fmt.Sprintf("bench-hold-10ms.at.%d", n), Data: m.Data(), Header: natsgo.Header{
			"x-shove-retry-count": {"1"}, "Nats-Schedule-Target": {"bench"},
			"Nats-Schedule": {"@at " + time.Now().Add(10*time.Millisecond).UTC().Format(time.RFC3339Nano)},
		}})
		if err != nil {
			return false, err
		}
		flights <- flight{m, f}
		return false, nil
	}
}

// natsPairs are the comparisons on NATS. Each declares its stream when it is about to run.
func natsPairs() []lazyPair {
	var all []lazyPair
	for _, prefetch := range []int{100, 500} {
		where := fmt.Sprintf("nats, prefetch %d", prefetch)
		all = append(all,
			lazyPair{where + ", no-op handler", func(name string) (pair, error) {
				o, err := newOnNATS(prefetch, 100_000)
				if err != nil {
					return pair{}, err
				}
				return pair{name: name, goal: 0.9, ours: o.ours(noop), baseline: o.byHand(ackAsync)}, nil
			}},
			lazyPair{where + ", retried once", func(name string) (pair, error) {
				o, err := newOnNATS(prefetch, 20_000, 10*time.Millisecond)
				if err != nil {
					return pair{}, err
				}
				return pair{name: name, goal: 0.75, ours: o.ours(retryFirst), baseline: func() (sample, error) {
					return o.byHand(o.scheduleOnce())()
				}}, nil
			}})
	}
	return all
}

// natsHeld has a floor: the server looks for due messages every 250 ms.
func natsHeld() held {
	return held{name: "nats, 100,000 held", p99: 300 * time.Millisecond, make: func() (setup, error) {
		o, err := newOnNATS(500, 0, heldFor)
		if err != nil {
			return setup{}, err
		}
		return o.setup, nil
	}}
}
