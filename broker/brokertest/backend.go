package brokertest

import (
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/topology"
)

// Backend is a broker to be tested.
type Backend struct {
	// Open yields the broker for one subtest. It may share a server between subtests: every subtest uses queue
	// names of its own, and deletes what it declared.
	Open func(t *testing.T) Instance
	// Capabilities is the driver's function of that name.
	Capabilities func(options json.RawMessage) broker.Capabilities
	// Variants are ways to run the broker that all keep the rules, such as queue types. Empty: one, without a name.
	Variants []Variant
	// Virtual runs every subtest in a bubble of testing/synctest, so that its waits cost no time. Open is called in
	// the bubble. Only for brokers without real connections.
	Virtual bool
	// Tiers are the delays of the three hold queues that tests use. Default: 50, 300 and 1200 ms, or 5, 30 and
	// 120 s where Virtual is set.
	Tiers []time.Duration
	// Patience is how long something that must happen may take. Default 30 s, or 1 h where Virtual is set.
	Patience time.Duration
	// ConflictingOptions are options with which declaring a queue that was declared with the variant's options is a
	// conflict. Nil: the broker has no fixed property to disagree about.
	ConflictingOptions json.RawMessage
	// ExternalOptions take the place of the variant's options on external topologies. Nil: the variant's own.
	ExternalOptions json.RawMessage
	// Goroutines are those of a broker that runs in the test's own process, to be told from what a backend leaves
	// behind.
	Goroutines []goleak.Option
}

// Variant is one way to run a broker.
type Variant struct {
	Name    string
	Options json.RawMessage
}

// Instance is a broker as one subtest sees it.
type Instance struct {
	Driver broker.Driver
	// Client is how consumers and publishers reach the broker: through what Faults can break.
	Client broker.Config
	// Admin is how tests declare and count: it is not broken by Faults.
	Admin broker.Config
	// Raw is the broker without shove.
	Raw Raw
	// Faults are the ways in which tests can make this broker fail.
	Faults Faults
	// Shared waits until the running subscriptions of a queue have shared it, on brokers where each reads a part of
	// it. Nil: there is nothing to wait for.
	Shared func(t testing.TB)
}

// Raw reads and writes a broker as a foreign program does. Queues are given by the declaration that they belong to
// and their logical form, because what a queue is differs between brokers. Methods fail the test on an error.
type Raw interface {
	// Publish stores messages in a queue with exactly the headers given, as far as the protocol carries them.
	Publish(t testing.TB, d broker.Declaration, q topology.Queue, msgs ...Message)
	// Take removes all messages of a queue that nobody consumes from and returns them in order.
	Take(t testing.TB, d broker.Declaration, q topology.Queue) []Message
	// Count counts the messages of a queue that are ready (on a hold queue: that wait), and those that are
	// delivered and unsettled. It tells the present state, not that of a while ago. A queue that does not exist has
	// none.
	Count(t testing.TB, d broker.Declaration, q topology.Queue) (ready, inFlight int)
}

// Message is a message as Raw sees it.
type Message struct {
	Body        []byte
	Headers     header.Map
	ContentType string
	Key         string
}

// Faults are ways to break a broker. A nil function is one that cannot be had; rules that need it then fail.
type Faults struct {
	// Cut ends every connection that was made with Instance.Client, as a network does: without a word. New ones
	// are accepted at once. On return the broker has noticed or will by itself.
	Cut func(t testing.TB)
	// Block does what Cut does, and refuses new connections until unblock is called.
	Block func(t testing.TB) (unblock func())
	// HoldConfirms holds back the answers of the broker, so that copies and messages are stored and their senders
	// do not learn of it, until release is called. A Cut meanwhile makes it that they never do.
	HoldConfirms func(t testing.TB) (release func())
	// BreakCopies makes every copy to a hold queue of d fail, until mend is called. Nil: the hold queues are
	// deleted, and declared again.
	BreakCopies func(t testing.TB, d broker.Declaration) (mend func())
	// Restart ends the broker abruptly and starts it again with what it had stored. Nil where the broker is not
	// durable, or shared.
	Restart func(t testing.TB)
	// CutAt cuts the connection of the next consumer that gets to a step, unless disarm is called before. Nil: the
	// test cuts while handlers run instead.
	CutAt func(t testing.TB, step Step) (disarm func())
}

// Step is a point between receiving a message and its acknowledgement.
type Step string

const (
	StepReceived   Step = "received"    // delivered, no handler was called
	StepBeforeCopy Step = "before-copy" // decided, no copy is written
	StepCopied     Step = "copied"      // the copy is stored and not confirmed
	StepBeforeAck  Step = "before-ack"  // the copy is confirmed, the original not acknowledged
	StepAcked      Step = "acked"       // acknowledged, and the consumer does not know it yet
)

// Run tests a backend against every rule.
func Run(t *testing.T, b Backend) {
	t.Helper()
	b = b.withDefaults()
	for _, v := range b.Variants {
		if v.Name == "" {
			b.variant(t, v)
			continue
		}
		t.Run(v.Name, func(t *testing.T) { b.variant(t, v) })
	}
}

func (b Backend) withDefaults() Backend {
	if len(b.Variants) == 0 {
		b.Variants = []Variant{{}}
	}
	ms, patience := time.Millisecond, 30*time.Second
	tiers := []time.Duration{50 * ms, 300 * ms, 1200 * ms}
	if b.Virtual {
		tiers, patience = []time.Duration{5 * time.Second, 30 * time.Second, 120 * time.Second}, time.Hour
	}
	if len(b.Tiers) == 0 {
		b.Tiers = tiers
	}
	if b.Patience == 0 {
		b.Patience = patience
	}
	return b
}

// rule is one numbered rule of the semantics, or a named part of the contract.
type rule struct {
	id     string
	test   func(*world)
	serial bool // it looks at the whole process, and so runs alone
}

func (b Backend) variant(t *testing.T, v Variant) {
	for _, r := range rules() {
		t.Run(r.id, func(t *testing.T) { b.subtest(t, v, r) })
	}
	t.Run("seam", func(t *testing.T) {
		for _, r := range seamTests() {
			t.Run(r.id, func(t *testing.T) { b.subtest(t, v, r) })
		}
	})
	t.Run("faults", func(t *testing.T) {
		for _, r := range faultTests() {
			t.Run(r.id, func(t *testing.T) { b.subtest(t, v, r) })
		}
	})
}

func (b Backend) subtest(t *testing.T, v Variant, r rule) {
	if !r.serial {
		t.Parallel()
	}
	body := func(t *testing.T) {
		w := newWorld(t, b, v, r.id)
		defer w.tearDown()
		r.test(w)
	}
	if b.Virtual {
		synctest.Test(t, body)
		return
	}
	body(t)
}

// rules lists the subtests that are named by a rule.
func rules() []rule {
	var all []rule
	for _, list := range [][]rule{outcomeRules(), holdRules(), budgetRules(), identityRules(), deferRules(), deadRules(), poisonRules(),
		metadataRules(), strategyRules(), sequencedRules(), connectionRules(), shutdownRules(), publishRules()} {
		all = append(all, list...)
	}
	return all
}

// exempt excuses a rule because of a capability that the broker does not have.
func (w *world) exempt(reason string) {
	w.t.Logf("brokertest: exempt %s: %s", w.rule, reason)
}
