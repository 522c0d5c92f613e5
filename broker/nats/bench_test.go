package nats

import (
	"testing"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/brokertest"
)

// BenchmarkBroker measures what every backend measures, on a server in the same process.
func BenchmarkBroker(b *testing.B) {
	for name, m := range map[string]mode{"scheduled": {}, "parked": {park: true}} {
		b.Run(name, func(b *testing.B) {
			s := startServer(b)
			cfg := broker.Config{Endpoint: endpointOf(b, "nats://"+s.addr())}
			brokertest.Bench(b, brokertest.Instance{Driver: m.driver(), Client: cfg, Admin: cfg, Raw: newRaw(s)}, nil)
		})
	}
}
