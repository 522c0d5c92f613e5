package broker_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

func TestCheckAction(t *testing.T) {
	derive := func(s topology.Spec) topology.Topology {
		top, err := topology.Derive(s)
		if err != nil {
			t.Fatal(err)
		}
		return top
	}
	tiers := []time.Duration{time.Second, 2 * time.Second}
	full := derive(topology.Spec{Queue: "orders", Holds: tiers, DeadLetter: true})
	bare := derive(topology.Spec{Queue: "orders"})
	external := derive(topology.Spec{Queue: "orders", External: true, Holds: tiers, DeadLetter: true})
	all := []settle.Action{{Kind: settle.Done}, {Kind: settle.Drop}, {Kind: settle.Requeue}, {Kind: settle.GiveBack}, {Kind: settle.Copy},
		{Kind: settle.DeadLetter}, {Kind: settle.Hold, Tier: 1}, {Kind: settle.Hold, Tier: 2}, {Kind: settle.Hold, Tier: -1}, {Kind: settle.WaitInPlace}, {Kind: settle.Leave}}
	for name, tc := range map[string]struct {
		top  topology.Topology
		role broker.Role
		ok   int // so many of all are accepted, from the first
		more []int
	}{
		"whole":        {full, broker.ReadMain, 7, nil},
		"bare":         {bare, broker.ReadMain, 5, nil},
		"external":     {external, broker.ReadMain, 4, []int{5}},
		"dead letters": {full, broker.ReadDeadLetter, 4, nil},
	} {
		for i, a := range all {
			want := i < tc.ok
			for _, m := range tc.more {
				want = want || m == i
			}
			err := broker.CheckAction(&tc.top, tc.role, a)
			if (err == nil) != want || err != nil && !errors.Is(err, broker.ErrUnsupported) {
				t.Errorf("%s: %s of tier %d: %v, want accepted: %v", name, a.Kind, a.Tier, err, want)
			}
		}
	}
}

func TestSettleFailures(t *testing.T) {
	var f broker.SettleFailures
	if f.Has(0) || f.Err() != nil {
		t.Error("failures before the first")
	}
	f.Add(3, broker.ErrLost)
	f.Add(1, broker.ErrRejected)
	f.Add(3, broker.ErrClosed) // the first reason counts
	if !f.Has(3) || !f.Has(1) || f.Has(2) {
		t.Errorf("has 1 %v, 2 %v, 3 %v", f.Has(1), f.Has(2), f.Has(3))
	}
	var got []int
	e, ok := errors.AsType[*broker.SettleError](f.Err())
	if !ok {
		t.Fatalf("got %v", f.Err())
	}
	for _, item := range e.Items {
		got = append(got, item.Index)
	}
	if d := cmp.Diff([]int{1, 3}, got); d != "" || !errors.Is(e.Items[1].Err, broker.ErrLost) {
		t.Errorf("%s, %v", d, e.Items)
	}
}
