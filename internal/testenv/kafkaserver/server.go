// Package kafkaserver starts an Apache Kafka broker of its own, one node that is controller too, on free loopback
// ports: from Maven Central's jars on the machine's Java runtime.
//
// The broker ends when the process that started it ends, in whatever way that happens. Nothing here keeps a goroutine,
// so leak checks see none.
package kafkaserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/shove-dev/shove/internal/testenv/freeport"
	"github.com/shove-dev/shove/internal/testenv/rabbitserver"
)

// Listeners of a broker. Whoever comes in without a name, which are clients of Plain and of TLS, is a superuser; every
// other user needs ACLs. A client certificate's user is its whole name: "User:CN=shove-test".
const (
	Plain   = "PLAIN"   // plain text, nobody is asked for a name
	SASL    = "SASL"    // plain text, with PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512
	TLS     = "TLS"     // TLS, nobody is asked for a name
	MTLS    = "MTLS"    // TLS, insists on a client certificate
	SASLTLS = "SASLTLS" // TLS, with PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512

	controller = "CONTROLLER"
)

// User and Password are what the broker accepts with the mechanism PLAIN, as a superuser. Weak is a user of PLAIN without any
// right. Users of SCRAM are made with Kafka's own API.
const (
	User         = "admin"
	Password     = "admin-secret"
	Weak         = "weak"
	WeakPassword = "weak-secret"
)

// ErrNotAvailable is returned by [Start] where there is no Java runtime, or neither the jars nor Maven to bring them.
var ErrNotAvailable = errors.New("no Kafka on this machine: install a Java runtime from version 17 on and Maven " +
	"(packages default-jre-headless and maven), or set SHOVE_TEST_KAFKA_SERVERS")

// Options of a broker. The zero value is a plain one.
type Options struct {
	Secure bool // also listen as SASL, TLS, MTLS and SASLTLS
	// Advertise are addresses that the broker gives out in place of a listener's own, such as a proxy's.
	Advertise map[string]string
	Config    []string // further lines of server.properties
	JVM       []string // further options of the Java runtime, such as [LongLived]
}

// Server is a broker that this process started. Its methods may not be called concurrently.
type Server struct {
	Certificates rabbitserver.Certificates // set with Options.Secure

	opts      Options
	java      string
	classPath string
	classes   string // archive of classes that start sooner; empty: none
	dir       string
	ports     map[string]int
	proc      process
}

// LongLived is for a broker that runs for minutes, or whose speed matters: its code is compiled for speed, where that of
// others is compiled to be ready soon.
const LongLived = "-XX:TieredStopAtLevel=4"

// Start starts a broker and returns when it answers, which takes about 3 s; the first time ever also what the download
// of the jars takes, and a first run for the archive of their classes.
func Start(ctx context.Context, opts Options) (*Server, error) {
	java, err := findJava()
	if err != nil {
		return nil, err
	}
	lib, err := jars(ctx)
	if err != nil {
		return nil, err
	}
	classPath, err := joined(lib)
	if err != nil {
		return nil, err
	}
	return start(ctx, &Server{opts: opts, java: java, classPath: classPath, classes: archive(ctx, java, lib, classPath)})
}

func start(ctx context.Context, s *Server) (*Server, error) {
	dir, err := os.MkdirTemp("", "shove-kafka-")
	if err != nil {
		return nil, fmt.Errorf("making the broker's folder: %w", err)
	}
	s.dir = dir
	if s.ports, err = freePorts(s.listeners()); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	if s.opts.Secure {
		if s.Certificates, err = rabbitserver.NewCertificates(filepath.Join(dir, "tls")); err != nil {
			return nil, errors.Join(err, s.Close())
		}
	}
	if err := s.writeConfig(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	if err := s.Restart(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Server) listeners() []string {
	out := []string{controller, Plain}
	if s.opts.Secure {
		out = append(out, SASL, TLS, MTLS, SASLTLS)
	}
	return out
}

// Restart starts the broker again after [Server.Kill] or [Server.Stop], on the same ports with the same data, and
// returns when it answers.
func (s *Server) Restart(ctx context.Context) error {
	if s.proc.alive() {
		return errors.New("restarting Kafka: it still runs")
	}
	if err := s.proc.start(s); err != nil {
		return fmt.Errorf("starting Kafka: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	for {
		err := s.ready(ctx)
		if err == nil {
			return nil
		}
		if !s.proc.alive() {
			return fmt.Errorf("starting Kafka: it ended: %s", s.Log())
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("starting Kafka: not ready in time: %w: %s", err, s.Log())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// ready returns nil when the broker accepts connections of clients, which it does last of all when it starts, one listener
// after the other.
func (s *Server) ready(ctx context.Context) error {
	for _, name := range s.listeners() {
		c, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", s.Addr(name))
		if err != nil {
			return err
		}
		if err := c.Close(); err != nil {
			return err
		}
	}
	return nil
}

// Kill ends the broker with SIGKILL, as a crash does. What it had stored stays, in the kernel's cache at least.
func (s *Server) Kill() error { return s.proc.kill() }

// Stop ends the broker in order.
func (s *Server) Stop() error { return s.proc.stop() }

// Pause stops the broker's process where it stands, as a long garbage collection does, until [Server.Continue].
func (s *Server) Pause() error { return s.proc.freeze(true) }

// Continue lets the process go on after [Server.Pause].
func (s *Server) Continue() error { return s.proc.freeze(false) }

// Close kills the broker and removes its data. It may be called twice.
func (s *Server) Close() error { return errors.Join(s.proc.kill(), os.RemoveAll(s.dir)) }

// Addr is a listener's host and port, for bootstrapServers; empty where there is no such listener.
func (s *Server) Addr(listener string) string {
	port, ok := s.ports[listener]
	if !ok {
		return ""
	}
	return loopback(port)
}

// advertised is what the broker tells clients of a listener's address.
func (s *Server) advertised(listener string) string {
	if a := s.opts.Advertise[listener]; a != "" {
		return a
	}
	return s.Addr(listener)
}

// Log is the end of what the broker wrote, for an error text.
func (s *Server) Log() string {
	text, err := os.ReadFile(filepath.Join(s.dir, "out.log"))
	if err != nil {
		return err.Error()
	}
	const most = 4000
	return "\n" + string(text[max(0, len(text)-most):])
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

func freePorts(names []string) (map[string]int, error) {
	free, err := freeport.Pick(len(names))
	if err != nil {
		return nil, err
	}
	ports := map[string]int{}
	for i, name := range names {
		ports[name] = free[i]
	}
	return ports, nil
}
