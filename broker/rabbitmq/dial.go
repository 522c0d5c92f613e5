package rabbitmq

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
)

const (
	// heartbeat is what is asked for; a peer that is silent for one and a half of it is taken for gone.
	heartbeat = 10 * time.Second
	// dialTimeout bounds one connection attempt with all of its handshakes.
	dialTimeout = 20 * time.Second
	// closeTimeout bounds the goodbye to a server that does not answer.
	closeTimeout = 5 * time.Second
)

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
	https := e.management != nil && e.management.Scheme == "https"
	if cfg.TLS != nil && !e.secure && !https {
		return nil, fmt.Errorf("rabbitmq endpoint: url: TLS is configured but the scheme is amqp, which sends everything in plain text: write amqps:// and the TLS port, often 5671: %w", broker.ErrUnsupported)
	}
	logger := cfg.Logger
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	return &dialer{endpoint: e, cfg: cfg, logger: logger}, nil
}

// tlsConfig returns nil where the endpoint is plain text.
func (d *dialer) tlsConfig(secure bool) (*tls.Config, error) {
	if !secure {
		return nil, nil
	}
	if d.cfg.TLS == nil {
		return &tls.Config{MinVersion: tls.VersionTLS12}, nil
	}
	c, err := d.cfg.TLS()
	if err != nil {
		return nil, fmt.Errorf("TLS configuration: %w", err)
	}
	if c == nil {
		return &tls.Config{MinVersion: tls.VersionTLS12}, nil
	}
	return c.Clone(), nil // the client library writes a server name into it
}

// credentials are the current ones; the zero value where none are configured.
func (d *dialer) credentials(ctx context.Context) (broker.Credentials, error) {
	if d.cfg.Credentials == nil {
		return broker.Credentials{}, nil
	}
	c, err := d.cfg.Credentials(ctx)
	if err != nil {
		return broker.Credentials{}, fmt.Errorf("reading credentials: %w", err)
	}
	return c, nil
}

// login turns credentials into what RabbitMQ takes: user and password, an OAuth 2 token in place of the password, or
// the client certificate's name.
func login(c broker.Credentials, t *tls.Config) []amqp.Authentication {
	switch {
	case c.Token != "":
		return []amqp.Authentication{&amqp.PlainAuth{Username: c.Username, Password: c.Token}}
	case c.Username != "" || c.Password != "":
		return []amqp.Authentication{&amqp.PlainAuth{Username: c.Username, Password: c.Password}}
	}
	guest := &amqp.PlainAuth{Username: "guest", Password: "guest"}
	if t != nil && (len(t.Certificates) > 0 || t.GetClientCertificate != nil) {
		return []amqp.Authentication{&amqp.ExternalAuth{}, guest}
	}
	return []amqp.Authentication{guest}
}

// conn is one connection to the server.
type conn struct {
	*amqp.Connection
	dialer   *dialer
	version  version
	frameMax int // of one frame, its own 8 bytes included; 0: no limit
	done     chan struct{}
	blocked  atomic.Pointer[block]
}

// block is a time in which the server takes no messages, because it is out of memory or disk.
type block struct {
	reason string
	over   chan struct{}
}

// dial connects. The purpose becomes part of the connection's name.
func (d *dialer) dial(ctx context.Context, purpose string) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	creds, err := d.credentials(ctx)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w: %w", d.endpoint.address(), err, broker.ErrUnavailable)
	}
	tc, err := d.tlsConfig(d.endpoint.secure)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w: %w", d.endpoint.address(), err, broker.ErrUnavailable)
	}
	props := amqp.NewConnectionProperties()
	props.SetClientConnectionName(header.Clip(d.cfg.Name+" "+purpose, 200))
	props["product"] = "shove"
	var stop func() bool
	c, err := amqp.DialConfig(d.endpoint.url(), amqp.Config{
		Vhost:           d.endpoint.vhost,
		SASL:            login(creds, tc),
		Heartbeat:       heartbeat,
		FrameSize:       amqp.FrameSizeUnlimited, // what the server allows: a message with large headers must come in
		TLSClientConfig: tc,
		Properties:      props,
		Locale:          "en_US",
		Dial: func(network, addr string) (net.Conn, error) {
			nc, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			// The handshakes of TLS and AMQP know no context: let its end break them. The library lifts the
			// deadline once the connection is open.
			deadline, _ := ctx.Deadline()
			if err := nc.SetDeadline(deadline); err != nil {
				_ = nc.Close()
				return nil, err
			}
			stop = context.AfterFunc(ctx, func() { _ = nc.Close() })
			return nc, nil
		},
	})
	if stop != nil && !stop() && err == nil {
		_ = c.CloseDeadline(time.Now())
		err = context.Cause(ctx)
	}
	if err != nil {
		if c != nil { // the library leaves the socket of a failed handshake open
			_ = c.CloseDeadline(time.Now().Add(time.Second))
		}
		if ctx.Err() != nil {
			err = fmt.Errorf("%w (%w)", err, context.Cause(ctx))
		}
		return nil, fmt.Errorf("connect to %s, vhost %q: %w", d.endpoint.address(), d.endpoint.vhost, mapError(err))
	}
	out := &conn{Connection: c, dialer: d, frameMax: c.Config.FrameSize, done: make(chan struct{})}
	if text, ok := c.Properties["version"].(string); ok {
		out.version = parseVersion(text)
	}
	go out.watch(c.NotifyClose(make(chan *amqp.Error, 1)), c.NotifyBlocked(make(chan amqp.Blocking, 16)))
	return out, nil
}

