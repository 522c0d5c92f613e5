package topology

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// queueName is what a logical queue name may look like: what every broker can carry, directly or mapped by Physical.
var queueName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$`)

// FieldError is one thing wrong with a Spec. Derive joins all of them.
type FieldError struct {
	Field   string
	Problem string
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Problem }

// Derive validates a Spec and names its parts. The error joins one *FieldError per problem.
func Derive(s Spec) (Topology, error) {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, &FieldError{Field: field, Problem: fmt.Sprintf(format, args...)})
	}
	checkName := func(field, name string) {
		switch {
		case name == "":
			bad(field, "is empty: give the queue a name")
		case len(name) > MaxQueueLength:
			bad(field, "%q has %d characters: use at most %d, so that the names derived from it fit on every broker", name, len(name), MaxQueueLength)
		case !queueName.MatchString(name):
			bad(field, "%q: use letters, digits, '.', '_' and '-', with a letter or digit at both ends", name)
		}
	}

	checkName("queue", s.Queue)
	t := Topology{Queue: s.Queue, Source: s.Queue, External: s.External}
	if s.Source != "" {
		checkName("source", s.Source)
		t.Source = s.Source
	}
	for _, p := range checkHolds(s.Holds) {
		errs = append(errs, p)
	}
	t.Holds = holds(s.Queue, s.Holds)
	if s.DeadLetter {
		t.DeadLetter = s.Queue + "-dlq"
		if s.DeadLetterQueue != "" {
			checkName("deadLetter.queue", s.DeadLetterQueue)
			t.DeadLetter = s.DeadLetterQueue
		}
	} else if s.DeadLetterQueue != "" {
		bad("deadLetter", "a name is given for a dead-letter queue that is not asked for")
	}
	if s.Sequenced != nil {
		seq, problems := sequenced(s)
		t.Sequenced = seq
		for _, p := range problems {
			errs = append(errs, p)
		}
	}
	if len(errs) == 0 {
		for _, p := range collisions(t) {
			errs = append(errs, p)
		}
	}
	if len(errs) > 0 {
		return Topology{}, errors.Join(errs...)
	}
	return t, nil
}

func checkHolds(delays []time.Duration) []*FieldError {
	var errs []*FieldError
	if len(delays) > MaxHolds {
		errs = append(errs, &FieldError{"holdQueues", fmt.Sprintf("%d tiers: use at most %d", len(delays), MaxHolds)})
	}
	for i, d := range delays {
		field := "holdQueues[" + strconv.Itoa(i) + "].delay"
		switch {
		case d <= 0:
			errs = append(errs, &FieldError{field, fmt.Sprintf("%s: a delay is above zero", d)})
		case d%time.Millisecond != 0:
			errs = append(errs, &FieldError{field, fmt.Sprintf("%s: use whole milliseconds", d)})
		case i > 0 && d <= delays[i-1]:
			errs = append(errs, &FieldError{field, fmt.Sprintf("%s is not longer than the tier before it (%s): write the tiers from the shortest to the longest, each once", d, delays[i-1])})
		}
	}
	return errs
}

func sequenced(s Spec) (*Sequenced, []*FieldError) {
	var errs []*FieldError
	q := *s.Sequenced
	if q.OnFailure == "" {
		q.OnFailure = Skip
	}
	if q.OnDefer == "" {
		q.OnDefer = DeferRetry
	}
	if q.Shards == 0 {
		q.Shards = DefaultShards
	}
	if q.MaxPendingPerKey == 0 {
		q.MaxPendingPerKey = DefaultMaxPendingPerKey
	}
	if q.OnFailure != Skip && q.OnFailure != FailAll {
		errs = append(errs, &FieldError{"sequenced.onFailure", fmt.Sprintf("%q: use Skip or FailAll", q.OnFailure)})
	}
	if q.OnDefer != DeferRetry && q.OnDefer != DeferHold {
		errs = append(errs, &FieldError{"sequenced.onDefer", fmt.Sprintf("%q: use Retry or Hold", q.OnDefer)})
	}
	if q.Shards < 1 || q.Shards > MaxShards {
		errs = append(errs, &FieldError{"sequenced.shards", fmt.Sprintf("%d: use 1 to %d", q.Shards, MaxShards)})
		return nil, errs
	}
	if q.MaxPendingPerKey < 1 {
		errs = append(errs, &FieldError{"sequenced.maxPendingPerKey", fmt.Sprintf("%d: use 1 or more", q.MaxPendingPerKey)})
	}
	if !q.AllowMessageLoss && (!s.DeadLetter || len(s.Holds) == 0) {
		errs = append(errs, &FieldError{"sequenced", "needs deadLetter and at least one hold queue, or allowMessageLoss: true"})
	}
	out := &Sequenced{OnFailure: q.OnFailure, OnDefer: q.OnDefer, Key: q.Key, MaxPendingPerKey: q.MaxPendingPerKey, Exchange: s.Queue + "-seq-hash"}
	for i := range q.Shards {
		name := s.Queue + "-seq-" + strconv.Itoa(i)
		out.Shards = append(out.Shards, Shard{Queue: name, State: name + "-state", Holds: holds(name, s.Holds)})
	}
	return out, errs
}

func holds(queue string, delays []time.Duration) []Hold {
	if len(delays) == 0 {
		return nil
	}
	hs := make([]Hold, len(delays))
	for i, d := range delays {
		hs[i] = Hold{Queue: HoldName(queue, d), Delay: d}
	}
	return hs
}

// HoldName is the name of a queue's hold queue for one delay: "{queue}-hold-{N}s" for whole seconds, else
// "{queue}-hold-{N}ms" (B1).
func HoldName(queue string, delay time.Duration) string {
	if delay%time.Second == 0 {
		return queue + "-hold-" + strconv.FormatInt(int64(delay/time.Second), 10) + "s"
	}
	return queue + "-hold-" + strconv.FormatInt(delay.Milliseconds(), 10) + "ms"
}

// ParseHoldName reads a name that HoldName made. It is for those who see only the names of queues.
func ParseHoldName(name string) (queue string, delay time.Duration, ok bool) {
	i := strings.LastIndex(name, "-hold-")
	if i < 1 {
		return "", 0, false
	}
	delay, err := time.ParseDuration(name[i+len("-hold-"):])
	if err != nil || delay <= 0 || HoldName(name[:i], delay) != name {
		return "", 0, false
	}
	return name[:i], delay, true
}

// collisions finds names of one topology that are the same: a dead-letter queue named like a hold queue, say.
func collisions(t Topology) []*FieldError {
	var errs []*FieldError
	seen := map[string]Role{}
	for _, q := range t.Queues() {
		if other, dup := seen[q.Name]; dup {
			errs = append(errs, &FieldError{"deadLetter.queue", fmt.Sprintf("%q is both the %s and the %s queue of this topology: choose another name", q.Name, other, q.Role)})
		}
		seen[q.Name] = q.Role
	}
	return errs
}
