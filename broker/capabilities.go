package broker

import "time"

// Capabilities is what a broker can do for a topology. It is data used three times: a manifest that asks for more is
// refused, the conformance suite excuses exactly what is false here, and the documentation's table is made from it.
type Capabilities struct {
	// Durable: messages survive a restart of the broker.
	Durable bool
	// HeldInBroker: held messages live in the broker, not in a consumer's memory (B5).
	HeldInBroker bool
	// ConsumersMoveHeld: a held message that is due goes back to its queue only while a consumer runs; without one it
	// waits on in its hold queue.
	ConsumersMoveHeld bool
	// CountsDeliveries: DeliveryCount and Crashes are known, so that a crash loop can be bounded (C10, I2).
	CountsDeliveries bool
	// CrashLimitDefault says that the crash limit is on by default (C10).
	CrashLimitDefault bool
	// Coordinates: deliveries have a partition (Kafka) or an offset (Kafka, NATS) (I2).
	Partition, Offset bool
	// BrokerTimestamp: Timestamp is set by the broker, not only by publishers (I2).
	BrokerTimestamp bool
	// Sequenced: ordered topologies are supported (K).
	Sequenced bool
	// TimeoutLeavesPending: a message whose handler ran into its deadline gets no outcome unless handlerTimeoutOutcome
	// says one; it stays pending until its lease is over and comes again with its budget unspent (H8).
	TimeoutLeavesPending bool
	// CopiesAtomically: a copy and the acknowledgement of its original are always one step, so that there is no
	// duplicate between them (A9, R2).
	CopiesAtomically bool
	// ExactlyOnce: copy and acknowledgement can be one atomic step (R).
	ExactlyOnce bool
	// WaitsInBroker: WaitInPlace is carried out by the backend (a delayed nak); else the runtime keeps the delivery
	// and calls the handler again after the delay (J2).
	WaitsInBroker bool
	// DedupesCopies: a copy that is written a second time, because the confirm of the first was lost, is stored once,
	// for some minutes at least.
	DedupesCopies bool
	// ReadsHolds: a held message that is due is handled straight from its hold queue; it does not return to the main
	// queue (Kafka).
	ReadsHolds bool
	// ResendsSafely: a publisher repeats a message whose confirm was lost, and the broker stores it once, so that it is
	// unknown only as long as the broker cannot be reached.
	ResendsSafely bool
	// Bindings: a publisher may go to an exchange that routes.
	Bindings bool
	// Connected: there is a connection that can be lost (M); false for the in-memory broker.
	Connected bool
	// GivesBackUncounted: GiveBack leaves DeliveryCount as it was. Where false the crash limit must be generous.
	GivesBackUncounted bool
	// MaxHeaderBytes is about how much a message's headers may take; zero: no limit of its own (C9).
	MaxHeaderBytes int
	// HoldLateness is how late a held message may be, p99 with 20,000 held (B4).
	HoldLateness time.Duration
}

// EffectivePrefetch bounds prefetch so that no delivery waits longer than a lease that cannot be renewed (H11):
// min(prefetch, concurrency × max(1, ⌊(leaseLimit − 60 s) / handlerTimeout⌋)). A zero leaseLimit or handlerTimeout
// leaves prefetch as it is.
func EffectivePrefetch(prefetch, concurrency int, handlerTimeout, leaseLimit time.Duration) int {
	if leaseLimit <= 0 || handlerTimeout <= 0 {
		return prefetch
	}
	const margin = 60 * time.Second
	rounds := max(1, (leaseLimit-margin)/handlerTimeout)
	if rounds >= time.Duration(prefetch) { // also keeps the product from overflowing
		return prefetch
	}
	return min(prefetch, concurrency*int(rounds))
}
