package nats

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
)

const (
	// pingInterval and maxPings find a peer that is silent: after at most three intervals.
	pingInterval = 10 * time.Second
	maxPings     = 2
	// dialTimeout bounds one attempt with every server of the list, serverTimeout each of them.
	dialTimeout   = 20 * time.Second
	serverTimeout = 5 * time.Second
	// closeTimeout bounds the goodbye to a server that does not answer.
	closeTimeout = 5 * time.Second
)

// dialer is how one Config connects.
type dialer struct {
	endpoint endpoint
	cfg      broker.Config
	mode     mode
	logger   *slog.Logger
}

func newDialer(cfg broker.Config, m mode) (*dialer, error) {
	e, err := parseEndpoint(cfg.Endpoint)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, broker.ErrUnsupported)
	}
	logger := cfg.Logger
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	return &dialer{endpoint: e, cfg: cfg, mode: m, logger: logger}, nil
}

// conn is one connection. It is never made anew: when it is lost it is over, and so is everything on it (M3).
type conn struct {
	*natsgo.Conn
	version version
	flights flights
	done    chan struct{} // closed when the connection is closed

	mu     sync.Mutex
	denied map[int]watch // who is told when the server denies a subject
	watchN int
}

type watch struct {
	subject string
	tell    func(error)
}

// dial connects. The purpose becomes part of the connection's name.
func (d *dialer) dial(ctx context.Context, purpose string) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	auth, err := d.login(ctx)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", d.endpoint.name(), err)
	}
	c := &conn{done: make(chan struct{}), denied: map[int]watch{}}
	opts := append(auth,
		natsgo.Name(header.Clip(d.cfg.Name+" "+purpose, 200)),
		natsgo.NoReconnect(), // a new connection is a new subscription with new deliveries
		natsgo.PingInterval(pingInterval), natsgo.MaxPingsOutstanding(maxPings),
		natsgo.Timeout(serverTimeout),
		natsgo.SetCustomDialer(&ctxDialer{ctx}),
		natsgo.PermissionErrOnSubscribe(true),
		natsgo.ErrorHandler(func(_ *natsgo.Conn, _ *natsgo.Subscription, err error) { c.asyncError(d.logger, err) }),
		natsgo.ClosedHandler(func(nc *natsgo.Conn) { c.closed(d, nc.LastError()) }),
	)
	tlsOption, err := d.tls()
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w: %w", d.endpoint.name(), err, broker.ErrUnavailable)
	}
	if tlsOption != nil {
		opts = append(opts, tlsOption)
	}
	nc, err := natsgo.Connect(strings.Join(d.endpoint.servers, ","), opts...)
	if err != nil {
		if strings.Contains(err.Error(), "after TLS handshake") { // the alert that says so may be lost
			err = fmt.Errorf("%w (does the server want a client certificate, or another one?)", err)
		}
		if ctx.Err() != nil {
			err = fmt.Errorf("%w (%w)", err, context.Cause(ctx))
		}
		return nil, fmt.Errorf("connect to %s: %w", d.endpoint.name(), mapError(err))
	}
	c.Conn = nc
	c.version = parseVersion(nc.ConnectedServerVersion())
	if err := c.flights.open(c); err != nil {
		nc.Close()
		return nil, fmt.Errorf("connect to %s: %w", d.endpoint.name(), mapError(err))
	}
	return c, nil
}

// ctxDialer makes the end of a context end the handshakes, which know none. Once the connection stands the context is
// done with.
type ctxDialer struct{ ctx context.Context }

func (d *ctxDialer) Dial(network, addr string) (net.Conn, error) {
	nc, err := (&net.Dialer{}).DialContext(d.ctx, network, addr)
	if err != nil {
		return nil, err
	}
	if deadline, ok := d.ctx.Deadline(); ok {
		// The library sets its own deadline for the handshake and lifts it afterwards; this one is for the case that
		// the context's comes first.
		if time.Until(deadline) < serverTimeout {
			if err := nc.SetDeadline(deadline); err != nil {
				_ = nc.Close()
				return nil, err
			}
		}
	}
	return nc, nil
}

