package embedded

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/nats"
)

const (
	// readyTimeout bounds the start: recovering a large store takes its time.
	readyTimeout = 2 * time.Minute
	// syncInterval is how often files are synced: what a machine that loses its power may take with it. A process that
	// is killed loses nothing that was confirmed.
	syncInterval = time.Second
	// memoryStore bounds streams that ask for memory instead of files.
	memoryStore = 64 << 20
	// lameDuck is how long clients are told to leave before the connection is closed under them.
	lameDuck = 2 * time.Second
)

// User may connect.
type User struct {
	Name, Password string
	// Workload takes rights away: it may read and write messages, and neither make nor change nor delete streams.
	Workload bool
}

// String keeps the password out of %v.
func (u User) String() string { return u.Name }

// Options say how the server runs. Dir is needed.
type Options struct {
	// Dir is where the messages are. It is made if it is not there, and locked: one process at a time has it.
	Dir string
	// Host is where clients are listened for. Defaults to 127.0.0.1.
	Host string
	// Port defaults to any that is free.
	Port int
	// MaxBytes bounds what all streams keep in files. A publisher that meets the bound gets an error and nothing is
	// lost. Zero: what the disk has.
	MaxBytes int64
	// Users may connect; the first one is the one that Driver uses. Empty: one user with a password that only this
	// process knows.
	Users []User
	// HealthAddr serves /healthz and /readyz. Empty: not at all.
	HealthAddr string
	// Logger defaults to a discarding one.
	Logger *slog.Logger
}

// Server is a running server. It is safe for concurrent use.
type Server struct {
	nats   *server.Server
	lock   *lock
	health *health
	url    string

	mu   sync.Mutex
	opts server.Options // as it was started with, for changes
	user User           // the first one
}

// ErrInUse says that another process has the directory.
var ErrInUse = errors.New("in use by another process")

// Start starts a server and returns when it is ready. The error wraps ErrInUse where another process has the
// directory. The context bounds the start only; Stop ends the server.
func Start(ctx context.Context, o Options) (*Server, error) {
	if o.Dir == "" {
		return nil, errors.New("embedded broker: Dir is needed: name the folder for its messages")
	}
	if o.MaxBytes < 0 {
		return nil, fmt.Errorf("embedded broker: MaxBytes %d: use 0 (what the disk has) or more", o.MaxBytes)
	}
	users, err := usersOf(o.Users)
	if err != nil {
		return nil, fmt.Errorf("embedded broker: %w", err)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	l, err := takeLock(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("embedded broker: %w", err)
	}
	s, err := start(ctx, o, users, l)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("embedded broker: %w", err), l.release())
	}
	return s, nil
}

// usersOf checks users, and makes one where there are none.
func usersOf(users []User) ([]User, error) {
	if len(users) == 0 {
		return []User{{Name: "shove", Password: rand.Text()}}, nil
	}
	names := map[string]bool{}
	for i, u := range users {
		switch {
		case u.Name == "" || u.Password == "":
			return nil, fmt.Errorf("user %d has no name or no password", i)
		case names[u.Name]:
			return nil, fmt.Errorf("user %q is there twice", u.Name)
		}
		names[u.Name] = true
	}
	return slices.Clone(users), nil
}

func start(ctx context.Context, o Options, users []User, l *lock) (*Server, error) {
	name, err := nameOf(o.Dir)
	if err != nil {
		return nil, err
	}
	host := o.Host
	if host == "" {
		host = "127.0.0.1"
	}
	port := o.Port
	if port == 0 {
		port = server.RANDOM_PORT
	}
	maxStore := o.MaxBytes
	if maxStore == 0 {
		maxStore = -1
	}
	s := &Server{lock: l, user: users[0], opts: server.Options{
		ServerName: name, Host: host, Port: port, NoSigs: true,
		JetStream: true, StoreDir: o.Dir, JetStreamMaxMemory: memoryStore, JetStreamMaxStore: maxStore, SyncInterval: syncInterval,
		LameDuckDuration: lameDuck, LameDuckGracePeriod: lameDuck / 2, MaxPayload: 8 << 20, Users: natsUsers(users),
	}}
	log := &natsLog{log: o.Logger}
	opts := s.opts.Clone() // the server writes into it
	if s.nats, err = server.NewServer(opts); err != nil {
		return nil, err
	}
	s.nats.SetLoggerV2(log, false, false, false)
	s.nats.Start()
	if err := s.waitReady(ctx, log); err != nil {
		s.nats.Shutdown()
		s.nats.WaitForShutdown()
		return nil, err
	}
	addr := s.nats.Addr().(*net.TCPAddr)
	s.opts.Port = addr.Port
	s.url = "nats://" + net.JoinHostPort(reachable(host), strconv.Itoa(addr.Port))
	if o.HealthAddr != "" {
		if s.health, err = serveHealth(o.HealthAddr, s.nats); err != nil {
			s.nats.Shutdown()
			s.nats.WaitForShutdown()
			return nil, err
		}
	}
	return s, nil
}

