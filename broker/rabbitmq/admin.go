package rabbitmq

import (
	"context"
	"errors"

	"github.com/shove-dev/shove/broker"
)

func openAdmin(context.Context, broker.Config) (broker.Admin, error) {
	return nil, errors.New("not yet")
}
