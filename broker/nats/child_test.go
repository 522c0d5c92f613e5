package nats

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	goruntime "runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/brokertest"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/codec"
	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/settle"
)

// childVar holds a childConfig as JSON: the test binary is then a process that tests may kill.
const childVar = "SHOVE_TEST_NATS_CHILD"

// childConfig says what a process does: it is a server if it has a store, else a consumer of "orders".
type childConfig struct {
	Store string
	Port  int

	Server string
	// KillAt ends the process with SIGKILL when it gets to this step for the KillOn-th time; empty: never.
	KillAt string
	KillOn int64
	// Poison is a body that ends the process with SIGKILL whenever its handler runs.
	Poison     string
	CrashLimit uint32
}

// inHandler is a step of its own.
const inHandler = "handler"

func TestMain(m *testing.M) {
	if text := os.Getenv(childVar); text != "" {
		if err := childMain(text); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == strconv.Itoa(goruntime.GOMAXPROCS(0)) { // not given: these tests wait most of the time
		_ = f.Value.Set("6") // a number
	}
	testenv.Main(m)
}

func childMain(text string) error {
	var cfg childConfig
	if err := json.Unmarshal([]byte(text), &cfg); err != nil {
		return err
	}
	if cfg.Store != "" {
		return serve(cfg)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return consumeOrders(ctx, cfg)
}

func serve(cfg childConfig) error {
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: cfg.Port, JetStream: true, StoreDir: cfg.Store, NoLog: true, NoSigs: true})
	if err != nil {
		return err
	}
	s.Start()
	_, err = io.Copy(io.Discard, os.Stdin) // until the parent is gone
	s.Shutdown()
	return err
}

func kill() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// consumeOrders consumes until it is killed or ctx ends. It prints a line for each call of the handler.
func consumeOrders(ctx context.Context, cfg childConfig) error {
	var seen atomic.Int64
	reached := func(at string) bool { return at == cfg.KillAt && seen.Add(1) == cfg.KillOn }
	m := mode{reached: func(c *conn, at step) {
		if reached(string(at)) {
			if at != stepBeforeCopy {
				_ = c.flush(ctx) // what was sent by then is with the server
			}
			kill()
		}
	}}
	one, prefetch := uint32(1), 10
	ms := func(n int) config.Duration { return config.Duration(time.Duration(n) * time.Millisecond) }
	r, err := runtime.New(runtime.Drivers(m.driver()), runtime.HTTPAddr(""), runtime.Registerer(prometheus.NewRegistry()),
		runtime.Logger(slog.New(slog.NewTextHandler(os.Stderr, nil))),
		runtime.Config(&config.RuntimeConfig{
			APIVersion: config.APIVersion, Kind: config.Kind,
			Brokers: []config.Broker{{Name: "b", Kind: "nats", Endpoint: json.RawMessage(`{"servers":["` + cfg.Server + `"]}`)}},
			Topologies: []config.Topology{{Name: "orders", Broker: "b", Queue: "orders", DeadLetter: "orders-dlq", Options: shortAckWait,
				HoldQueues: []config.Hold{{Delay: ms(100)}, {Delay: ms(2000)}}}},
			Consumers: []config.Consumer{{Group: "workers", Topology: "orders", Options: config.Options{Prefetch: &prefetch, CrashLimit: &cfg.CrashLimit, MaxRetries: &one}}},
		}),
		runtime.Handle("orders", runtime.HandlerFunc[[]byte](func(_ context.Context, body []byte, m *runtime.Metadata) runtime.Outcome {
			fmt.Printf("call %s %d\n", body, m.RetryCount)
			switch {
			case reached(inHandler), string(body) == cfg.Poison:
				kill()
			case strings.HasSuffix(string(body), "0") && m.RetryCount == 0:
				return runtime.Retry
			case strings.HasSuffix(string(body), "5"):
				return runtime.Reject
			}
			return runtime.Ack
		}), runtime.Codec(codec.Raw)))
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

// process is a running child.
type process struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed when it ended and lines is complete
	lines  []string
	err    error
}

