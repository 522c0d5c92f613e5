package rabbitmq

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
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
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/brokertest"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/codec"
	"github.com/shove-dev/shove/runtime/config"
)

// childVar holds a childConfig as JSON: the test binary is then a consumer process that tests may kill.
const childVar = "SHOVE_TEST_RABBITMQ_CHILD"

// childConfig says what a consumer process does.
type childConfig struct {
	Server     string // host:port
	Vhost      string
	User       string
	Password   string
	QueueType  string
	Prefetch   int
	CrashLimit uint32
	// KillAt ends the process with SIGKILL when it gets to this step for the KillOn-th time; empty: never.
	KillAt brokertest.Step
	KillOn int
	// Poison is a body that ends the process with SIGKILL whenever its handler runs.
	Poison string
}

// stepHandler is the step at which the handler runs; the others are those of brokertest.
const stepHandler brokertest.Step = "handler"

func TestMain(m *testing.M) {
	if text := os.Getenv(childVar); text != "" {
		if err := childMain(text); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		os.Exit(0)
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
	w, err := newWire(cfg.Server, k.reached)
	if err != nil {
		return err
	}
	endpoint, err := json.Marshal(map[string]string{"url": "amqp://" + w.addr() + "/" + cfg.Vhost})
	if err != nil {
		return err
	}
	driver := Driver
	open := driver.OpenClient
	driver.OpenClient = func(ctx context.Context, c broker.Config) (broker.Client, error) {
		c.Credentials = credentials(broker.Credentials{Username: cfg.User, Password: cfg.Password})
		return open(ctx, c)
	}
	one := uint32(1)
	ms := func(n int) config.Duration { return config.Duration(time.Duration(n) * time.Millisecond) }
	settings := &config.RuntimeConfig{
		APIVersion: config.APIVersion, Kind: config.Kind,
		Brokers: []config.Broker{{Name: "b", Kind: "rabbitmq", Endpoint: endpoint}},
		Topologies: []config.Topology{{Name: "orders", Broker: "b", Queue: "orders", DeadLetter: "orders-dlq", Options: json.RawMessage(`{"queueType":"` + cfg.QueueType + `"}`),
			HoldQueues: []config.Hold{{Delay: ms(100)}, {Delay: ms(400)}}}},
		Consumers: []config.Consumer{{Group: "workers", Topology: "orders", Options: config.Options{Prefetch: &cfg.Prefetch, CrashLimit: &cfg.CrashLimit, MaxRetries: &one}}},
	}
	r, err := runtime.New(runtime.Drivers(driver), runtime.Config(settings), runtime.HTTPAddr(""), runtime.Registerer(prometheus.NewRegistry()),
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

// killer ends the process at a step, before the frame that would end the step goes on.
type killer struct {
	step brokertest.Step
	on   int64
	seen atomic.Int64
}

func (k *killer) reached(step brokertest.Step) bool {
	if step == k.step && k.seen.Add(1) == k.on {
		kill()
	}
	return false
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

// eventuallyDrained waits until queues have had no ready message for longer than a tier's delay.
func (b *bench) eventuallyDrained(queues ...string) {
	b.t.Helper()
	const quiet = 600 * time.Millisecond
	since := time.Now()
	testenv.Eventually(b.t, time.Minute, func() error {
		for _, q := range queues {
			if n := b.live(q).Messages; n > 0 {
				since = time.Now()
				return fmt.Errorf("queue %q has %d messages", q, n)
			}
		}
		if time.Since(since) < quiet {
			return errors.New("empty for a moment only")
		}
		return nil
	})
}

func (b *bench) childConfig(queueType string) childConfig {
	user := userOf(b.t, b.vhost.URL)
	return childConfig{Server: hostOf(b.t, b.vhost.URL), Vhost: b.vhost.Name, User: user.Username, Password: user.Password, QueueType: queueType, Prefetch: 10}
}

// SIGKILL at each step between receive and acknowledgement: nothing is lost, and a message is handled or stored twice
// only if it was in flight.
func TestA9_KilledConsumer(t *testing.T) {
	bothTypes(t, func(t *testing.T, options string) {
		for _, step := range []brokertest.Step{brokertest.StepReceived, stepHandler, brokertest.StepBeforeCopy, brokertest.StepCopied, brokertest.StepBeforeAck} {
			t.Run(string(step), func(t *testing.T) {
				b := newBench(t)
				b.declare(orders(), options)
				const n = 40
				b.publish("orders", numbered(n)...)
				cfg := b.childConfig(strings.Split(options, `"`)[3])
				cfg.KillAt, cfg.KillOn = step, 3
				calls := startChild(t, cfg).killed(t)
				cfg.KillAt = ""
				second := startChild(t, cfg)
				b.eventuallyDrained("orders", "orders-hold-100ms")
				calls = append(calls, second.stop(t)...)
				if left := b.contents("orders"); len(left) > 0 {
					t.Errorf("%d messages are left after the drain", len(left))
				}

				perID := map[string]map[string]int{}
				for _, c := range calls {
					var id string
					var retries int
					if _, err := fmt.Sscanf(c, "call %s %d", &id, &retries); err != nil {
						t.Fatalf("%q: %v", c, err)
					}
					if perID[id] == nil {
						perID[id] = map[string]int{}
					}
					perID[id][fmt.Sprint(retries)]++
				}
				twice := map[string]int{} // by retry count: a message that is copied twice is handled twice after that, too
				dead := b.contents("orders-dlq")
				deaths := map[string]int{}
				for _, d := range dead {
					deaths[string(d.Body)]++
				}
				for i := range n {
					id := fmt.Sprintf("m%03d", i)
					got := perID[id]
					last := "0"
					if strings.HasSuffix(id, "0") {
						last = "1"
					}
					if got[last] == 0 {
						t.Errorf("%s was not handled to its end: %v", id, got)
					}
					for retries, times := range got {
						twice[retries] += times - 1
					}
					if strings.HasSuffix(id, "5") != (deaths[id] > 0) {
						t.Errorf("%s is %d times in the dead-letter queue", id, deaths[id])
					}
				}
				for retries, n := range twice {
					if n > cfg.Prefetch {
						t.Errorf("%d calls too many at retry count %s: more than the %d in flight when the process was killed", n, retries, cfg.Prefetch)
					}
				}
				t.Logf("calls twice, by retry count: %v; %d dead letters", twice, len(dead))
			})
		}
	})
}

func (b *bench) isDead(body string) bool {
	return slices.ContainsFunc(b.contents("orders-dlq"), func(d amqp.Delivery) bool { return string(d.Body) == body })
}

// rabbitmq/rabbitmq-server#11937: one message kills the process again and again.
func TestCase02_PoisonIsBounded(t *testing.T) {
	t.Run("C10", func(t *testing.T) {
		b := newBench(t)
		b.declare(orders(), "")
		b.publish("orders", numbered(10)...)
		cfg := b.childConfig(quorumQueue)
		cfg.Poison, cfg.CrashLimit = "m004", 20
		handled := map[string]int{}
		note := func(calls []string) {
			for _, c := range calls {
				handled[strings.Fields(c)[1]]++
			}
		}
		// It is fatal until the crash limit; the process that finds it over the limit lives.
		kills := 0
		for over := false; !over; {
			if kills > 40 {
				t.Fatalf("still fatal after %d kills: %v", kills, handled)
			}
			c := startChild(t, cfg)
			testenv.Eventually(t, time.Minute, func() error {
				if over = b.isDead("m004"); !over && c.alive() {
					return errors.New("the consumer process lives, and the poison is not dead")
				}
				return nil
			})
			if over {
				b.eventuallyDrained("orders", "orders-hold-100ms")
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
		for _, d := range b.contents("orders-dlq") {
			want := map[string]string{"m004": "crash_loop", "m005": "rejected"}[string(d.Body)]
			if got := fmt.Sprint(d.Headers[header.DeathReason]); got != want {
				t.Errorf("%s died: %s, want only m004 of a crash loop and the rejected m005", d.Body, got)
			}
		}
		t.Logf("%d kills, calls %v", kills, handled)
	})
}