// tls is nil where the endpoint is plain text. With TLS configured the client insists on it, whatever the scheme is.
func (d *dialer) tls() (natsgo.Option, error) {
	if d.cfg.TLS == nil && !d.endpoint.secure {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if d.cfg.TLS != nil {
		given, err := d.cfg.TLS()
		if err != nil {
			return nil, fmt.Errorf("TLS configuration: %w", err)
		}
		if given != nil {
			c = given.Clone() // the client library writes a server name into it
		}
	}
	return natsgo.Secure(c), nil
}

// login turns the current credentials into what NATS takes. Nothing of them reaches an error.
func (d *dialer) login(ctx context.Context) ([]natsgo.Option, error) {
	if d.cfg.Credentials == nil {
		return nil, nil
	}
	c, err := d.cfg.Credentials(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading credentials: %w: %w", err, broker.ErrUnavailable)
	}
	switch {
	case c.Creds != "":
		creds := []byte(c.Creds)
		if _, err := nkeys.ParseDecoratedJWT(creds); err != nil {
			return nil, fmt.Errorf("credentials: creds is not a NATS credentials file with a user JWT: %w", broker.ErrUnauthorized)
		}
		if _, err := nkeys.ParseDecoratedNKey(creds); err != nil {
			return nil, fmt.Errorf("credentials: creds holds no user seed: %w", broker.ErrUnauthorized)
		}
		return []natsgo.Option{natsgo.UserCredentialBytes(creds)}, nil
	case c.NKey != "":
		return nkeyLogin(c.NKey)
	case c.Token != "":
		return []natsgo.Option{natsgo.Token(c.Token)}, nil
	case c.Username != "" || c.Password != "":
		return []natsgo.Option{natsgo.UserInfo(c.Username, c.Password)}, nil
	}
	return nil, nil
}

// nkeyLogin takes a user's seed (SU…), alone or in a decorated file.
func nkeyLogin(seed string) ([]natsgo.Option, error) {
	pair, err := nkeys.ParseDecoratedNKey([]byte(seed))
	if err != nil {
		pair, err = nkeys.FromSeed([]byte(strings.TrimSpace(seed)))
	}
	if err != nil {
		return nil, fmt.Errorf("credentials: nkey is not the seed of a user (SU…): %w", broker.ErrUnauthorized)
	}
	public, err := pair.PublicKey()
	if err != nil || !nkeys.IsValidPublicUserKey(public) {
		return nil, fmt.Errorf("credentials: nkey is the seed of something other than a user: %w", broker.ErrUnauthorized)
	}
	return []natsgo.Option{natsgo.Nkey(public, pair.Sign)}, nil
}

// closed runs when the connection is gone for good.
func (c *conn) closed(d *dialer, cause error) {
	if cause != nil && !errors.Is(cause, natsgo.ErrConnectionClosed) {
		d.logger.Warn("NATS connection lost", "servers", d.endpoint.name(), "error", cause)
	}
	close(c.done)
	c.flights.abandon()
}

// asyncError takes what the server says without being asked: above all that a subject is denied, which a request
// otherwise learns of by silence only.
func (c *conn) asyncError(logger *slog.Logger, err error) {
	if !errors.Is(err, natsgo.ErrPermissionViolation) {
		logger.Warn("NATS reports an error", "error", err)
		return
	}
	subject := deniedSubject(err.Error())
	told := fmt.Errorf("the server denies subject %q: %w", subject, broker.ErrUnauthorized)
	deaf := strings.HasPrefix(subject, natsgo.InboxPrefix) // no answer can come
	logger.Warn("NATS denies a subject", "subject", subject)
	c.mu.Lock()
	var tell []func(error)
	for _, w := range c.denied {
		if deaf || w.subject == subject {
			tell = append(tell, w.tell)
		}
	}
	c.mu.Unlock()
	for _, f := range tell {
		f(told)
	}
	c.flights.deny(func(s string) bool { return deaf || s == subject }, told)
}

// watchDenied calls tell when the server denies a subject, until the returned function is called.
func (c *conn) watchDenied(subject string, tell func(error)) (stop func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.watchN++
	n := c.watchN
	c.denied[n] = watch{subject, tell}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.denied, n)
	}
}

// isDone says whether the connection is lost or closed.
func (c *conn) isDone() bool {
	select {
	case <-c.done:
		return true
	default:
		return c.IsClosed()
	}
}

// flush waits until the server has everything that was sent.
func (c *conn) flush(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, closeTimeout) // the library wants a deadline
	defer cancel()
	return c.FlushWithContext(ctx)
}

// link is a connection that is made when it is needed and made anew when it was lost.
type link struct {
	dialer  *dialer
	purpose string
	// made is called with each new connection before anybody else has it.
	made func(*conn)

	turn   chan struct{} // one dials, the others wait
	mu     sync.Mutex
	conn   *conn
	closed bool
}

func newLink(d *dialer, purpose string) *link {
	return &link{dialer: d, purpose: purpose, made: func(*conn) {}, turn: make(chan struct{}, 1)}
}

func (l *link) current() (*conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, fmt.Errorf("nats client: %w", broker.ErrClosed)
	}
	if l.conn != nil && !l.conn.isDone() {
		return l.conn, nil
	}
	return nil, nil
}

// get returns the connection, dialing where there is none. It does not repeat a failed attempt: the caller paces.
func (l *link) get(ctx context.Context) (*conn, error) {
	if c, err := l.current(); c != nil || err != nil {
		return c, err
	}
	select {
	case l.turn <- struct{}{}:
		defer func() { <-l.turn }()
	case <-ctx.Done():
		return nil, fmt.Errorf("connect to %s: %w: %w", l.dialer.endpoint.name(), broker.ErrUnavailable, ctx.Err())
	}
	if c, err := l.current(); c != nil || err != nil {
		return c, err
	}
	c, err := l.dialer.dial(ctx, l.purpose)
	if err != nil {
		return nil, err
	}
	l.made(c)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		c.Close()
		return nil, fmt.Errorf("nats client: %w", broker.ErrClosed)
	}
	l.conn = c
	return c, nil
}

// close ends the connection. What was sent before is flushed until ctx is over. Safe to call twice.
func (l *link) close(ctx context.Context) error {
	l.mu.Lock()
	l.closed = true
	c := l.conn
	l.conn = nil
	l.mu.Unlock()
	if c == nil || c.isDone() {
		return nil
	}
	err := c.flush(ctx)
	c.Close()
	select {
	case <-c.done:
	case <-ctx.Done():
	}
	if err != nil && !errors.Is(err, natsgo.ErrConnectionClosed) {
		return fmt.Errorf("close the connection to %s: %w", l.dialer.endpoint.name(), mapError(err))
	}
	return nil
}
