// Package natsserver runs a NATS server with JetStream in the test's own process, with its store on disk.
package natsserver

import (
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"go.uber.org/goleak"

	"github.com/shove-dev/shove/internal/testenv"
)

// ready is how long a server may take to begin.
const ready = 20 * time.Second

// Server is a server that can be stopped and started again with what it stored.
type Server struct {
	// Options are those of the next start.
	Options server.Options

	mu      sync.Mutex
	running *server.Server
}

// New makes a server that does not run yet, on a free port of loopback and with a store in a folder of the test's own.
func New(tb testing.TB, change ...func(*server.Options)) *Server {
	tb.Helper()
	s := &Server{Options: server.Options{
		Host: "127.0.0.1", Port: testenv.FreePort(tb), JetStream: true, StoreDir: filepath.Join(tb.TempDir(), "store"),
		NoLog: true, NoSigs: true, ServerName: "test",
	}}
	for _, c := range change {
		c(&s.Options)
	}
	return s
}

// Start runs a server until the test ends.
func Start(tb testing.TB, change ...func(*server.Options)) *Server {
	tb.Helper()
	s := New(tb, change...)
	s.Run(tb)
	tb.Cleanup(s.Stop)
	return s
}

// Run starts the server.
func (s *Server) Run(tb testing.TB) {
	tb.Helper()
	opts := s.Options // the server writes into its options
	srv, err := server.NewServer(&opts)
	if err != nil {
		tb.Fatalf("make a NATS server: %v", err)
	}
	srv.Start()
	if !srv.ReadyForConnections(ready) {
		srv.Shutdown()
		tb.Fatal("the NATS server is not ready")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running = srv
}

// Stop ends the server. Safe to call twice.
func (s *Server) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running != nil {
		s.running.Shutdown()
		s.running.WaitForShutdown()
		s.running = nil
	}
}

// Running is the server itself; nil while it is stopped.
func (s *Server) Running() *server.Server {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running
}

// Addr is host and port.
func (s *Server) Addr() string { return fmt.Sprintf("%s:%d", s.Options.Host, s.Options.Port) }

// URL is the address as a Broker's spec takes it.
func (s *Server) URL() string { return "nats://" + s.Addr() }

// Goroutines are those that a server has for its streams and consumers, to be told from what a test leaves behind while
// the server runs.
func Goroutines() []goleak.Option {
	const prefix = "github.com/nats-io/nats-server/v2/server"
	var out []goleak.Option
	for _, f := range []string{
		".(*consumer).loopAndGatherMsgs", ".(*consumer).processInboundAcks", ".(*consumer).processInboundNextMsgReqs", ".(*consumerFileStore).flushLoop",
		".(*fileStore).flushLoop", ".(*fileStore).flushStreamStateLoop", ".(*msgBlock).flushLoop", ".(*stream).internalLoop", ".(*stream).signalConsumersLoop",
		"/ats.Register.func1",
	} {
		out = append(out, goleak.IgnoreAnyFunction(prefix+f))
	}
	return out
}
