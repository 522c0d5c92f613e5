package nats

import (
	"encoding/json"
	"os"
	"os/exec"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"

	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/natsserver"
)

// binaryVar names a nats-server to run the tests on instead of the one in this process. Tests that configure the server
// take the one in this process all the same.
const binaryVar = "SHOVE_TEST_NATS_SERVER"

// serverSchedules says whether the server of the tests has scheduled messages.
func serverSchedules(t testing.TB) bool {
	t.Helper()
	binary := os.Getenv(binaryVar)
	if binary == "" {
		return true
	}
	out, err := exec.Command(binary, "-v").Output() // nats-server: v2.11.17
	if err != nil {
		t.Fatalf("%s -v: %v", binary, err)
	}
	text := strings.Fields(string(out))
	return len(text) > 0 && parseVersion(text[len(text)-1]).schedules()
}

// testServer is a NATS server with JetStream and a store on disk: in this process, or the one that binaryVar names.
type testServer struct {
	*natsserver.Server
	t      testing.TB
	binary string

	mu  sync.Mutex
	cmd *exec.Cmd
}

func startServer(t testing.TB, change ...func(*server.Options)) *testServer {
	t.Helper()
	s := &testServer{t: t, Server: natsserver.New(t, change...)}
	if len(change) == 0 {
		s.binary = os.Getenv(binaryVar)
	}
	s.start()
	t.Cleanup(s.stop)
	return s
}

func withoutJetStream(o *server.Options) { o.JetStream, o.StoreDir = false, "" }

func (s *testServer) start() {
	s.t.Helper()
	if s.binary != "" {
		s.startBinary()
		return
	}
	s.Run(s.t)
}

func (s *testServer) startBinary() {
	s.t.Helper()
	cmd := exec.Command(s.binary, "-a", s.Options.Host, "-p", strconv.Itoa(s.Options.Port), "-js", "-sd", s.Options.StoreDir, "-n", s.Options.ServerName)
	if err := cmd.Start(); err != nil {
		s.t.Fatalf("start %s: %v", s.binary, err)
	}
	s.mu.Lock()
	s.cmd = cmd
	s.mu.Unlock()
	testenv.Eventually(s.t, 20*time.Second, func() error {
		c, err := natsgo.Connect("nats://" + s.addr())
		if err == nil {
			c.Close()
		}
		return err
	})
}

func (s *testServer) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd != nil {
		_ = s.cmd.Process.Signal(syscall.SIGTERM)
		_ = s.cmd.Wait()
		s.cmd = nil
	}
	s.Stop()
}

func (s *testServer) restart() {
	s.t.Helper()
	s.stop()
	s.start()
}

func (s *testServer) addr() string { return s.Addr() }

// connect is a connection without shove, which comes back after restarts.
func (s *testServer) connect(opts ...natsgo.Option) *natsgo.Conn {
	s.t.Helper()
	opts = append(opts, natsgo.MaxReconnects(-1), natsgo.ReconnectWait(20*time.Millisecond))
	c, err := natsgo.Connect("nats://"+s.addr(), opts...)
	if err != nil {
		s.t.Fatalf("connect: %v", err)
	}
	s.t.Cleanup(c.Close)
	return c
}

func endpointOf(t testing.TB, servers ...string) json.RawMessage {
	t.Helper()
	out, err := json.Marshal(map[string]any{"servers": servers})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// outstanding counts what a consumer has delivered and neither got an acknowledgement for nor is about to deliver
// again. The API's num_ack_pending counts the latter as well, so that this looks into the server.
func (s *testServer) outstanding(stream, consumer string) int {
	acc, err := s.Running().LookupAccount(server.DEFAULT_GLOBAL_ACCOUNT)
	if err != nil {
		s.t.Fatalf("account: %v", err)
	}
	jsa := member(reflect.ValueOf(acc), "js").Elem()
	if jsa.IsNil() {
		return 0
	}
	unlock := lock(jsa)
	one := member(jsa, "streams").Elem().MapIndex(reflect.ValueOf(stream))
	unlock()
	if !one.IsValid() {
		return 0
	}
	unlock = lock(one)
	k := member(one, "consumers").Elem().MapIndex(reflect.ValueOf(consumer))
	unlock()
	if !k.IsValid() {
		return 0
	}
	unlock = lock(k)
	defer unlock()
	pending := member(k, "pending").Elem()
	n := pending.Len()
	queue := member(k, "rdq").Elem()
	for i := range queue.Len() {
		if pending.MapIndex(queue.Index(i)).IsValid() {
			n--
		}
	}
	return n
}

// member is a pointer to an unexported field of the struct behind v.
func member(v reflect.Value, name string) reflect.Value {
	f := reflect.NewAt(v.Type().Elem(), v.UnsafePointer()).Elem().FieldByName(name)
	return reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr()))
}

// lock read-locks the struct behind v by its own mutex.
func lock(v reflect.Value) (unlock func()) {
	mu := member(v, "mu").Interface().(*sync.RWMutex)
	mu.RLock()
	return mu.RUnlock
}
