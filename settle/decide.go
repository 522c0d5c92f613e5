package settle

import "time"

// Strategy says how a retried or deferred message waits (J).
type Strategy uint8

const (
	// Republish writes a copy with the new count to a hold queue. The default on owned topologies (J1).
	Republish Strategy = iota
	// InPlace writes no copy: the same message comes back. Implied by external topologies (J2).
	InPlace
)

// Policy is what Decide goes by, resolved once from a topology and its consumer's options.
type Policy struct {
	// Holds are the tiers' delays, shortest first.
	Holds []time.Duration
	// DeadLetter says whether there is a dead-letter queue.
	DeadLetter bool
	// MaxRetries is the retry budget; the handler runs at most MaxRetries+1 times (C1).
	MaxRetries uint32
	Strategy   Strategy
	// Sequenced topologies wait in place, whatever the strategy, so that nothing overtakes (K1).
	Sequenced bool
	// HoldDeferred lets Defer wait on a sequenced topology instead of becoming Retry (D4).
	HoldDeferred bool
	// FailAll fails every later message of a failed message's key (K4).
	FailAll bool
	// MaxDefers and MaxDeferAge bound deferrals (D5); zero: no bound.
	MaxDefers   uint32
	MaxDeferAge time.Duration
	// CrashLimit bounds how often a message may take its process down (C10); zero: no bound.
	CrashLimit uint32
}

// Message is what Decide needs to know of a message.
type Message struct {
	Retries uint32
	Defers  uint32
	// Crashes is how often the broker delivered it without any outcome of ours; zero where unknown.
	Crashes uint32
	// Age is the time since the message was first seen by a consumer.
	Age time.Duration
	// Wait is how long its not-before time is still ahead, for Defer that of the outcome; zero or less: it is due,
	// or has none.
	Wait time.Duration
}

// deferWithoutHold is how long a consumer keeps a deferred message that has no hold queue to go to (D2).
const deferWithoutHold = time.Second

// suspectAfter is the number of crashes from which on a message must run alone (C10).
const suspectAfter = 2

// Suspect says whether the message must run alone, because it may be the one that kills the process (C10).
func (p Policy) Suspect(m Message) bool {
	return p.CrashLimit > 0 && m.Crashes >= suspectAfter
}

// Admit decides whether the handler may be called. If not, the Outcome says what to Decide instead.
func Admit(m Message, notBefore time.Time, p Policy) (Outcome, bool) {
	switch {
	case p.CrashLimit > 0 && m.Crashes >= p.CrashLimit:
		return Poison(CrashLoop, "delivered again and again without an outcome: its handler seems to end the process"), false
	case m.Wait > 0:
		return Early(notBefore), false
	}
	return Outcome{}, true
}

// Decide is the one place where an outcome becomes an action (A7). Same inputs, same action.
func Decide(o Outcome, m Message, p Policy) (a Action) {
	decide(&a, &o, &m, &p)
	return a
}

// decide works on pointers, because copying these values would cost more than the decision.
func decide(a *Action, o *Outcome, m *Message, p *Policy) {
	switch o.Verdict {
	case VerdictAck:
		a.Kind = Done
	case VerdictReject:
		die(a, Rejected, o.Text, m, p)
	case VerdictDefer:
		deferred(a, o, m, p)
	case VerdictEarly:
		park(a, o, m, p, m.Defers)
	case VerdictPoison:
		die(a, o.Cause, o.Text, m, p)
	case VerdictRelease:
		a.Kind, a.Retries, a.Defers = GiveBack, m.Retries, m.Defers
	case VerdictPending:
		a.Kind, a.Retries, a.Defers = Leave, m.Retries, m.Defers
	case VerdictUnset:
		retry(a, o, m, p)
		a.Warning = OutcomeUnset
	default:
		retry(a, o, m, p)
	}
}

func retry(a *Action, o *Outcome, m *Message, p *Policy) {
	if m.Retries >= p.MaxRetries {
		die(a, MaxRetriesExceeded, o.Text, m, p)
		return
	}
	a.Kind, a.Retries, a.Defers = Hold, m.Retries+1, m.Defers
	if len(p.Holds) == 0 {
		a.Kind, a.Warning = Copy, RetryWithoutHold
	} else {
		a.Tier = min(int(m.Retries), len(p.Holds)-1)
		a.Delay = p.Holds[a.Tier]
	}
	inPlace(a, p)
}

func deferred(a *Action, o *Outcome, m *Message, p *Policy) {
	switch {
	case p.Sequenced && !p.HoldDeferred:
		retry(a, o, m, p)
		a.Warning = DeferOnSequenced
	case p.MaxDefers > 0 && m.Defers >= p.MaxDefers:
		die(a, DeferLimitExceeded, o.Text, m, p)
	default:
		park(a, o, m, p, m.Defers+1)
	}
}

// park sends a message to wait without spending its retry budget.
func park(a *Action, o *Outcome, m *Message, p *Policy, defers uint32) {
	if p.MaxDeferAge > 0 && m.Age >= p.MaxDeferAge {
		die(a, DeferLimitExceeded, o.Text, m, p)
		return
	}
	a.Kind, a.Retries, a.Defers, a.NotBefore = Hold, m.Retries, defers, o.NotBefore
	if len(p.Holds) == 0 {
		a.Kind, a.Delay, a.Warning = Copy, deferWithoutHold, DeferWithoutHold
	}
	for i, d := range p.Holds {
		if i > 0 && d > m.Wait {
			break
		}
		a.Tier, a.Delay = i, d
	}
	inPlace(a, p)
}

// inPlace turns writing a copy into waiting where no copy may be written.
func inPlace(a *Action, p *Policy) {
	if p.Strategy == InPlace || p.Sequenced {
		a.Kind, a.Tier = WaitInPlace, 0
	}
}

func die(a *Action, reason Reason, text string, m *Message, p *Policy) {
	a.Kind, a.Retries, a.Defers, a.Reason, a.Text = DeadLetter, m.Retries, m.Defers, reason, text
	a.FailKey = p.Sequenced && p.FailAll && reason != SequenceFailed
	if !p.DeadLetter {
		a.Kind = Drop
	}
}

// deadRetries is how often a dead handler that panicked or timed out is called again before the dead letter is
// removed all the same (E5), and deadBackoff how long the first wait is; each further one is twice as long.
const (
	deadRetries = 3
	deadBackoff = time.Second
)

// DecideDead decides for the drain of a dead-letter queue (E5): whatever the dead handler does, the message is removed
// when it returns; a panic or timeout (any outcome but Ack and Release) is tried again first. Failures is how often that
// happened to this message before.
func DecideDead(o Outcome, failures uint32) Action {
	switch {
	case o.Verdict == VerdictAck:
		return Action{Kind: Done}
	case o.Verdict == VerdictRelease:
		return Action{Kind: GiveBack}
	case failures >= deadRetries:
		return Action{Kind: Done, Warning: DeadHandlerFailed}
	}
	return Action{Kind: WaitInPlace, Delay: deadBackoff << failures, Retries: failures + 1}
}