func startChild(t testing.TB, cfg childConfig) *process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: exec.Command(exe), exited: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), childVar+"="+string(text))
	p.cmd.Stderr = t.Output()
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.cmd.StdinPipe(); err != nil { // ends with this process
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.cmd.Process.Kill(); <-p.exited })
	go func() {
		defer close(p.exited)
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines = append(p.lines, s.Text())
		}
		p.err = p.cmd.Wait()
	}()
	return p
}

func (p *process) alive() bool {
	select {
	case <-p.exited:
		return false
	default:
		return true
	}
}

// killed waits until the process was killed, and returns the calls of its handler.
func (p *process) killed(t testing.TB) []string {
	t.Helper()
	testenv.Eventually(t, time.Minute, func() error {
		if p.alive() {
			return errors.New("the process lives")
		}
		return nil
	})
	if status := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !status.Signaled() || status.Signal() != syscall.SIGKILL {
		t.Fatalf("the process ended by itself: %v, after %v", p.err, p.lines)
	}
	return p.lines
}

// stop drains a consumer, which must exit without an error, and returns the calls of its handler.
func (p *process) stop(t testing.TB) []string {
	t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-p.exited
	if p.err != nil {
		t.Errorf("the consumer process: %v", p.err)
	}
	return p.lines
}

func (b *bench) child() childConfig { return childConfig{Server: "nats://" + b.server.addr()} }

// TestA9_KilledConsumer: SIGKILL at each step between receive and acknowledgement. Nothing is lost, and a message is
// handled twice only if it was in flight.
func TestA9_KilledConsumer(t *testing.T) {
	t.Parallel()
	for _, at := range []string{string(stepReceived), inHandler, string(stepBeforeCopy), string(stepCopied), string(stepBeforeAck), string(stepAcked)} {
		t.Run(at, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			d := b.declare(orders(), string(shortAckWait))
			const n = 40
			b.publish(d, messages("m", n)...)
			cfg := b.child()
			cfg.KillAt, cfg.KillOn = at, 2
			lines := startChild(t, cfg).killed(t)
			cfg.KillAt = ""
			second := startChild(t, cfg)
			b.eventually("orders", ">", 0)
			lines = append(lines, second.stop(t)...)

			calls := map[string]map[int]int{}
			for _, line := range lines {
				var id string
				var retries int
				if _, err := fmt.Sscanf(line, "call %s %d", &id, &retries); err != nil {
					t.Fatalf("%q: %v", line, err)
				}
				if calls[id] == nil {
					calls[id] = map[int]int{}
				}
				calls[id][retries]++
			}
			deaths := map[string]int{}
			for _, m := range b.stored("orders-dlq", ">") {
				deaths[string(m.Data)]++
			}
			twice := 0
			for i := range n {
				id := fmt.Sprintf("m%04d", i)
				last := 0
				if strings.HasSuffix(id, "0") {
					last = 1
				}
				if calls[id][last] == 0 {
					t.Errorf("%s was not handled to its end: %v", id, calls[id])
				}
				for _, times := range calls[id] {
					twice += times - 1
				}
				if want := strings.HasSuffix(id, "5"); want != (deaths[id] == 1) {
					t.Errorf("%s is %d times in the dead-letter queue", id, deaths[id])
				}
			}
			if twice > 10 {
				t.Errorf("%d calls too many: more than were in flight when the process was killed", twice)
			}
			t.Logf("%d calls twice, %d dead letters", twice, len(deaths))
		})
	}
}

