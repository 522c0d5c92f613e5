package kafka

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
)

const (
	// dialTimeout bounds one connection attempt, TLS included.
	dialTimeout = 5 * time.Second
	// retryTimeout bounds how long the library itself repeats a request that failed in a way that may pass; requests of
	// group members have the session timeout instead.
	retryTimeout = 10 * time.Second
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
	if e.mechanism != "" && cfg.Credentials == nil {
		return nil, fmt.Errorf("kafka endpoint: sasl.mechanism: %s needs credentials, and there are none: name their Secret, or remove sasl: %w", e.mechanism, broker.ErrUnsupported)
	}
	logger := cfg.Logger
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	return &dialer{endpoint: e, cfg: cfg, mode: m, logger: logger}, nil
}

// open makes a client of the library, which connects when it is first used and again whenever it needs to. The purpose
// becomes part of its id. Nothing of producing or consuming is set.
func (d *dialer) open(purpose string, extra ...kgo.Opt) (*kgo.Client, error) {
	id := header.Clip(d.cfg.Name+" "+purpose, 200)
	opts := []kgo.Opt{
		kgo.SeedBrokers(d.endpoint.servers...), kgo.ClientID(id), kgo.SoftwareNameAndVersion("shove", "v1alpha1"),
		kgo.Dialer(func(ctx context.Context, network, addr string) (net.Conn, error) {
			return d.dial(ctx, id, network, addr)
		}),
		kgo.DialTimeout(dialTimeout), kgo.RetryTimeout(retryTimeout), kgo.DisableClientMetrics(),
		kgo.WithLogger(libraryLog{d.logger, d.endpoint.address()}),
	}
	if d.mode.idle > 0 {
		opts = append(opts, kgo.ConnIdleTimeout(d.mode.idle))
	}
	if d.endpoint.mechanism != "" {
		opts = append(opts, kgo.SASL(d.sasl()))
	}
	c, err := kgo.NewClient(append(opts, extra...)...)
	if err != nil {
		return nil, fmt.Errorf("kafka client for %s: %w: %w", d.endpoint.address(), err, broker.ErrUnsupported)
	}
	return c, nil
}

// dial makes one connection, with the TLS configuration of this moment.
func (d *dialer) dial(ctx context.Context, id, network, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	tc, err := d.tlsConfig(addr)
	if err != nil {
		return nil, err
	}
	dial := d.mode.dial
	if dial == nil {
		dial = func(ctx context.Context, _, network, addr string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		}
	}
	nc, err := dial(ctx, id, network, addr)
	if err != nil || tc == nil {
		return nc, err
	}
	secure := tls.Client(nc, tc)
	if err := secure.HandshakeContext(ctx); err != nil {
		_ = nc.Close()
		return nil, fmt.Errorf("TLS with %s: %w", addr, err)
	}
	return secure, nil
}

// tlsConfig returns nil where the connection is plain text.
func (d *dialer) tlsConfig(addr string) (*tls.Config, error) {
	if d.cfg.TLS == nil {
		return nil, nil
	}
	c, err := d.cfg.TLS()
	if err != nil {
		return nil, fmt.Errorf("TLS configuration: %w", err)
	}
	if c == nil {
		c = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	if c.ServerName == "" {
		host, _, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, fmt.Errorf("address %q of a broker: %w", addr, err)
		}
		c = c.Clone()
		c.ServerName = host
	}
	return c, nil
}

// sasl asks for the credentials at each authentication.
func (d *dialer) sasl() sasl.Mechanism {
	login := func(ctx context.Context) (scram.Auth, error) {
		c, err := d.credentials(ctx)
		return scram.Auth{User: c.Username, Pass: c.Password}, err
	}
	switch d.endpoint.mechanism {
	case saslScram256:
		return scram.Sha256(login)
	case saslScram512:
		return scram.Sha512(login)
	case saslOAuth:
		return oauth.Oauth(func(ctx context.Context) (oauth.Auth, error) {
			c, err := d.credentials(ctx)
			return oauth.Auth{Token: c.Token}, err
		})
	default:
		return plain.Plain(func(ctx context.Context) (plain.Auth, error) {
			c, err := d.credentials(ctx)
			return plain.Auth{User: c.Username, Pass: c.Password}, err
		})
	}
}

// credentials are the current ones, if the mechanism can use them.
func (d *dialer) credentials(ctx context.Context) (broker.Credentials, error) {
	c, err := d.cfg.Credentials(ctx)
	if err != nil {
		return broker.Credentials{}, fmt.Errorf("reading credentials: %w: %w", err, broker.ErrUnavailable)
	}
	switch {
	case d.endpoint.mechanism == saslOAuth && c.Token == "":
		return c, fmt.Errorf("the credentials have no token, which %s needs: %w", saslOAuth, broker.ErrUnauthorized)
	case d.endpoint.mechanism != saslOAuth && (c.Username == "" || c.Password == ""):
		return c, fmt.Errorf("the credentials lack username or password, which %s needs: %w", d.endpoint.mechanism, broker.ErrUnauthorized)
	}
	return c, nil
}

// checkCredentials refuses a login that would silently not be used.
func (d *dialer) checkCredentials(ctx context.Context) error {
	if d.cfg.Credentials == nil {
		return nil
	}
	if d.endpoint.mechanism != "" {
		_, err := d.credentials(ctx)
		return err
	}
	c, err := d.cfg.Credentials(ctx)
	if err != nil {
		return fmt.Errorf("reading credentials: %w: %w", err, broker.ErrUnavailable)
	}
	if c.Username != "" || c.Token != "" {
		return fmt.Errorf("there are credentials with a name, but no mechanism to use them with: set kafka.sasl.mechanism, or remove credentials: %w", broker.ErrUnsupported)
	}
	return nil
}

// libraryLog passes on what the client library says of its connections, one level lower: what it calls an error is
// repeated by it, and reaches whoever called as an error where it is one.
type libraryLog struct {
	logger  *slog.Logger
	address string
}

func (l libraryLog) Level() kgo.LogLevel {
	switch ctx := context.Background(); {
	case l.logger.Enabled(ctx, slog.LevelDebug):
		return kgo.LogLevelWarn
	case l.logger.Enabled(ctx, slog.LevelWarn):
		return kgo.LogLevelError
	default:
		return kgo.LogLevelNone
	}
}

func (l libraryLog) Log(level kgo.LogLevel, msg string, keyvals ...any) {
	at := slog.LevelDebug
	if level == kgo.LogLevelError {
		at = slog.LevelWarn
	}
	l.logger.Log(context.Background(), at, "Kafka client: "+msg, append([]any{"servers", l.address}, keyvals...)...)
}

// ping connects, and says why that is not possible.
func (d *dialer) ping(ctx context.Context, c *kgo.Client) error {
	if err := d.checkCredentials(ctx); err != nil {
		return fmt.Errorf("connect to %s: %w", d.endpoint.address(), err)
	}
	if err := c.Ping(ctx); err != nil {
		if ctx.Err() != nil {
			err = errors.Join(err, context.Cause(ctx))
		}
		return fmt.Errorf("connect to %s: %w", d.endpoint.address(), mapError(err))
	}
	return nil
}
