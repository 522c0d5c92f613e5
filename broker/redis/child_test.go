package redis

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/brokertest"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/codec"
	"github.com/shove-dev/shove/runtime/config"
)

// childVar holds a childConfig as JSON: the test binary is then a consumer process that tests may kill.
const childVar = "SHOVE_TEST_REDIS_CHILD"

// childConfig says what a consumer process does.
type childConfig struct {
	Server     string // host:port
	Queue      string
	Prefetch   int
	CrashLimit uint32
	// KillAt ends the process with SIGKILL when it gets to this step for the KillOn-th time; empty: never.
	KillAt string
	KillOn int
	// Poison is a body that ends the process with SIGKILL whenever its handler runs.
	Poison string
}

// Steps between receive and acknowledgement at which a consumer process is killed, beside those of the suite.
const stepHandler = "handler"

func TestMain(m *testing.M) {
	if text := os.Getenv(childVar); text != "" {
		if err := childMain(text); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// The tests mostly wait, so that more of them run at once than there are processors.
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	testenv.Main(m)
}

// childMain consumes until it is killed or gets SIGTERM. It prints a line for each call of the handler.
func childMain(text string) error {
	var cfg childConfig
	if err := json.Unmarshal([]byte(text), &cfg); err != nil {
		return err
	}
	k := &killer{step: cfg.KillAt, on: int64(cfg.KillOn)}
	w, err := startWire(cfg.Server, func(s brokertest.Step) { k.reached(string(s)) })
	if err != nil {
		return err
	}
	silence = 2500 * time.Millisecond
	one, outcome, timeout := uint32(1), "Retry", config.Duration(2*time.Second)
	ms := func(n int) config.Duration { return config.Duration(time.Duration(n) * time.Millisecond) }
	settings := &config.RuntimeConfig{
		APIVersion: config.APIVersion, Kind: config.Kind,
		Brokers: []config.Broker{{Name: "b", Kind: "redis", Endpoint: endpointOf(standalone, w.addr())}},
		Topologies: []config.Topology{{Name: "orders", Broker: "b", Queue: cfg.Queue, DeadLetter: cfg.Queue + "-dlq",
			HoldQueues: []config.Hold{{Delay: ms(100)}, {Delay: ms(400)}}}},
		Consumers: []config.Consumer{{Group: "workers", Topology: "orders", Options: config.Options{Prefetch: &cfg.Prefetch, CrashLimit: &cfg.CrashLimit, MaxRetries: &one,
			HandlerTimeout: &timeout, HandlerTimeoutOutcome: &outcome}}},
	}
	r, err := runtime.New(runtime.Drivers(Driver), runtime.Config(settings), runtime.HTTPAddr(""), runtime.Registerer(prometheus.NewRegistry()),
		runtime.Logger(slog.New(slog.NewTextHandler(os.Stderr, nil))),
		runtime.Handle[[]byte]("orders", childHandler{k, cfg.Poison}, runtime.Codec(codec.Raw)))
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return r.Run(ctx)
}

// childHandler retries bodies that end in 0 once and rejects those that end in 5.
type childHandler struct {
	killer *killer
	poison string
}

func (h childHandler) Handle(_ context.Context, body []byte, m *runtime.Metadata) runtime.Outcome {
	fmt.Printf("call %s %d\n", body, m.RetryCount)
	h.killer.reached(stepHandler)
	switch {
	case string(body) == h.poison:
		kill()
	case strings.HasSuffix(string(body), "0") && m.RetryCount == 0:
		return runtime.Retry
	case strings.HasSuffix(string(body), "5"):
		return runtime.Reject
	}
	return runtime.Ack
}

func kill() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// killer ends the process when it gets to a step, before it goes on.
type killer struct {
	step string
	on   int64
	seen atomic.Int64
}

func (k *killer) reached(step string) {
	if step == k.step && k.seen.Add(1) == k.on {
		kill()
	}
}

// process is a running consumer process.
type process struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed when the process ended and calls is complete
	calls  []string      // "call body retries"
	err    error
}

func startChild(t *testing.T, cfg childConfig) *process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	c := &process{cmd: exec.Command(exe), exited: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), childVar+"="+string(text))
	c.cmd.Stderr = t.Output()
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.cmd.Process.Kill(); <-c.exited })
	go func() {
		defer close(c.exited)
		for s := bufio.NewScanner(out); s.Scan(); {
			c.calls = append(c.calls, s.Text())
		}
		c.err = c.cmd.Wait()
	}()
	return c
}

func (c *process) alive() bool {
	select {
	case <-c.exited:
		return false
	default:
		return true
	}
}

// killed waits until the process was killed, and returns the calls of its handler.
func (c *process) killed(t *testing.T) []string {
	t.Helper()
	testenv.Eventually(t, time.Minute, func() error {
		if c.alive() {
			return errors.New("the consumer process lives")
		}
		return nil
	})
	if status := c.cmd.ProcessState.Sys().(syscall.WaitStatus); !status.Signaled() || status.Signal() != syscall.SIGKILL {
		t.Fatalf("the consumer process ended by itself: %v, after %v", c.err, c.calls)
	}
	return c.calls
}

