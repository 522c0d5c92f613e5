// Package kafka is the Apache Kafka backend.
//
// A queue is a topic that is read by a consumer group of the queue's name. A held message is a record in the hold topic
// of its tier, which the same group reads: it is handed to a handler straight from there when it is due, so that no
// other group of the main topic sees it again. A retry is a record that all in-sync replicas confirmed before the
// original counts as done.
package kafka

import (
	"context"
	"encoding/json"
	"net"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// Driver is the Kafka backend.
var Driver = mode{}.driver()

// mode is how the backend works. Its zero value is the one for users; tests shorten times and break connections.
type mode struct {
	// dial makes a connection in place of the network; it is given the client's id.
	dial func(ctx context.Context, client, network, addr string) (net.Conn, error)
	// sessionTimeout and heartbeat of group members; zero: the defaults.
	sessionTimeout, heartbeat time.Duration
	// revoke is how long a partition that moves waits for what runs; zero: the default.
	revoke time.Duration
	// idle is after how long an unused connection is closed; zero: the library's default.
	idle time.Duration
	// watch is how often a subscription looks after its topics; zero: the default.
	watch time.Duration
	// reached is told how far a delivery got.
	reached func(s *subscription, at step)
	// opened is told of every subscription.
	opened func(s *subscription)
}

// step is a point between receiving a message and its acknowledgement.
type step string

const (
	stepReceived   step = "received"
	stepBeforeCopy step = "before-copy"
	stepBeforeAck  step = "before-ack"
)

func (m mode) driver() broker.Driver {
	return broker.Driver{
		Kind: topology.Kafka,
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
		LeaseLimit:   leaseLimit,
	}
}

// leaseLimit is zero: Kafka lends nothing out, so that nothing has to be handed back in time (H11). A group's member
// stays one by its heartbeats, however long a handler takes.
func leaseLimit(raw json.RawMessage) (time.Duration, error) {
	_, err := parseEndpoint(raw)
	return 0, err
}

func capabilities(json.RawMessage) broker.Capabilities {
	return broker.Capabilities{
		Durable:         true,
		HeldInBroker:    true,
		Partition:       true,
		Offset:          true,
		BrokerTimestamp: true,
		ReadsHolds:      true,
		ResendsSafely:   true,
		Connected:       true,
		HoldLateness:    50 * time.Millisecond,
	}
}
