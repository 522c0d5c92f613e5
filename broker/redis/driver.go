// Package redis is the Redis Streams backend, for Redis 7.0 and later and Valkey 7.2 and later.
//
// A queue is a stream with one consumer group. A hold queue is a sorted set whose members are whole messages and whose
// scores are the times at which they are due, by the server's clock; every consumer moves due ones back. A retry and a
// dead letter are one script that writes the copy and acknowledges the original, after it has made sure that the
// original is still this consumer's. What has to be known of the server is in docs/brokers/redis.md.
//
// First change? Read keys.go for what is stored where, lua/ for every write that must be one step, subscription.go and
// fetch.go for how messages come in, settle.go for how they leave, upkeep.go for what goes on beside, nodes.go for how
// a server is found, admin.go and observe.go for the operator's side.
package redis

import (
	"context"
	"encoding/json"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// Driver is the Redis backend.
var Driver = broker.Driver{
	Kind: topology.Redis,
	OpenClient: func(_ context.Context, cfg broker.Config) (broker.Client, error) {
		return openClient(cfg)
	},
	OpenAdmin: func(ctx context.Context, cfg broker.Config) (broker.Admin, error) {
		return openAdmin(ctx, cfg)
	},
	Objects:      objects,
	Capabilities: func(json.RawMessage) broker.Capabilities { return capabilities },
}

var capabilities = broker.Capabilities{
	// As far as the server's persistence goes; Admin.Server warns where there is none.
	Durable:              true,
	HeldInBroker:         true,
	ConsumersMoveHeld:    true,
	CountsDeliveries:     true,
	CrashLimitDefault:    true,
	TimeoutLeavesPending: true,
	BrokerTimestamp:      true,
	ExactlyOnce:          true,
	CopiesAtomically:     true,
	Connected:            true,
	GivesBackUncounted:   true,
	HoldLateness:         120 * time.Millisecond,
}
