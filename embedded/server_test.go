package embedded_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/embedded"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/topology"
)

// asHolder makes the test binary a process that holds a store until it is killed.
const asHolder = "SHOVE_TEST_HOLD_STORE"

func TestMain(m *testing.M) {
	if dir := os.Getenv(asHolder); dir != "" {
		if _, err := embedded.Start(context.Background(), embedded.Options{Dir: dir}); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("ready")
		select {}
	}
	var ignore []goleak.Option
	for _, f := range []string{ // what nats-server leaves behind for a moment
		"server.(*consumer).loopAndGatherMsgs", "server.(*consumer).processInboundAcks", "server.(*consumer).processInboundNextMsgReqs",
		"server.(*consumerFileStore).flushLoop", "server.(*fileStore).flushLoop", "server.(*fileStore).flushStreamStateLoop",
		"server.(*msgBlock).flushLoop", "server.(*stream).internalLoop", "server.(*stream).signalConsumersLoop", "server/ats.Register.func1",
	} {
		ignore = append(ignore, goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/"+f))
	}
	testenv.Main(m, ignore...)
}

func start(t *testing.T, o embedded.Options) *embedded.Server {
	t.Helper()
	if o.Dir == "" {
		o.Dir = filepath.Join(t.TempDir(), "store")
	}
	s, err := embedded.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stop(t, s) })
	return s
}

func stop(t *testing.T, s *embedded.Server) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := s.Stop(ctx); err != nil {
		t.Errorf("stop: %v", err)
	}
}

func orders(t *testing.T) broker.Declaration {
	t.Helper()
	top, err := topology.Derive(topology.Spec{Queue: "orders", Holds: []time.Duration{100 * time.Millisecond}, DeadLetter: true})
	if err != nil {
		t.Fatal(err)
	}
	return broker.Declaration{Topology: top}
}

// declare declares orders and publishes n messages.
func declare(t *testing.T, d broker.Driver, n int) broker.Server {
	t.Helper()
	a, err := d.OpenAdmin(t.Context(), broker.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = a.Close(context.Background()) }()
	if err := a.Declare(t.Context(), orders(t)); err != nil {
		t.Fatal(err)
	}
	c, err := d.OpenClient(t.Context(), broker.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close(context.Background()) }()
	p, err := c.Publisher(t.Context(), orders(t))
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		if err := p.Publish(t.Context(), []broker.Message{{ID: fmt.Sprintf("m%d", i), Body: []byte("x")}}); err != nil {
			t.Fatal(err)
		}
	}
	s, err := a.Server(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func ready(t *testing.T, d broker.Driver) int64 {
	t.Helper()
	a, err := d.OpenAdmin(t.Context(), broker.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = a.Close(context.Background()) }()
	ds, err := a.Depths(t.Context(), []string{"orders"})
	if err != nil {
		t.Fatal(err)
	}
	return ds[0].Ready.N
}

func TestMessagesAndIdentitySurviveARestart(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "store")
	first := start(t, embedded.Options{Dir: dir})
	was := declare(t, first.Driver(), 5)
	stop(t, first)
	second := start(t, embedded.Options{Dir: dir})
	if n := ready(t, second.Driver()); n != 5 {
		t.Errorf("%d messages after the restart, want 5", n)
	}
	if is := declare(t, second.Driver(), 0); is.ID != was.ID || is.ID == "" {
		t.Errorf("the server was %q and is %q", was.ID, is.ID)
	}
	if other := declare(t, start(t, embedded.Options{}).Driver(), 0); other.ID == was.ID {
		t.Errorf("two servers are both %q", was.ID)
	}
}

func TestOneProcessHasTheStore(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "store")
	holder := exec.Command(os.Args[0])
	holder.Env = append(os.Environ(), asHolder+"="+dir)
	out, err := holder.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	kill := func() { _ = holder.Process.Kill(); _ = holder.Wait() }
	defer kill()
	said := make([]byte, 100)
	if n, err := out.Read(said); err != nil || !strings.HasPrefix(string(said[:n]), "ready") {
		t.Fatalf("the holder says %q, %v", said, err)
	}
	_, err = embedded.Start(t.Context(), embedded.Options{Dir: dir})
	if !errors.Is(err, embedded.ErrInUse) || !strings.Contains(err.Error(), fmt.Sprintf("process %d", holder.Process.Pid)) || !strings.Contains(err.Error(), dir) {
		t.Fatalf("a second process on the store gets %v", err)
	}
	kill() // the lock goes with its process, however that ends
	s := start(t, embedded.Options{Dir: dir})
	if _, err := embedded.Start(t.Context(), embedded.Options{Dir: dir}); !errors.Is(err, embedded.ErrInUse) {
		t.Errorf("a second server in the same process gets %v", err)
	}
	declare(t, s.Driver(), 1)
}

// What does not fit is refused, and what is there stays.
func TestSizeIsBounded(t *testing.T) {
	t.Parallel()
	s := start(t, embedded.Options{MaxBytes: 1 << 20})
	declare(t, s.Driver(), 1)
	c, err := s.Driver().OpenClient(t.Context(), broker.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close(context.Background()) }()
	p, err := c.Publisher(t.Context(), orders(t))
	if err != nil {
		t.Fatal(err)
	}
	stored := int64(1)
	for err == nil && stored < 100 { // the server counts what it wrote a moment later
		if err = p.Publish(t.Context(), []broker.Message{{ID: fmt.Sprintf("big%d", stored), Body: make([]byte, 100<<10)}}); err == nil {
			stored++
		}
	}
	if stored > 20 || stored < 5 {
		t.Errorf("%d messages of 100 KiB fit into 1 MiB", stored)
	}
	if n := ready(t, s.Driver()); n != stored {
		t.Errorf("%d messages are there, %d were confirmed", n, stored)
	}
}

