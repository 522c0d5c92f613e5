package redis

import (
	"testing"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/brokertest"
	"github.com/shove-dev/shove/internal/testenv"
)

func BenchmarkBackend(b *testing.B) {
	addr := testenv.Redis(b).Addr(b)
	at := broker.Config{Endpoint: endpointOf(standalone, addr)}
	brokertest.Bench(b, brokertest.Instance{Driver: Driver, Client: at, Admin: at}, nil)
}
