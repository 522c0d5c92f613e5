package redis

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/shove-dev/shove/broker"
)

const (
	// dialTimeout bounds one connection attempt with all of its handshakes.
	dialTimeout = 10 * time.Second
	// replyTimeout bounds the wait for an answer, beyond what the server is asked to wait.
	replyTimeout = 10 * time.Second
	// blockFor is how long the server holds a read that finds nothing. The client library cannot interrupt it, so
	// that it also bounds what waits for it.
	blockFor = time.Second
	// closeTimeout bounds the goodbye to a server that does not answer.
	closeTimeout = 5 * time.Second
)

// errDial marks errors of connecting, before any command was sent.
var errDial = errors.New("connect")

// dialer is how one Config connects.
type dialer struct {
	endpoint endpoint
	cfg      broker.Config
	logger   *slog.Logger
}

func newDialer(cfg broker.Config) (*dialer, error) {
	e, err := parseEndpoint(cfg.Endpoint)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, broker.ErrUnsupported)
	}
	logger := cfg.Logger
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	return &dialer{endpoint: e, cfg: cfg, logger: logger}, nil
}

// client makes the pool of connections to one server. With sentinels the address is looked up anew for each connection.
func (d *dialer) client(address string) *goredis.Client {
	return goredis.NewClient(&goredis.Options{
		Addr: address, ClientName: d.name(), Protocol: 2, DisableIdentity: true,
		Dialer: func(ctx context.Context, _, addr string) (net.Conn, error) {
			if d.endpoint.Mode == sentinel {
				var err error
				if addr, err = d.primary(ctx); err != nil {
					return unreachable{err: fmt.Errorf("%w: %w", errDial, err)}, nil
				}
			}
			c, err := d.dial(ctx, addr)
			if err != nil {
				return unreachable{err: err}, nil
			}
			return c, nil
		},
		CredentialsProviderContext: d.credentials,
		// Nothing is sent twice without our knowing: a copy or a message would be stored twice.
		MaxRetries: -1, DialerRetries: 1,
		DialTimeout: dialTimeout, ReadTimeout: replyTimeout, WriteTimeout: replyTimeout, ContextTimeoutEnabled: true,
		PoolSize: poolSize, PoolTimeout: dialTimeout, ConnMaxIdleTime: 5 * time.Minute, PipelinePoolSize: -1,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		OnConnect:                d.connected,
	})
}

// connected makes sure that what a sentinel named is a primary: one that was cut off may still name an old one.
func (d *dialer) connected(ctx context.Context, c *goredis.Conn) error {
	if d.endpoint.Mode != sentinel {
		return nil
	}
	role, err := c.Do(ctx, "ROLE").Slice()
	if begins(err, "NOPERM") { // writes to a replica are refused all the same
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w: asking for the server's role: %w", errDial, err)
	}
	if len(role) > 0 && role[0] != "master" {
		return fmt.Errorf("%w: the sentinels name a server that is not the primary (any more)", errDial)
	}
	return nil
}

// unreachable stands for a connection that could not be made: its first use says why. The pool writes each failure of
// its dialer to the process's standard error, and has a goroutine dial on; neither is wanted here.
type unreachable struct {
	net.Conn
	err error
}

func (u unreachable) Read([]byte) (int, error)       { return 0, u.err }
func (u unreachable) Write([]byte) (int, error)      { return 0, u.err }
func (unreachable) Close() error                     { return nil }
func (unreachable) SetDeadline(time.Time) error      { return nil }
func (unreachable) SetReadDeadline(time.Time) error  { return nil }
func (unreachable) SetWriteDeadline(time.Time) error { return nil }
func (unreachable) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (unreachable) RemoteAddr() net.Addr             { return &net.TCPAddr{} }

// poolSize bounds the connections to one server. Every subscription has one of its own beside the shared ones.
const poolSize = 256

// name is what CLIENT LIST shows: without spaces and control characters, which it refuses.
func (d *dialer) name() string {
	return strings.Map(func(r rune) rune {
		if r <= ' ' || r > '~' {
			return '-'
		}
		return r
	}, d.cfg.Name)
}

// dial opens one connection, with TLS where it is configured.
func (d *dialer) dial(ctx context.Context, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, err := (&net.Dialer{KeepAlive: 15 * time.Second}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("%w to %s: %w", errDial, addr, err)
	}
	if d.cfg.TLS == nil {
		return c, nil
	}
	tc, err := d.cfg.TLS()
	if err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("%w to %s: TLS configuration: %w", errDial, addr, err)
	}
	if tc == nil {
		tc = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	if tc.ServerName == "" && !tc.InsecureSkipVerify {
		tc = tc.Clone()
		tc.ServerName, _, _ = net.SplitHostPort(addr)
	}
	secure := tls.Client(c, tc)
	if err := secure.HandshakeContext(ctx); err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("%w to %s: %w", errDial, addr, err)
	}
	return secure, nil
}

func (d *dialer) credentials(ctx context.Context) (username, password string, err error) {
	if d.cfg.Credentials == nil {
		return "", "", nil
	}
	c, err := d.cfg.Credentials(ctx)
	if err != nil {
		return "", "", fmt.Errorf("%w: reading credentials: %w", errDial, err)
	}
	if c.Password == "" && c.Token != "" { // of a managed identity, in place of the password
		return c.Username, c.Token, nil
	}
	return c.Username, c.Password, nil
}

// primary asks the sentinels, in the order of the endpoint, where the primary is.
func (d *dialer) primary(ctx context.Context) (string, error) {
	var errs []error
	for _, a := range d.endpoint.Addresses {
		addr, err := d.askSentinel(ctx, a)
		if err == nil {
			return addr, nil
		}
		errs = append(errs, fmt.Errorf("sentinel %s: %w", a, err))
	}
	return "", errors.Join(errs...)
}

// sentinelTimeout bounds one question to one sentinel, so that a dead one does not use up the connection attempt.
const sentinelTimeout = 2 * time.Second

func (d *dialer) askSentinel(ctx context.Context, sentinelAddr string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, sentinelTimeout)
	defer cancel()
	addr, err := d.sentinelSays(ctx, sentinelAddr, false)
	if begins(err, "NOAUTH") { // sentinels mostly have no users of their own; those that do have the server's
		addr, err = d.sentinelSays(ctx, sentinelAddr, true)
	}
	return addr, err
}

func (d *dialer) sentinelSays(ctx context.Context, sentinelAddr string, authenticate bool) (string, error) {
	opt := &goredis.Options{
		Addr: sentinelAddr, ClientName: d.name(), Protocol: 2, DisableIdentity: true, MaxRetries: -1, DialerRetries: 1, PoolSize: 1,
		DialTimeout: sentinelTimeout, ReadTimeout: sentinelTimeout, WriteTimeout: sentinelTimeout, ContextTimeoutEnabled: true,
		Dialer:                   func(ctx context.Context, _, addr string) (net.Conn, error) { return d.dial(ctx, addr) },
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	if authenticate {
		opt.CredentialsProviderContext = d.credentials
	}
	c := goredis.NewClient(opt)
	defer c.Close()
	hostPort, err := c.Do(ctx, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", d.endpoint.MasterName).StringSlice()
	switch {
	case errors.Is(err, goredis.Nil):
		return "", fmt.Errorf("knows no primary named %q", d.endpoint.MasterName)
	case err != nil:
		return "", err
	case len(hostPort) != 2:
		return "", fmt.Errorf("%d words for an address", len(hostPort))
	}
	return net.JoinHostPort(hostPort[0], hostPort[1]), nil
}
