// Package redisserver starts a Redis or Valkey server of its own on a free loopback port, alone or as a cluster, from
// the installed Debian package or from a root folder made by debootstrap.
//
// The server ends when the process that started it ends, in whatever way that happens. Nothing here keeps a goroutine,
// so leak checks see none.
package redisserver

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/shove-dev/shove/internal/testenv/rabbitserver"
)

const (
	// RootVar names a folder with another system's root, from which the server is started by chroot.
	RootVar = "SHOVE_TEST_REDIS_ROOT"
	// ProgramVar names the server's program; the default is redis-server, else valkey-server.
	ProgramVar = "SHOVE_TEST_REDIS_SERVER"
)

// ErrNotAvailable is returned by [Start] where there is no server program.
var ErrNotAvailable = errors.New("no Redis on this machine: install the package redis-server, or set SHOVE_TEST_REDIS_URL")

// Options of a server. The zero value is a plain server that keeps an append-only file.
type Options struct {
	TLS           bool     // also listen with TLS, asking for a client certificate but not insisting on one
	RequireClient bool     // with TLS: insist on a client certificate of the same authority
	Cluster       bool     // a node of a cluster
	Announce      int      // with Cluster: the port that it tells others, such as a proxy's; 0: its own
	Sentinel      bool     // a sentinel instead of a server
	Config        []string // further lines of redis.conf
	NoPersistence bool     // nothing is kept over a restart
}

// Server is a server that this process started. Its methods may not be called concurrently.
type Server struct {
	Certificates rabbitserver.Certificates // set with Options.TLS

	opts    Options
	root    string
	program string
	dir     string // as this process sees it
	port    int
	tlsPort int
	cmd     *exec.Cmd
	tether  *os.File // held open while the server may live
}