// stop drains the process, which must exit without an error, and returns the calls of its handler.
func (c *process) stop(t *testing.T) []string {
	t.Helper()
	if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-c.exited
	if c.err != nil {
		t.Errorf("the consumer process: %v", c.err)
	}
	return c.calls
}

// eventuallyDrained waits until nothing is in the main stream and held.
func (b *bench) eventuallyDrained(d broker.Declaration) {
	b.t.Helper()
	testenv.Eventually(b.t, time.Minute, func() error {
		for range 2 { // a message may go from one that was not looked at to one that was
			if n := b.raw.XLen(b.t.Context(), main(d)).Val(); n > 0 {
				return fmt.Errorf("%d entries", n)
			}
			for i := range d.Topology.Holds {
				if n := b.raw.ZCard(b.t.Context(), holdKey(d, i)).Val(); n > 0 {
					return fmt.Errorf("%d held", n)
				}
			}
		}
		return nil
	})
}

// deadBodies are the bodies of the dead letters with their reasons.
func (b *bench) deadBodies(d broker.Declaration) map[string][]string {
	b.t.Helper()
	all, err := b.raw.XRange(b.t.Context(), dead(d), "-", "+").Result()
	if err != nil {
		b.t.Fatal(err)
	}
	out := map[string][]string{}
	for _, x := range all {
		body := x.Values[payloadField].(string)
		out[body] = append(out[body], fmt.Sprint(x.Values[header.DeathReason]))
	}
	return out
}

func (b *bench) childConfig(t *testing.T, d broker.Declaration) childConfig {
	return childConfig{Server: testenv.Redis(t).Addr(t), Queue: d.Topology.Queue, Prefetch: 10}
}

// SIGKILL at each step between receive and acknowledgement: nothing is lost, a message is handled twice only if it was
// in flight, and none is both dead and handled again: copy and acknowledgement are one step.
func TestA9_KilledConsumer(t *testing.T) {
	t.Parallel()
	steps := []string{stepHandler}
	for _, s := range []brokertest.Step{brokertest.StepReceived, brokertest.StepBeforeCopy, brokertest.StepCopied, brokertest.StepBeforeAck, brokertest.StepAcked} {
		steps = append(steps, string(s))
	}
	for _, step := range steps {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			d := b.declare(orders(t))
			const n = 40
			b.publish(d, messages("m", n)...)
			cfg := b.childConfig(t, d)
			cfg.KillAt, cfg.KillOn = step, 2
			calls := startChild(t, cfg).killed(t)
			cfg.KillAt = ""
			second := startChild(t, cfg)
			b.eventuallyDrained(d)
			calls = append(calls, second.stop(t)...)

			perID := map[string]map[string]int{}
			for _, c := range calls {
				var id, retries string
				if _, err := fmt.Sscanf(c, "call %s %s", &id, &retries); err != nil {
					t.Fatalf("%q: %v", c, err)
				}
				if perID[id] == nil {
					perID[id] = map[string]int{}
				}
				perID[id][retries]++
			}
			twice := 0
			deaths := b.deadBodies(d)
			for i := range n {
				id := fmt.Sprintf("m%03d", i)
				last := "0"
				if strings.HasSuffix(id, "0") {
					last = "1"
				}
				if perID[id][last] == 0 {
					t.Errorf("%s was not handled to its end: %v", id, perID[id])
				}
				for _, times := range perID[id] {
					twice += times - 1
				}
				want := 0
				if strings.HasSuffix(id, "5") {
					want = 1
				}
				if len(deaths[id]) != want {
					t.Errorf("%s is %d times in the dead-letter queue, want %d", id, len(deaths[id]), want)
				}
			}
			if twice > cfg.Prefetch {
				t.Errorf("%d calls too many: more than the %d in flight when the process was killed", twice, cfg.Prefetch)
			}
			t.Logf("%d calls twice", twice)
		})
	}
}

// rabbitmq/rabbitmq-server#11937 on Redis: one message kills the process again and again.
func TestC10_PoisonIsBounded(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	d := b.declare(orders(t))
	b.publish(d, messages("m", 10)...)
	cfg := b.childConfig(t, d)
	cfg.Poison, cfg.CrashLimit = "m004", 10
	handled := map[string]int{}
	note := func(calls []string) {
		for _, c := range calls {
			handled[strings.Fields(c)[1]]++
		}
	}
	kills := 0
	for over := false; !over; {
		if kills > 20 {
			t.Fatalf("still fatal after %d kills: %v", kills, handled)
		}
		c := startChild(t, cfg)
		testenv.Eventually(t, time.Minute, func() error {
			if over = slices.Contains(b.deadBodies(d)["m004"], "crash_loop"); !over && c.alive() {
				return errors.New("the consumer process lives, and the poison is not dead")
			}
			return nil
		})
		if over {
			b.eventuallyDrained(d)
			note(c.stop(t))
		} else {
			note(c.killed(t))
			kills++
		}
	}
	if handled["m004"] != int(cfg.CrashLimit) {
		t.Errorf("the poison was handled %d times, want the crash limit %d", handled["m004"], cfg.CrashLimit)
	}
	for i := range 10 {
		if id := fmt.Sprintf("m%03d", i); handled[id] == 0 {
			t.Errorf("%s was never handled", id)
		}
	}
	t.Logf("%d kills, calls %v", kills, handled)
}
