package kafka

import (
	"github.com/shove-dev/shove/broker"
)

func openClient(broker.Config, mode) (broker.Client, error) {
	return nil, broker.ErrUnsupported
}

type subscription struct{}
