// Package rabbitmq is the RabbitMQ backend, for servers from 3.10 to 4.3, on AMQP 0-9-1.
//
// A hold queue is a quorum queue with a time to live for all of its messages, whose expired messages the broker moves
// back to the main queue, at least once. A retry is a copy that is published to a hold queue, confirmed and routed
// before the original is acknowledged. How the guarantees of RabbitMQ differ between versions, and what an operator
// of the server has to watch, is in docs/brokers/rabbitmq.md.
//
// First change? Read objects.go for what is declared, subscription.go for how messages come in, settle.go and
// confirm.go for how they leave, admin.go and observe.go for the operator's side.
package rabbitmq

import (
	"context"
	"encoding/json"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// Driver is the RabbitMQ backend.
var Driver = broker.Driver{
	Kind: topology.RabbitMQ,
	OpenClient: func(_ context.Context, cfg broker.Config) (broker.Client, error) {
		return openClient(cfg)
	},
	OpenAdmin: func(ctx context.Context, cfg broker.Config) (broker.Admin, error) {
		return openAdmin(ctx, cfg)
	},
	Objects:      objects,
	Capabilities: capabilities,
	LeaseLimit:   leaseLimit,
}

// maxHeaders is what a server with the default frame_max of 128 KiB takes as one message's headers and properties:
// a frame without its own 8 bytes.
const maxHeaders = 128<<10 - frameOverhead

// capabilities treats options that do not parse as the defaults: Objects is where they are refused.
func capabilities(raw json.RawMessage) broker.Capabilities {
	o, err := parseOptions(raw)
	quorum := err != nil || o.QueueType == quorumQueue
	return broker.Capabilities{
		Durable:      true,
		HeldInBroker: true,
		// Classic queues have no x-delivery-count (C10).
		CountsDeliveries:  quorum,
		CrashLimitDefault: quorum,
		Bindings:          true,
		Connected:         true,
		// True from 4.3 on, but the options do not say what the server is: before, handing back counts.
		GivesBackUncounted: false,
		MaxHeaderBytes:     maxHeaders,
		HoldLateness:       50 * time.Millisecond,
	}
}

// leaseLimit is the server's consumer timeout, as the endpoint states it (H11).
func leaseLimit(raw json.RawMessage) (time.Duration, error) {
	e, err := parseEndpoint(raw)
	if err != nil {
		return 0, err
	}
	return e.consumerTimeout, nil
}