// TestC10_PoisonIsBounded: one message kills the process again and again.
func TestC10_PoisonIsBounded(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	d := b.declare(orders(), `{"ackWait": "1s"}`)
	b.publish(d, messages("m", 10)...)
	cfg := b.child()
	cfg.Poison, cfg.CrashLimit = "m0004", 12
	handled := map[string]int{}
	note := func(lines []string) {
		for _, line := range lines {
			handled[strings.Fields(line)[1]]++
		}
	}
	for kills := 0; ; kills++ {
		if kills > 30 {
			t.Fatalf("still fatal after %d kills: %v", kills, handled)
		}
		p := startChild(t, cfg)
		over := false
		testenv.Eventually(t, time.Minute, func() error {
			over = len(b.stored("orders", ">")) == 0
			if p.alive() && !over {
				return errors.New("the process lives, and not all messages are gone")
			}
			return nil
		})
		if p.alive() && over {
			note(p.stop(t))
			break
		}
		note(p.killed(t))
	}
	if n := handled["m0004"]; n != int(cfg.CrashLimit) {
		t.Errorf("the poison was handled %d times, want the crash limit %d", n, cfg.CrashLimit)
	}
	for i := range 10 {
		if id := fmt.Sprintf("m%04d", i); handled[id] == 0 {
			t.Errorf("%s was never handled", id)
		}
	}
	for _, m := range b.stored("orders-dlq", ">") {
		want := map[string]settle.Reason{"m0004": settle.CrashLoop, "m0005": settle.Rejected}[string(m.Data)]
		if got := m.Header.Get(header.DeathReason); got != string(want) {
			t.Errorf("%s died of %q, want %q", m.Data, got, want)
		}
	}
	t.Logf("calls %v", handled)
}

// books keeps the ledger of a run at the seam.
type books struct {
	brokertest.Ledger
	mu       sync.Mutex
	problems []error
	called   int
}

func (k *books) problem(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.problems = append(k.problems, err)
}

// produce publishes until ctx ends, over every outage.
func (k *books) produce(ctx context.Context, p broker.Publisher) {
	for n := 0; ctx.Err() == nil; n++ {
		batch := messages(fmt.Sprintf("p%05d-", n), 10)
		call, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := p.Publish(call, batch)
		cancel()
		failed := map[int]bool{}
		if e, ok := errors.AsType[*broker.PublishError](err); ok {
			for _, it := range e.Items {
				failed[it.Index] = true
			}
		} else if err != nil {
			k.problem(err)
		}
		for i, m := range batch {
			if failed[i] {
				k.Unknown(m.ID)
			} else {
				k.Published(m.ID)
			}
		}
		pause(ctx, 5*time.Millisecond)
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// consume retries one in three once, rejects one in seven and acknowledges the rest, over every outage.
func (k *books) consume(ctx context.Context, c broker.Client, d broker.Declaration) {
	for ctx.Err() == nil {
		s, err := c.Subscribe(ctx, broker.Subscribe{Declaration: d, Prefetch: 20, Concurrency: 20})
		if err != nil {
			pause(ctx, 100*time.Millisecond)
			continue
		}
		for {
			ds, err := s.Receive(ctx)
			if err != nil {
				if errors.Is(err, broker.ErrLost) {
					k.Fault() // it had received messages since the server was killed
				}
				break
			}
			batch := make([]broker.Settlement, len(ds))
			for i, x := range ds {
				batch[i] = k.decide(x)
			}
			k.settle(ctx, s, batch)
		}
		closing, cancel := context.WithTimeout(context.Background(), bound)
		_ = s.Close(closing)
		cancel()
	}
}

func (k *books) decide(x *broker.Delivery) broker.Settlement {
	f := header.Parse(x.Headers)
	k.Called(f.MessageID, f.Retries, 0)
	k.mu.Lock()
	k.called++
	k.mu.Unlock()
	sum := 0
	for _, c := range x.Body {
		sum += int(c)
	}
	switch {
	case sum%3 == 0 && f.Retries == 0:
		return copying(x, holdFor(0, 1))
	case sum%7 == 0:
		return copying(x, settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected, Retries: f.Retries})
	}
	return broker.Settlement{Delivery: x, Action: settle.Action{Kind: settle.Done}}
}

func (k *books) settle(ctx context.Context, s broker.Subscription, batch []broker.Settlement) {
	for len(batch) > 0 && ctx.Err() == nil {
		call, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		err := s.Settle(call, batch)
		cancel()
		failed := map[int]error{}
		if e, ok := errors.AsType[*broker.SettleError](err); ok {
			for _, it := range e.Items {
				failed[it.Index] = it.Err
			}
		} else if err != nil {
			k.problem(err)
		}
		var again []broker.Settlement
		for i, st := range batch {
			switch id := header.Parse(st.Delivery.Headers).MessageID; {
			case failed[i] == nil && st.Action.Kind == settle.Done:
				k.Acked(id)
			case failed[i] != nil && !errors.Is(failed[i], broker.ErrLost):
				again = append(again, st)
			case failed[i] != nil:
				k.Fault()
			}
		}
		batch = again
	}
}

// progress waits for n more calls.
func (k *books) progress(t testing.TB, n int) {
	t.Helper()
	k.mu.Lock()
	from := k.called
	k.mu.Unlock()
	testenv.Eventually(t, time.Minute, func() error {
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.called < from+n {
			return fmt.Errorf("%d calls more", k.called-from)
		}
		return nil
	})
}

// startProcess starts a server in a process of its own.
func startProcess(t testing.TB, cfg childConfig) (addr string, p *process) {
	t.Helper()
	addr = fmt.Sprintf("nats://127.0.0.1:%d", cfg.Port)
	p = startChild(t, cfg)
	testenv.Eventually(t, bound, func() error {
		a, err := Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: endpointOf(t, addr)})
		if err == nil {
			closeBounded(t, a)
		}
		return err
	})
	return addr, p
}

