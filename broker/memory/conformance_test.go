package memory_test

import (
	"testing"

	"github.com/shove-dev/shove/broker/brokertest"
	"github.com/shove-dev/shove/broker/brokertest/reference"
	"github.com/shove-dev/shove/broker/memory"
)

func TestConformance(t *testing.T) {
	brokertest.Run(t, reference.Backend(memory.Options{MaxHeaderBytes: 64 << 10}, memory.Driver))
}

func BenchmarkBroker(b *testing.B) {
	s := memory.New(memory.Options{})
	brokertest.Bench(b, brokertest.Instance{Driver: memory.Driver(s)}, nil)
}