// reachable is where a host that means all addresses is connected to.
func reachable(host string) string {
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		return "127.0.0.1"
	}
	return host
}

// waitReady waits until clients are served; what the server calls fatal ends the wait.
func (s *Server) waitReady(ctx context.Context, log *natsLog) error {
	deadline := time.Now().Add(readyTimeout)
	for !s.nats.ReadyForConnections(100 * time.Millisecond) {
		switch {
		case log.fatal() != "":
			return errors.New(log.fatal())
		case ctx.Err() != nil:
			return fmt.Errorf("it did not become ready: %w", context.Cause(ctx))
		case !s.nats.Running():
			return errors.New("the server ended while it started")
		case time.Now().After(deadline):
			return fmt.Errorf("it did not become ready within %s", readyTimeout)
		}
	}
	if m := log.fatal(); m != "" {
		return errors.New(m)
	}
	return nil
}

// nameOf is the server's name, which stays with the store: it is how two of them are told apart.
func nameOf(dir string) (string, error) {
	file := filepath.Join(dir, "name")
	b, err := os.ReadFile(file)
	if name := strings.TrimSpace(string(b)); err == nil && name != "" {
		return name, nil
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("read the store's name: %w", err)
	}
	name := "shove-embedded-" + strings.ToLower(rand.Text()[:10])
	if err := os.WriteFile(file+".new", []byte(name+"\n"), 0o600); err != nil {
		return "", fmt.Errorf("name the store: %w", err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		return "", fmt.Errorf("name the store: %w", err)
	}
	return name, nil
}

// forWorkloads are the requests that a workload's user may not make.
var forWorkloads = []string{
	"$JS.API.STREAM.CREATE.>", "$JS.API.STREAM.UPDATE.>", "$JS.API.STREAM.DELETE.>", "$JS.API.STREAM.PURGE.>", "$JS.API.STREAM.RESTORE.>",
	"$JS.API.STREAM.SNAPSHOT.>", "$JS.API.STREAM.MSG.DELETE.>", "$JS.API.CONSUMER.DELETE.>", "$JS.API.ACCOUNT.PURGE.>",
}

func natsUsers(users []User) []*server.User {
	out := make([]*server.User, len(users))
	for i, u := range users {
		out[i] = &server.User{Username: u.Name, Password: u.Password}
		if u.Workload {
			out[i].Permissions = &server.Permissions{Publish: &server.SubjectPermission{Deny: slices.Clone(forWorkloads)}}
		}
	}
	return out
}

// URL is where clients connect, without credentials.
func (s *Server) URL() string { return s.url }

// SetUsers replaces those who may connect. The connections of users that are gone, or whose password changed, are
// closed.
func (s *Server) SetUsers(users []User) error {
	users, err := usersOf(users)
	if err != nil {
		return fmt.Errorf("embedded broker: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	next := s.opts.Clone()
	next.Users = natsUsers(users)
	if err := s.nats.ReloadOptions(next.Clone()); err != nil {
		return fmt.Errorf("embedded broker: replace its users: %w", err)
	}
	s.opts, s.user = *next, users[0]
	return nil
}

// Driver is the NATS backend, connected to this server whatever a Broker's endpoint and credentials say.
func (s *Server) Driver() broker.Driver {
	d := nats.Driver
	d.LeaseLimit = nil // the endpoint that it would read is not used, and leases are renewed
	d.OpenClient = func(ctx context.Context, cfg broker.Config) (broker.Client, error) {
		return nats.Driver.OpenClient(ctx, s.config(cfg))
	}
	d.OpenAdmin = func(ctx context.Context, cfg broker.Config) (broker.Admin, error) {
		return nats.Driver.OpenAdmin(ctx, s.config(cfg))
	}
	return d
}

func (s *Server) config(cfg broker.Config) broker.Config {
	cfg.Endpoint = json.RawMessage(`{"servers":[` + strconv.Quote(s.url) + `]}`)
	cfg.TLS = nil
	cfg.Credentials = func(context.Context) (broker.Credentials, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		return broker.Credentials{Username: s.user.Name, Password: s.user.Password}, nil
	}
	return cfg
}

// Done is closed when the server has ended, by Stop or by itself.
func (s *Server) Done() <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.nats.WaitForShutdown()
	}()
	return done
}

// Stop ends the server: it takes no more connections, tells its clients to leave, closes theirs, writes out what is in
// memory, and lets go of the directory. When the context ends first, clients are cut off at once. Safe to call twice.
func (s *Server) Stop(ctx context.Context) error {
	if s.health != nil {
		s.health.leave()
	}
	left := make(chan struct{})
	go func() {
		defer close(left)
		s.nats.LameDuckShutdown()
	}()
	select {
	case <-left:
	case <-ctx.Done():
	}
	s.nats.Shutdown()
	s.nats.WaitForShutdown()
	<-left
	var err error
	if s.health != nil {
		err = s.health.close()
	}
	return errors.Join(err, s.lock.release())
}