func connect(s *embedded.Server, user, password string) (*natsgo.Conn, error) {
	return natsgo.Connect(s.URL(), natsgo.UserInfo(user, password), natsgo.NoReconnect(), natsgo.ErrorHandler(func(*natsgo.Conn, *natsgo.Subscription, error) {}))
}

func TestUsers(t *testing.T) {
	t.Parallel()
	admin, app := embedded.User{Name: "admin", Password: "one"}, embedded.User{Name: "app", Password: "two", Workload: true}
	s := start(t, embedded.Options{Users: []embedded.User{admin, app}})
	declare(t, s.Driver(), 1)
	if _, err := natsgo.Connect(s.URL(), natsgo.NoReconnect()); err == nil {
		t.Error("a client without a password may connect")
	}
	c, err := connect(s, "app", "two")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	js, err := jetstream.New(c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := js.Publish(ctx, "orders", []byte("x")); err != nil {
		t.Errorf("a workload may not publish: %v", err)
	}
	k, err := js.Consumer(ctx, "orders", "orders")
	if err != nil {
		t.Fatal(err)
	}
	if m, err := k.Next(jetstream.FetchMaxWait(5 * time.Second)); err != nil || m.Ack() != nil {
		t.Errorf("a workload may not consume: %v", err)
	}
	denied, no := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer no()
	if err := js.DeleteStream(denied, "orders"); err == nil {
		t.Error("a workload may delete a stream")
	}

	admin.Password = "three"
	if err := s.SetUsers([]embedded.User{admin}); err != nil {
		t.Fatal(err)
	}
	for user, password := range map[string]string{"app": "two", "admin": "one"} {
		if c, err := connect(s, user, password); err == nil {
			c.Close()
			t.Errorf("%s may connect after its password changed, or it was taken away", user)
		}
	}
	testenv.Eventually(t, 10*time.Second, func() error {
		if !c.IsClosed() {
			return errors.New("the connection of a user that is gone is still open")
		}
		return nil
	})
	if n := ready(t, s.Driver()); n != 1 {
		t.Errorf("%d messages are there after users changed, want 1", n)
	}
	if err := s.SetUsers([]embedded.User{{Name: "x"}}); err == nil {
		t.Error("a user without a password is accepted")
	}
}

func TestStopTellsClientsAndProbes(t *testing.T) {
	t.Parallel()
	health := fmt.Sprintf("127.0.0.1:%d", testenv.FreePort(t))
	s := start(t, embedded.Options{Users: []embedded.User{{Name: "admin", Password: "one"}}, HealthAddr: health})
	declare(t, s.Driver(), 1)
	probe := func(path string) int {
		res, err := http.Get("http://" + health + path)
		if err != nil {
			return 0
		}
		res.Body.Close()
		return res.StatusCode
	}
	for _, path := range []string{"/healthz", "/readyz"} {
		if code := probe(path); code != http.StatusOK {
			t.Errorf("%s: %d", path, code)
		}
	}
	told := make(chan struct{})
	c, err := natsgo.Connect(s.URL(), natsgo.UserInfo("admin", "one"), natsgo.NoReconnect(),
		natsgo.LameDuckModeHandler(func(*natsgo.Conn) { close(told) }))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ended := s.Done()
	stop(t, s)
	for name, ch := range map[string]<-chan struct{}{"the client was not told that the server ends": told, "Done is not closed": ended} {
		select {
		case <-ch:
		case <-time.After(5 * time.Second):
			t.Error(name)
		}
	}
	if code := probe("/healthz"); code != 0 {
		t.Errorf("probes are answered after the end: %d", code)
	}
	http.DefaultClient.CloseIdleConnections()
}

func TestStopIsBounded(t *testing.T) {
	t.Parallel()
	s := start(t, embedded.Options{Users: []embedded.User{{Name: "admin", Password: "one"}}})
	for range 20 {
		c, err := connect(s, "admin", "one")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	began := time.Now()
	if err := s.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("cut off at once, it took %s", took)
	}
}

func TestWrongOptions(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	taken := start(t, embedded.Options{})
	var port int
	if _, err := fmt.Sscanf(taken.URL(), "nats://127.0.0.1:%d", &port); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		o    embedded.Options
		says string
	}{
		"no folder":     {embedded.Options{}, "Dir is needed"},
		"a file":        {embedded.Options{Dir: file}, "store"},
		"negative":      {embedded.Options{Dir: t.TempDir(), MaxBytes: -1}, "MaxBytes"},
		"two of a name": {embedded.Options{Dir: t.TempDir(), Users: []embedded.User{{Name: "a", Password: "1"}, {Name: "a", Password: "2"}}}, "twice"},
		"port taken":    {embedded.Options{Dir: t.TempDir(), Port: port}, fmt.Sprint(port)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, err := embedded.Start(t.Context(), c.o)
			if err == nil {
				stop(t, s)
				t.Fatal("it starts")
			}
			if !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "Password") {
				t.Errorf("says %q, want %q in it", err, c.says)
			}
		})
	}
}
