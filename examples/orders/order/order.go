// Package order is what the example's publisher and worker agree on: the message, and how a shop's stream of orders
// is mixed.
package order

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// Topology is the name of the Topology object that both sides are bound to.
const Topology = "orders"

// Kind says what the worker will find when it handles an order.
type Kind string

const (
	// Good orders are handled at once.
	Good Kind = "good"
	// Flaky orders meet a stock service that is down for their first calls: they are retried over the tiers.
	Flaky Kind = "flaky"
	// Hopeless orders meet one that never comes back: they use up their retries and die.
	Hopeless Kind = "hopeless"
	// Declined orders have a card that was refused: they are rejected and die at once.
	Declined Kind = "declined"
	// Early orders must not be handled before NotBefore: they are deferred.
	Early Kind = "early"
	// Slow orders meet a service that hangs on the first call: the handler runs into its deadline.
	Slow Kind = "slow"
	// Broken orders make the handler panic on the first call.
	Broken Kind = "broken"
)

// Order is the message.
type Order struct {
	ID       string  `json:"id"`
	Customer string  `json:"customer"`
	Total    float64 `json:"total"`
	Kind     Kind    `json:"kind"`
	// Failures is how many calls a Flaky order fails.
	Failures uint32 `json:"failures,omitempty"`
	// NotBefore is when an Early order's goods are on sale.
	NotBefore time.Time `json:"notBefore,omitzero"`
}

// mix is the stream in hundredths.
var mix = []struct {
	share int
	kind  Kind
}{{70, Good}, {10, Flaky}, {4, Hopeless}, {4, Declined}, {6, Early}, {3, Slow}, {3, Broken}}

// Kinds lists every kind once, in the order of the mix.
func Kinds() []Kind {
	var all []Kind
	for _, m := range mix {
		all = append(all, m.kind)
	}
	return all
}

// Make makes the n-th order. The first ones are one of each kind, so that every outcome is seen soon; later ones
// follow the mix.
func Make(n int, now time.Time) Order {
	kind := pick()
	if kinds := Kinds(); n < len(kinds) {
		kind = kinds[n]
	}
	o := Order{ID: fmt.Sprintf("%s-%06d", now.UTC().Format("150405"), n), Customer: fmt.Sprintf("customer-%d", rand.IntN(50)), Total: float64(rand.IntN(20000)+100) / 100, Kind: kind}
	switch kind {
	case Flaky:
		o.Failures = 1 + rand.Uint32N(2)
	case Early:
		o.NotBefore = now.Add(3 * time.Second).UTC()
	}
	return o
}

func pick() Kind {
	n := rand.IntN(100)
	for _, m := range mix {
		if n -= m.share; n < 0 {
			return m.kind
		}
	}
	return Good
}
