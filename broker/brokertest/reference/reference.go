// Package reference makes the in-memory broker a Backend of the conformance suite: the first one that has to pass, and
// the one that the suite itself is tested with.
package reference

import (
	"encoding/json"
	"testing"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/brokertest"
	"github.com/shove-dev/shove/broker/memory"
	"github.com/shove-dev/shove/topology"
)

// Backend runs every subtest on a server of its own. The driver may be another one than memory.Driver, such as one
// with a flaw.
func Backend(opts memory.Options, driver func(*memory.Server) broker.Driver) brokertest.Backend {
	return brokertest.Backend{
		Open: func(*testing.T) brokertest.Instance {
			s := memory.New(opts)
			return brokertest.Instance{Driver: driver(s), Raw: raw{s}, Faults: faultsOf(s)}
		},
		Capabilities:       driver(memory.New(opts)).Capabilities,
		Virtual:            true,
		ConflictingOptions: json.RawMessage(`{"maxLength": 7}`),
	}
}

func faultsOf(s *memory.Server) brokertest.Faults {
	steps := map[brokertest.Step]memory.Step{
		brokertest.StepReceived: memory.StepReceived, brokertest.StepBeforeCopy: memory.StepBeforeCopy, brokertest.StepCopied: memory.StepCopied,
		brokertest.StepBeforeAck: memory.StepBeforeAck, brokertest.StepAcked: memory.StepAcked,
	}
	return brokertest.Faults{
		Cut:          func(testing.TB) { s.Cut("") },
		Block:        func(testing.TB) func() { s.Stop(); return s.Start },
		HoldConfirms: func(testing.TB) func() { return s.HoldConfirms() },
		BreakCopies: func(testing.TB, broker.Declaration) func() {
			s.FailCopies(1<<30, broker.ErrRejected)
			return func() { s.FailCopies(0, nil) }
		},
		Restart: func(testing.TB) { s.Stop(); s.Start() },
		CutAt: func(_ testing.TB, step brokertest.Step) func() {
			s.CutAt(steps[step])
			return func() { s.CutAt(0) }
		},
	}
}

// raw is the broker as a foreign program sees it.
type raw struct{ s *memory.Server }

func (r raw) Publish(t testing.TB, _ broker.Declaration, q topology.Queue, msgs ...brokertest.Message) {
	t.Helper()
	for _, m := range msgs {
		if err := r.s.Put(q.Name, memory.Raw{Body: m.Body, Headers: m.Headers, ContentType: m.ContentType, Key: m.Key}); err != nil {
			t.Fatal(err)
		}
	}
}

func (r raw) Take(_ testing.TB, _ broker.Declaration, q topology.Queue) []brokertest.Message {
	var out []brokertest.Message
	for _, m := range r.s.Take(q.Name) {
		out = append(out, brokertest.Message{Body: m.Body, Headers: m.Headers, ContentType: m.ContentType, Key: m.Key})
	}
	return out
}

func (r raw) Count(_ testing.TB, _ broker.Declaration, q topology.Queue) (ready, inFlight int) {
	return r.s.Counts(q.Name)
}
