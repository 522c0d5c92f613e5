package memory

import (
	"context"
	"fmt"
	"time"

	"github.com/shove-dev/shove/broker"
)

// Step is a point on the way of a message at which a consumer can be made to fail.
type Step uint8

const (
	// StepReceived: Receive is about to return deliveries.
	StepReceived Step = iota + 1
	// StepBeforeCopy: Settle has not stored any copy yet.
	StepBeforeCopy
	// StepCopied: the copies are stored and not confirmed yet.
	StepCopied
	// StepBeforeAck: the copies are confirmed, no original is acknowledged yet.
	StepBeforeAck
	// StepAcked: everything is done, and Settle has not returned yet.
	StepAcked
)

func (s Step) String() string {
	switch s {
	case StepReceived:
		return "received"
	case StepBeforeCopy:
		return "before-copy"
	case StepCopied:
		return "copied"
	case StepBeforeAck:
		return "before-ack"
	case StepAcked:
		return "acked"
	default:
		return "none"
	}
}

// Steps lists every Step in the order in which a message passes them.
func Steps() []Step {
	return []Step{StepReceived, StepBeforeCopy, StepCopied, StepBeforeAck, StepAcked}
}

// budget makes the next n operations fail.
type budget struct {
	n   int
	err error
}

func (b *budget) next() error {
	if b.n <= 0 {
		return nil
	}
	b.n--
	return b.err
}

// faults is guarded by the server's mutex.
type faults struct {
	copies, publishes             budget
	copyConfirms, publishConfirms budget
	delay                         time.Duration
	gate                          chan struct{}
	step                          Step
	atStep                        func(*client)
}

// FailCopies makes the next n copies (holds, dead letters, copies to the main queue) fail with err; they are not
// stored. A negative count or a nil error ends the fault.
func (s *Server) FailCopies(n int, err error) { s.set(func(f *faults) { f.copies = budgetOf(n, err) }) }

// FailPublishes makes the next n published messages fail with err; they are not stored.
func (s *Server) FailPublishes(n int, err error) {
	s.set(func(f *faults) { f.publishes = budgetOf(n, err) })
}

// DropCopyConfirms stores the next n copies and loses their confirms: they fail with broker.ErrUnknown.
func (s *Server) DropCopyConfirms(n int) {
	s.set(func(f *faults) { f.copyConfirms = budgetOf(n, broker.ErrUnknown) })
}

// DropPublishConfirms stores the next n published messages and loses their confirms.
func (s *Server) DropPublishConfirms(n int) {
	s.set(func(f *faults) { f.publishConfirms = budgetOf(n, broker.ErrUnknown) })
}

// SlowConfirms makes every confirm take d. Zero ends the fault.
func (s *Server) SlowConfirms(d time.Duration) { s.set(func(f *faults) { f.delay = d }) }

// HoldConfirms holds back every confirm until release is called. Release may be called more than once.
func (s *Server) HoldConfirms() (release func()) {
	gate := make(chan struct{})
	s.set(func(f *faults) { f.gate = gate })
	return func() {
		s.set(func(f *faults) {
			if f.gate == gate {
				f.gate = nil
				close(gate)
			}
		})
	}
}

// CutAt cuts the connection of the next client that reaches the step. The client may connect again. The zero Step ends
// the fault, also that of KillAt.
func (s *Server) CutAt(step Step) {
	s.set(func(f *faults) { f.step, f.atStep = step, (*client).cut })
}

// KillAt kills the next client that reaches the step, as SIGKILL kills a process: whatever that client calls from
// then on fails.
func (s *Server) KillAt(step Step) {
	s.set(func(f *faults) { f.step, f.atStep = step, (*client).kill })
}

func budgetOf(n int, err error) budget {
	if err == nil {
		n = 0
	}
	return budget{n: n, err: err}
}

func (s *Server) set(change func(*faults)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.faults)
}

// reached lets a fault that waits for the step happen. The server's mutex is held.
func (s *subscription) reached(step Step) {
	f := &s.server.faults
	if f.step == step && step != 0 {
		hit := f.atStep
		f.step, f.atStep = 0, nil
		hit(s.client)
	}
}

// Cut cuts the connections of the clients with this name (broker.Config.Name), of all clients where it is empty, and
// says how many that were. What they had unsettled comes back; they may connect again.
func (s *Server) Cut(name string) int { return s.each(name, (*client).cut) }

// Kill ends clients as SIGKILL ends a process: what they had unsettled comes back, and whatever they call from then
// on fails.
func (s *Server) Kill(name string) int { return s.each(name, (*client).kill) }

func (s *Server) each(name string, do func(*client)) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for c := range s.clients {
		if name == "" || c.name == name {
			do(c)
			n++
		}
	}
	return n
}

func (c *client) kill() {
	c.cut()
	c.killed = true
	delete(c.server.clients, c)
}

// Stop takes the broker down: every connection is cut and every call fails with broker.ErrUnavailable until Start.
// The messages stay, and the time of held ones goes on, as on a broker that is restarted with its disk.
func (s *Server) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = true
	for c := range s.clients {
		c.cut()
	}
}

// Start brings the broker back.
func (s *Server) Start() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = false
	now := time.Now()
	for _, q := range s.queues {
		q.moveDue(now)
		q.wake()
	}
}

// awaitConfirm waits as long as a fault holds confirms back, releasing the server's mutex meanwhile.
func (c *client) awaitConfirm(ctx context.Context) error {
	s := c.server
	if s.faults.delay <= 0 && s.faults.gate == nil {
		return nil
	}
	delay, gate, gone := s.faults.delay, s.faults.gate, c.connection()
	s.mu.Unlock()
	defer s.mu.Lock()
	if delay > 0 {
		timer := time.NewTimer(delay)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-gone:
			return errConfirmLost
		case <-ctx.Done():
			return fmt.Errorf("waiting for a confirm: %w: %w", broker.ErrUnknown, ctx.Err())
		}
	}
	if gate != nil {
		select {
		case <-gate:
		case <-gone:
			return errConfirmLost
		case <-ctx.Done():
			return fmt.Errorf("waiting for a confirm: %w: %w", broker.ErrUnknown, ctx.Err())
		}
	}
	return nil
}

var errConfirmLost = fmt.Errorf("connection cut before the confirm: %w", broker.ErrUnknown)
