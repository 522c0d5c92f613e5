// Package rabbitserver starts a RabbitMQ server of its own on free loopback ports: from the installed Debian
// package, from a root folder made by debootstrap, or from a container image.
//
// The server ends when the process that started it ends, in whatever way that happens. Nothing here keeps a
// goroutine, so leak checks see none.
package rabbitserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/shove-dev/shove/internal/testenv/freeport"
)

// User and Password are what a started server accepts.
const (
	User     = "guest"
	Password = "guest"
)

// RootVar names a folder with another system's root, from which the server is started by chroot instead of from
// the machine's own packages. It is how the version matrix runs.
const RootVar = "SHOVE_TEST_RABBITMQ_ROOT"

// ErrNotAvailable is returned by [Start] where there is neither a package, nor a root folder, nor a docker daemon.
var ErrNotAvailable = errors.New("no RabbitMQ on this machine: install the package rabbitmq-server, run a docker daemon, " +
	"or set SHOVE_TEST_RABBITMQ_URL and SHOVE_TEST_RABBITMQ_MANAGEMENT_URL")

// Options of a server. The zero value is a plain server with the management and consistent-hash plugins.
type Options struct {
	TLS             bool     // also listen with TLS, asking for a client certificate but not insisting on one
	RequireClient   bool     // with TLS: insist on a client certificate of the same authority
	Config          []string // further lines of rabbitmq.conf
	WithoutPlugins  bool     // no plugin at all: no management, no consistent-hash exchange
	ConsumerTimeout time.Duration
}

// Server is a RabbitMQ server that this process started. Its methods may not be called concurrently.
type Server struct {
	Certificates Certificates // set with Options.TLS

	opts  Options
	dir   string // everything the server writes, as this process sees it
	ports ports
	how   launcher
}

type ports struct{ amqp, tls, management, dist, epmd int }

// launcher is one way to run the server's process.
type launcher interface {
	start(s *Server) error   // returns once the process runs, not once it is ready
	signal(kill bool) error  // ends the process: at once, or in order; returns when it is gone
	alive() bool             // whether the process is there
	remove(dir string) error // forgets everything
	logs(dir string) string  // the end of what it wrote, for an error text
}

// Start starts a server and returns when it accepts connections. Cold it takes 4 to 8 seconds.
func Start(ctx context.Context, opts Options) (*Server, error) {
	how, dir, err := chooseLauncher()
	if err != nil {
		return nil, err
	}
	s := &Server{opts: opts, dir: dir, how: how}
	if s.ports, err = freePorts(); err != nil {
		return nil, err
	}
	if opts.TLS {
		if s.Certificates, err = NewCertificates(dir + "/tls"); err != nil {
			return nil, err
		}
	}
	if err := s.Restart(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Restart starts the server again after [Server.Kill] or [Server.Stop], on the same ports with the same data, and
// returns when it accepts connections.
func (s *Server) Restart(ctx context.Context) error {
	if s.how.alive() {
		return errors.New("restarting RabbitMQ: it still runs")
	}
	if err := s.how.start(s); err != nil {
		return fmt.Errorf("starting RabbitMQ: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	for {
		err := s.ready(ctx)
		if err == nil {
			return nil
		}
		if !s.how.alive() {
			return fmt.Errorf("starting RabbitMQ: it ended: %s", s.how.logs(s.dir))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("starting RabbitMQ: not ready in time: %w: %s", err, s.how.logs(s.dir))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Kill ends the server's process with SIGKILL, as a crash of its machine would. Data that was confirmed stays.
func (s *Server) Kill() error { return s.how.signal(true) }

// Stop ends the server in order.
func (s *Server) Stop() error { return s.how.signal(false) }

// Close kills the server and removes its data. It may be called twice.
func (s *Server) Close() error {
	return errors.Join(s.how.signal(true), s.how.remove(s.dir))
}

// Addr is the AMQP listener's host and port.
func (s *Server) Addr() string { return loopback(s.ports.amqp) }

// TLSAddr is the TLS listener's host and port; empty without Options.TLS.
func (s *Server) TLSAddr() string {
	if !s.opts.TLS {
		return ""
	}
	return loopback(s.ports.tls)
}

// URL is the AMQP URL of the default vhost, with credentials.
func (s *Server) URL() string { return "amqp://" + User + ":" + Password + "@" + s.Addr() + "/" }

// ManagementURL is the base URL of the management API, with credentials; empty without plugins.
func (s *Server) ManagementURL() string {
	if s.opts.WithoutPlugins {
		return ""
	}
	return "http://" + User + ":" + Password + "@" + loopback(s.ports.management)
}

// ready returns nil when the server answers an AMQP handshake and, if it has one, its management API answers.
func (s *Server) ready(ctx context.Context) error {
	addr := s.Addr()
	c, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(2 * time.Second)); err != nil {
		return err
	}
	if _, err := c.Write([]byte("AMQP\x00\x00\x09\x01")); err != nil {
		return err
	}
	frame := make([]byte, 1)
	if _, err := c.Read(frame); err != nil {
		return fmt.Errorf("waiting for the handshake: %w", err)
	}
	if frame[0] != 1 { // a method frame: connection.start
		return fmt.Errorf("unexpected handshake: frame type %d", frame[0])
	}
	if s.opts.WithoutPlugins {
		return nil
	}
	return s.managementReady(ctx)
}

func (s *Server) managementReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+loopback(s.ports.management)+"/api/whoami", nil)
	if err != nil {
		return err
	}
	req.SetBasicAuth(User, Password)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	res, err := client.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("management API: %s", res.Status)
	}
	return nil
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

func freePorts() (ports, error) {
	var p ports
	of := []*int{&p.amqp, &p.tls, &p.management, &p.dist, &p.epmd}
	free, err := freeport.Pick(len(of))
	if err != nil {
		return p, err
	}
	for i, port := range free {
		*of[i] = port
	}
	return p, nil
}

func isExecutable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}
