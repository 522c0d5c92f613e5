package broker

import (
	"fmt"
	"slices"

	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// CheckAction refuses (ErrUnsupported) what no caller may ask of a subscription: a copy where none may be written. A
// backend asks it of every action but those that only some carry out, WaitInPlace and Leave, which are refused here.
func CheckAction(t *topology.Topology, role Role, a settle.Action) error {
	refuse := func(why string) error {
		return fmt.Errorf("action %s on a delivery of %q: %s: %w", a.Kind, t.Queue, why, ErrUnsupported)
	}
	switch {
	case slices.Contains([]settle.Kind{settle.Done, settle.Drop, settle.Requeue, settle.GiveBack}, a.Kind):
		return nil
	case !a.Kind.Copies():
		return refuse("this broker leaves it to the caller")
	case role == ReadDeadLetter:
		return refuse("dead letters are not copied")
	case a.Kind == settle.DeadLetter:
		if t.DeadLetter == "" {
			return refuse("it has no dead-letter queue")
		}
	case t.External:
		return refuse("nothing is written to an external queue")
	case a.Kind == settle.Hold && (a.Tier < 0 || a.Tier >= len(t.Holds)):
		return refuse(fmt.Sprintf("there is no tier %d of %d", a.Tier, len(t.Holds)))
	}
	return nil
}

// SettleFailures collects what one call of Settle could not do. The zero value is ready to use; it is not safe for
// concurrent use.
type SettleFailures struct {
	items  []SettleItem
	failed map[int]struct{}
}

// Add notes that the delivery at index i of the batch is not settled. Of several reasons the first counts.
func (f *SettleFailures) Add(i int, err error) {
	if f.Has(i) {
		return
	}
	if f.failed == nil {
		f.failed = map[int]struct{}{}
	}
	f.failed[i] = struct{}{}
	f.items = append(f.items, SettleItem{Index: i, Err: err})
}

// Has says whether the delivery at index i is among them.
func (f *SettleFailures) Has(i int) bool {
	if len(f.items) == 0 {
		return false
	}
	_, ok := f.failed[i]
	return ok
}

// Err is the *SettleError in the order of the batch; nil where nothing failed.
func (f *SettleFailures) Err() error {
	if len(f.items) == 0 {
		return nil
	}
	slices.SortFunc(f.items, func(a, b SettleItem) int { return a.Index - b.Index })
	return &SettleError{Items: f.items}
}
