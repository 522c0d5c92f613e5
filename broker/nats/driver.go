// Package nats is the NATS JetStream backend, for servers from 2.10 to 2.15.
//
// A queue is a stream with work-queue retention and a durable pull consumer of the same name. A held message is a
// scheduled message in that stream, on a subject of its own, which the server moves to the main subject when it is due
// (2.12 and later). Before 2.12 it is parked there, and the consumers of the queue move it. A retry is a copy that the
// server confirmed before the original is acknowledged. What the versions guarantee, and what an operator of the server
// has to watch, is in docs/brokers/nats.md.
//
// First change? Read objects.go for what is declared, puller.go and subscription.go for how messages come in, settle.go
// and flight.go for how they leave, admin.go and observe.go for the operator's side.
package nats

import (
	"context"
	"encoding/json"
	"math"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// Driver is the NATS JetStream backend.
var Driver = mode{}.driver()

// mode is how the backend works. Its zero value is the one for users.
type mode struct {
	// park makes it work as on a server without scheduled messages.
	park bool
	// reached is told how far a delivery got, so that tests can break the connection right there.
	reached func(*conn, step)
}

// step is a point between receiving a message and its acknowledgement.
type step string

const (
	stepReceived   step = "received"
	stepBeforeCopy step = "before-copy"
	stepCopied     step = "copied"
	stepBeforeAck  step = "before-ack"
	stepAcked      step = "acked"
)

func (s *subscription) reached(at step) {
	if f := s.client.dialer.mode.reached; f != nil {
		f(s.conn, at)
	}
}

func (m mode) driver() broker.Driver {
	return broker.Driver{
		Kind: topology.NATS,
		OpenClient: func(_ context.Context, cfg broker.Config) (broker.Client, error) {
			c, err := openClient(cfg, m)
			if err != nil {
				return nil, err
			}
			return c, nil
		},
		OpenAdmin: func(ctx context.Context, cfg broker.Config) (broker.Admin, error) {
			a, err := openAdmin(ctx, cfg, m)
			if err != nil {
				return nil, err
			}
			return a, nil
		},
		Objects:      objects,
		Capabilities: capabilities,
		LeaseLimit: func(raw json.RawMessage) (time.Duration, error) { // leases are renewed; an endpoint that is none is said so early
			_, err := parseEndpoint(raw)
			return 0, err
		},
	}
}

// maxHeaders is what a stream takes as one message's headers.
const maxHeaders = math.MaxUint16

// capabilities treats options that do not parse as the defaults: Objects is where they are refused.
func capabilities(raw json.RawMessage) broker.Capabilities {
	o, _ := parseOptions(raw)
	return broker.Capabilities{
		Durable:           o.storage != storageMemory,
		HeldInBroker:      true,
		CountsDeliveries:  true,
		CrashLimitDefault: true,
		Offset:            true,
		BrokerTimestamp:   true,
		WaitsInBroker:     true,
		Connected:         true,
		DedupesCopies:     true,
		MaxHeaderBytes:    maxHeaders,
		HoldLateness:      300 * time.Millisecond,
	}
}