// Start starts a server and returns when it answers, which takes about 50 ms.
func Start(ctx context.Context, opts Options) (*Server, error) {
	root := os.Getenv(RootVar)
	program, err := find(root)
	if err != nil {
		return nil, err
	}
	tmp := os.TempDir()
	if root != "" {
		tmp = filepath.Join(root, "tmp")
	}
	dir, err := os.MkdirTemp(tmp, "shove-redis-")
	if err != nil {
		return nil, fmt.Errorf("making the server's folder: %w", err)
	}
	s := &Server{opts: opts, root: root, program: program, dir: dir}
	if err := s.choosePorts(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	if opts.TLS {
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

// find looks for the program, as seen from the root folder.
func find(root string) (string, error) {
	names := []string{"redis-server", "valkey-server"}
	if p := os.Getenv(ProgramVar); p != "" {
		names = []string{p}
	}
	for _, n := range names {
		for _, dir := range []string{"", "/usr/bin/", "/usr/local/bin/"} {
			path := dir + n
			if !strings.HasPrefix(path, "/") {
				continue
			}
			if info, err := os.Stat(filepath.Join(root, path)); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
				return path, nil
			}
		}
	}
	return "", ErrNotAvailable
}

// choosePorts picks ports that are free, below those that the kernel gives to outgoing connections: a client that tries
// again while the server is down could be given the server's port, and connect to itself. A node of a cluster also needs
// the one 10000 above.
func (s *Server) choosePorts() error {
	for range 200 {
		s.port, s.tlsPort = 10000+rand.IntN(12000), 10000+rand.IntN(12000)
		if s.port != s.tlsPort && free(s.port) && free(s.tlsPort) && (!s.opts.Cluster || free(s.port+10000)) {
			return nil
		}
	}
	return errors.New("looking for a free port: none found")
}

func free(port int) bool {
	l, err := net.Listen("tcp", loopback(port))
	if err != nil {
		return false
	}
	return l.Close() == nil
}

func (s *Server) writeConfig() error {
	inside := strings.TrimPrefix(s.dir, s.root)
	lines := []string{
		"bind 127.0.0.1", "port " + strconv.Itoa(s.port), "daemonize no", "dir " + inside, "pidfile " + inside + "/pid",
		"logfile " + inside + "/log",
	}
	if s.opts.Sentinel {
		lines = append(lines, s.opts.Config...)
		return s.write("redis.conf", lines)
	}
	lines = append(lines, `save ""`)
	if s.opts.NoPersistence {
		lines = append(lines, "appendonly no")
	} else {
		// With everysec the write itself may wait for a running fsync, so that a killed process loses what it answered.
		lines = append(lines, "appendonly yes", "appendfsync always")
	}
	if s.opts.TLS {
		c := func(file string) string { return strings.TrimPrefix(file, s.root) }
		auth := "optional"
		if s.opts.RequireClient {
			auth = "yes"
		}
		lines = append(lines, "tls-port "+strconv.Itoa(s.tlsPort), "tls-cert-file "+c(s.Certificates.ServerCert), "tls-key-file "+c(s.Certificates.ServerKey),
			"tls-ca-cert-file "+c(s.Certificates.CA), "tls-auth-clients "+auth)
	}
	if s.opts.Cluster {
		lines = append(lines, "cluster-enabled yes", "cluster-config-file nodes.conf", "cluster-node-timeout 2000", "cluster-announce-ip 127.0.0.1")
		if s.opts.Announce != 0 {
			lines = append(lines, "cluster-announce-port "+strconv.Itoa(s.opts.Announce))
		}
	}
	return s.write("redis.conf", append(lines, s.opts.Config...))
}

func (s *Server) write(name string, lines []string) error {
	if err := os.WriteFile(filepath.Join(s.dir, name), []byte(strings.Join(lines, "\n")+"\n"), 0o644); err != nil {
		return fmt.Errorf("writing the server's configuration: %w", err)
	}
	return nil
}

// supervise runs the server in one process group with itself and kills the group when its standard input ends, which
// happens when the process that holds the other end does, however it dies.
const supervise = `
"$@" </dev/null >/dev/null 2>&1 &
read -r _
kill -9 0
`

// Restart starts the server again after [Server.Kill] or [Server.Stop], on the same port with the same data, and returns
// when it answers.
func (s *Server) Restart(ctx context.Context) error {
	if s.cmd != nil {
		return errors.New("restarting Redis: it still runs")
	}
	_ = os.Remove(filepath.Join(s.dir, "pid"))
	args := []string{"/bin/sh", "-c", supervise, "sh", s.program, strings.TrimPrefix(s.dir, s.root) + "/redis.conf"}
	if s.opts.Sentinel {
		args = append(args, "--sentinel")
	}
	if s.root != "" {
		args = append([]string{"chroot", s.root}, args...)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin, cmd.Dir = r, s.dir
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", "HOME=" + strings.TrimPrefix(s.dir, s.root)}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return errors.Join(fmt.Errorf("starting Redis: %w", err), w.Close())
	}
	s.cmd, s.tether = cmd, w
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		err := s.ready()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("starting Redis: not ready in time: %w: %s", err, s.logs())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// ready returns nil when the server answers, be it that it wants a password.
func (s *Server) ready() error {
	if s.pid() == 0 {
		return errors.New("no process id yet")
	}
	c, err := net.DialTimeout("tcp", s.Addr(), time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(2 * time.Second)); err != nil {
		return err
	}
	if _, err := c.Write([]byte("PING\r\n")); err != nil {
		return err
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	switch {
	case err != nil:
		return err
	case strings.HasPrefix(line, "+PONG"), strings.HasPrefix(line, "-NOAUTH"):
		return nil
	}
	return fmt.Errorf("it answers %q", strings.TrimSpace(line)) // it is loading its data
}

// Kill ends the server's process with SIGKILL.
func (s *Server) Kill() error { return s.signal(syscall.SIGKILL) }

// Stop ends the server in order.
func (s *Server) Stop() error { return s.signal(syscall.SIGTERM) }

func (s *Server) signal(sig syscall.Signal) error {
	if s.cmd == nil {
		return nil
	}
	pid := s.pid()
	if pid > 0 {
		_ = syscall.Kill(pid, sig) // ESRCH means that it is gone already
		for end := time.Now().Add(10 * time.Second); sig != syscall.SIGKILL && exists(pid) && time.Now().Before(end); {
			time.Sleep(5 * time.Millisecond)
		}
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	_ = syscall.Kill(-s.cmd.Process.Pid, syscall.SIGKILL)
	err := s.tether.Close()
	_ = s.cmd.Wait() // killed: the exit state says nothing new
	for end := time.Now().Add(10 * time.Second); pid > 0 && exists(pid); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			return fmt.Errorf("ending Redis: process %d outlives SIGKILL", pid)
		}
	}
	s.cmd, s.tether = nil, nil
	return err
}

// Freeze stops the server's process without ending it, until [Server.Thaw].
func (s *Server) Freeze() error { return syscall.Kill(s.pid(), syscall.SIGSTOP) }

// Thaw lets a frozen server go on.
func (s *Server) Thaw() error { return syscall.Kill(s.pid(), syscall.SIGCONT) }

// Close kills the server and removes its data. It may be called twice.
func (s *Server) Close() error { return errors.Join(s.Kill(), os.RemoveAll(s.dir)) }

// Addr is the listener's host and port.
func (s *Server) Addr() string { return loopback(s.port) }

// Port is the listener's port.
func (s *Server) Port() int { return s.port }

// TLSAddr is the TLS listener's host and port; empty without Options.TLS.
func (s *Server) TLSAddr() string {
	if !s.opts.TLS {
		return ""
	}
	return loopback(s.tlsPort)
}

// URL is the server's address as a URL.
func (s *Server) URL() string { return "redis://" + s.Addr() }

func (s *Server) pid() int {
	b, err := os.ReadFile(filepath.Join(s.dir, "pid"))
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0
	}
	return pid
}

func (s *Server) logs() string {
	text, err := os.ReadFile(filepath.Join(s.dir, "log"))
	if err != nil {
		return err.Error()
	}
	if len(text) > 2000 {
		text = text[len(text)-2000:]
	}
	return string(text)
}

// exists reports whether a process is there and not a zombie.
func exists(pid int) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	_, rest, ok := strings.Cut(string(b[strings.LastIndexByte(string(b), ')'):]), " ")
	return ok && !strings.HasPrefix(rest, "Z") && !strings.HasPrefix(rest, "X")
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
