package kafka

import (
	"context"

	"github.com/shove-dev/shove/broker"
)

func openAdmin(context.Context, broker.Config, mode) (broker.Admin, error) {
	return nil, broker.ErrUnsupported
}
