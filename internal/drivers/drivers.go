// Package drivers lists the brokers of this release: the operator and kubectl-shove link all of them, and the table of
// docs/capabilities.md is made from them. Programs that consume name the ones that they use.
package drivers

import (
	"encoding/json"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/kafka"
	"github.com/shove-dev/shove/broker/memory"
	"github.com/shove-dev/shove/broker/nats"
	"github.com/shove-dev/shove/broker/rabbitmq"
	"github.com/shove-dev/shove/broker/redis"
)

// Column is a driver as it behaves with some options of a Topology.
type Column struct {
	// Name heads the column.
	Name   string
	Driver broker.Driver
	// Options are the Topology's section for the driver; nil: the defaults.
	Options json.RawMessage
}

// registered is the list. A new broker is a line here; a second one for options that change what it can do.
var registered = []Column{
	{"rabbitmq quorum", rabbitmq.Driver, json.RawMessage(`{"queueType":"quorum"}`)},
	{"rabbitmq classic", rabbitmq.Driver, json.RawMessage(`{"queueType":"classic"}`)},
	{"nats", nats.Driver, nil},
	{"redis", redis.Driver, nil},
	{"kafka", kafka.Driver, nil},
}

// All are the drivers, each once.
func All() []broker.Driver {
	var out []broker.Driver
	for i, c := range registered {
		if i == 0 || c.Driver.Kind != registered[i-1].Driver.Kind {
			out = append(out, c.Driver)
		}
	}
	return out
}

// Columns are all drivers as the documentation shows them, and the broker in memory, which the operator does not know.
func Columns() []Column {
	return append(append([]Column(nil), registered...), Column{Name: "memory", Driver: memory.Driver(memory.New(memory.Options{}))})
}