// TestA9_KilledServer: the server is killed and started again, several times, while messages are published and consumed.
func TestA9_KilledServer(t *testing.T) {
	t.Parallel()
	cfg := childConfig{Store: t.TempDir(), Port: testenv.FreePort(t)}
	addr, srv := startProcess(t, cfg)
	a, err := Driver.OpenAdmin(t.Context(), broker.Config{Endpoint: endpointOf(t, addr)})
	if err != nil {
		t.Fatal(err)
	}
	defer closeBounded(t, a)
	d := declaration(t, orders(), string(shortAckWait))
	if err := a.Declare(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	c, err := Driver.OpenClient(t.Context(), broker.Config{Endpoint: endpointOf(t, addr)})
	if err != nil {
		t.Fatal(err)
	}
	defer closeBounded(t, c)
	p, err := c.Publisher(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	k := &books{}
	producing, stopProducing := context.WithCancel(t.Context())
	consuming, stopConsuming := context.WithCancel(t.Context())
	defer stopProducing()
	defer stopConsuming()
	var producers, consumers sync.WaitGroup
	producers.Go(func() { k.produce(producing, p) })
	for range 2 {
		consumers.Go(func() { k.consume(consuming, c, d) })
	}
	for range 3 {
		k.progress(t, 200)
		k.Fault()
		if err := srv.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		srv.killed(t)
		k.Fault()
		_, srv = startProcess(t, cfg)
		k.Fault()
	}
	k.progress(t, 200)
	k.Fault() // what was lost on the way to a consumer is redelivered up to an ack wait later
	stopProducing()
	producers.Wait()
	b := &bench{t: t, raw: rawOn(t, addr)}
	b.eventually("orders", ">", 0)
	stopConsuming()
	consumers.Wait()
	for _, m := range b.stored("orders-dlq", ">") {
		k.Dead(m.Header.Get(header.MessageID))
	}
	for _, err := range k.problems {
		t.Error(err)
	}
	if err := k.Check(); err != nil {
		t.Error(err)
	}
	t.Logf("%d calls, %d duplicates", k.called, k.Duplicates())
}
