package kafka

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/brokertest"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/topology"
)

// childVar holds a childConfig as JSON: the test binary is then a consumer process that tests may kill.
const childVar = "SHOVE_TEST_KAFKA_CHILD"

// childConfig says what a consumer process does.
type childConfig struct {
	Servers []string
	Spec    topology.Spec
	Options string
	// KillAt ends the process with SIGKILL when it gets to this step for the KillOn-th time; empty: never.
	KillAt brokertest.Step
	KillOn int
}

// stepHandler is the step at which the handler runs; the others are those of brokertest.
const stepHandler brokertest.Step = "handler"

// childMain consumes until it is killed or gets SIGTERM. It prints a line for each call of the handler.
func childMain(text string) {
	if err := runChild(text); err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
}

func runChild(text string) error {
	var cfg childConfig
	if err := json.Unmarshal([]byte(text), &cfg); err != nil {
		return err
	}
	top, err := topology.Derive(cfg.Spec)
	if err != nil {
		return err
	}
	endpoint, err := json.Marshal(map[string]any{"bootstrapServers": cfg.Servers})
	if err != nil {
		return err
	}
	n := newNetwork(nil)
	var mu sync.Mutex
	left := cfg.KillOn
	n.hit = func(at brokertest.Step) bool {
		mu.Lock()
		defer mu.Unlock()
		if left--; left == 0 {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		n.arm(at)
		return false
	}
	n.arm(cfg.KillAt)
	d := broker.Declaration{Topology: top, Options: json.RawMessage(cfg.Options)}
	rt, err := worker(n.mode().driver(), d, endpoint, slog.NewTextHandler(os.Stderr, nil), func(_ context.Context, body []byte, m *runtime.Metadata) runtime.Outcome {
		fmt.Printf("call %s %d\n", body, m.RetryCount)
		n.reached(stepHandler)
		return outcome(string(body), m.RetryCount)
	})
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return rt.Run(ctx)
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
	must(t, err)
	text, err := json.Marshal(cfg)
	must(t, err)
	c := &process{cmd: exec.Command(exe), exited: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), childVar+"="+string(text))
	c.cmd.Stderr = t.Output()
	out, err := c.cmd.StdoutPipe()
	must(t, err)
	must(t, c.cmd.Start())
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

// killed waits until the process was killed, and returns the calls of its handler.
func (c *process) killed(t *testing.T) []string {
	t.Helper()
	testenv.Eventually(t, time.Minute, func() error {
		select {
		case <-c.exited:
			return nil
		default:
			return errors.New("the consumer process lives")
		}
	})
	if status := c.cmd.ProcessState.Sys().(syscall.WaitStatus); !status.Signaled() || status.Signal() != syscall.SIGKILL {
		t.Fatalf("the consumer process ended by itself: %v, after %v", c.err, c.calls)
	}
	return c.calls
}

// stop drains the process, which must exit without an error, and returns the calls of its handler.
func (c *process) stop(t *testing.T) []string {
	t.Helper()
	must(t, c.cmd.Process.Signal(syscall.SIGTERM))
	<-c.exited
	if c.err != nil {
		t.Errorf("the consumer process: %v", c.err)
	}
	return c.calls
}

// SIGKILL at each step between receive and acknowledgement: nothing is lost, and a message is handled twice only if it
// was in flight, or done since the last commit.
func TestA9_KilledConsumer(t *testing.T) {
	for _, step := range []brokertest.Step{brokertest.StepReceived, stepHandler, brokertest.StepBeforeCopy, brokertest.StepCopied, brokertest.StepBeforeAck, brokertest.StepAcked} {
		t.Run(string(step), func(t *testing.T) {
			onBoth(t, func(t *testing.T, b *bench) { killedConsumer(t, b, step) })
		})
	}
}

func killedConsumer(t *testing.T, b *bench, step brokertest.Step) {
	delay := 100 * time.Millisecond
	d := b.declare(2, delay)
	const n = 60
	for i := range n {
		b.put(d.Topology.Queue, int32(i%2), fmt.Sprintf("m%03d", i))
	}
	cfg := childConfig{Servers: b.raw.servers, Options: string(d.Options), KillAt: step, KillOn: 1,
		Spec: topology.Spec{Queue: b.queue, Holds: []time.Duration{delay}, DeadLetter: true}}
	switch step {
	case stepHandler:
		cfg.KillOn = 20
	case brokertest.StepAcked: // the first commit only says what is in flight
		cfg.KillOn = 2
	}
	var ledger brokertest.Ledger
	for i := range n {
		ledger.Published(fmt.Sprintf("m%03d", i))
	}
	note := func(calls []string) {
		for _, c := range calls {
			f := strings.Fields(c)
			if len(f) != 3 {
				t.Fatalf("%q", c)
			}
			retries, err := strconv.ParseUint(f[2], 10, 32)
			must(t, err)
			ledger.Called(f[1], uint32(retries), 0)
			if outcome(f[1], uint32(retries)).Verdict == runtime.Ack.Verdict {
				ledger.Acked(f[1])
			}
		}
	}
	note(startChild(t, cfg).killed(t))
	ledger.Fault()
	cfg.KillAt = ""
	second := startChild(t, cfg)
	b.drained(d) // when the session of the first one is over
	note(second.stop(t))
	b.books(d, &ledger)
	t.Logf("%d duplicates", ledger.Duplicates())
}

func portsOf(t testing.TB, addrs []string) []int {
	t.Helper()
	var ports []int
	for _, a := range addrs {
		_, p, err := net.SplitHostPort(a)
		must(t, err)
		n, err := strconv.Atoi(p)
		must(t, err)
		ports = append(ports, n)
	}
	return ports
}