// watch takes the connection's notifications until it closes.
func (c *conn) watch(closed <-chan *amqp.Error, blocked <-chan amqp.Blocking) {
	defer close(c.done)
	for {
		select {
		case err := <-closed:
			if err != nil {
				c.dialer.logger.Warn("RabbitMQ connection lost", "address", c.dialer.endpoint.address(), "error", err)
			}
			return
		case b, ok := <-blocked:
			if !ok {
				blocked = nil
				continue
			}
			c.setBlocked(b)
		}
	}
}

func (c *conn) setBlocked(b amqp.Blocking) {
	if b.Active {
		if c.blocked.Load() != nil {
			return
		}
		c.dialer.logger.Warn("RabbitMQ blocks publishing", "address", c.dialer.endpoint.address(), "reason", b.Reason)
		c.blocked.Store(&block{reason: b.Reason, over: make(chan struct{})})
		return
	}
	if was := c.blocked.Swap(nil); was != nil {
		close(was.over)
	}
}

// writable waits until the server takes messages. The wait is bounded by ctx.
func (c *conn) writable(ctx context.Context) error {
	for b := c.blocked.Load(); b != nil; b = c.blocked.Load() {
		select {
		case <-b.over:
		case <-c.done:
			return fmt.Errorf("connection lost: %w", broker.ErrUnavailable)
		case <-ctx.Done():
			return fmt.Errorf("not sent, while the server blocks publishing (%s): %w: %w", b.reason, broker.ErrUnavailable, ctx.Err())
		}
	}
	return nil
}

// link is a connection that is made when it is needed and made anew when it was lost.
type link struct {
	dialer  *dialer
	purpose string

	turn   chan struct{} // one dials, the others wait
	mu     sync.Mutex
	conn   *conn
	closed bool
}

func newLink(d *dialer, purpose string) *link {
	return &link{dialer: d, purpose: purpose, turn: make(chan struct{}, 1)}
}

func (l *link) current() (*conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, broker.ErrClosed
	}
	if l.conn != nil && !l.conn.IsClosed() {
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
		return nil, fmt.Errorf("connect to %s: %w: %w", l.dialer.endpoint.address(), broker.ErrUnavailable, ctx.Err())
	}
	if c, err := l.current(); c != nil || err != nil {
		return c, err
	}
	c, err := l.dialer.dial(ctx, l.purpose)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		_ = c.CloseDeadline(time.Now().Add(closeTimeout))
		return nil, broker.ErrClosed
	}
	l.conn = c
	return c, nil
}

// channel opens a channel, on a new connection where needed.
func (l *link) channel(ctx context.Context) (*conn, *amqp.Channel, error) {
	c, err := l.get(ctx)
	if err != nil {
		return nil, nil, err
	}
	ch, err := await(ctx, c.Channel, func(ch *amqp.Channel) { _ = ch.Close() })
	if err != nil {
		return nil, nil, fmt.Errorf("open a channel: %w", mapError(err))
	}
	return c, ch, nil
}

// close ends the connection, saying goodbye until ctx is over. Safe to call twice.
func (l *link) close(ctx context.Context) error {
	l.mu.Lock()
	l.closed = true
	c := l.conn
	l.conn = nil
	l.mu.Unlock()
	if c == nil || c.IsClosed() {
		return nil
	}
	deadline := time.Now().Add(closeTimeout)
	if c.blocked.Load() != nil { // the server reads nothing from this connection
		deadline = time.Now().Add(100 * time.Millisecond)
	}
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	_ = c.CloseDeadline(deadline) // the connection is closed in any case, with or without the server's answer
	return nil
}

// await runs a call of the library, which knows no context, and stops waiting for it at ctx's end; what comes of it
// later is discarded. The heartbeat bounds how long it goes on.
func await[T any](ctx context.Context, call func() (T, error), discard func(T)) (T, error) {
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	go func() {
		v, err := call()
		done <- result{v, err}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
		go func() {
			if r := <-done; r.err == nil && discard != nil {
				discard(r.value)
			}
		}()
		var zero T
		return zero, ctx.Err()
	}
}

// do is await for a call without a value.
func do(ctx context.Context, call func() error) error {
	_, err := await(ctx, func() (struct{}, error) { return struct{}{}, call() }, nil)
	return err
}
