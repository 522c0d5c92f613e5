package kafka

import (
	"context"
	"fmt"
	"log/slog"
	"net"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/shove-dev/shove/broker"
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

// open makes a client of the library, which connects when it is first used. The purpose becomes part of its id.
func (d *dialer) open(purpose string, extra ...kgo.Opt) (*kgo.Client, error) {
	id := d.cfg.Name + " " + purpose
	opts := []kgo.Opt{kgo.SeedBrokers(d.endpoint.servers...), kgo.ClientID(id)}
	if d.mode.dial != nil {
		opts = append(opts, kgo.Dialer(func(ctx context.Context, network, addr string) (net.Conn, error) {
			return d.mode.dial(ctx, id, network, addr)
		}))
	}
	return kgo.NewClient(append(opts, extra...)...)
}
