package ledger_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/hack/demo/ledger"
	"github.com/shove-dev/shove/settle"
)

var queues = ledger.Queues{Main: "q", Holds: []string{"q-hold-1s", "q-hold-3s"}, DeadLetter: "q-dlq"}

func pub(queue, id string, h header.Map) ledger.Event {
	return ledger.Event{Published: true, Queue: queue, MessageID: id, Headers: h}
}

func del(queue, id string, h header.Map) ledger.Event {
	return ledger.Event{Queue: queue, MessageID: id, Headers: h}
}

func because(reason string) string {
	return header.AppendAttempt("", header.Attempt{Outcome: "retry", Reason: reason})
}

func TestBooks(t *testing.T) {
	type want struct {
		Published, Retried, Deferred, Waited, Returned, Dead, Drained, Unknown int
		Balance                                                                ledger.Balance
	}
	retried := func(n int64, reason string) header.Map {
		return header.Map{header.RetryCount: n, header.History: because(reason)}
	}
	for name, c := range map[string]struct {
		events []ledger.Event
		want   want
	}{
		"acknowledged": {
			[]ledger.Event{pub("q", "a", nil), del("q", "a", nil)},
			want{Published: 1, Balance: ledger.Balance{Handled: 1}},
		},
		"waiting": {[]ledger.Event{pub("q", "a", nil)}, want{Published: 1, Balance: ledger.Balance{Waiting: 1}}},
		"retried over two tiers, then acknowledged": {
			[]ledger.Event{
				pub("q", "a", nil), del("q", "a", nil), pub("q-hold-1s", "a", retried(1, "down")), del("q", "a", retried(1, "down")),
				pub("q-hold-3s", "a", retried(2, "down")), del("q", "a", retried(2, "down")),
			},
			want{Published: 1, Retried: 2, Returned: 2, Balance: ledger.Balance{Handled: 1}},
		},
		"deferred, and held again before its time": {
			[]ledger.Event{
				pub("q", "a", nil), del("q", "a", nil), pub("q-hold-1s", "a", header.Map{header.RetryCount: int64(0), header.DeferCount: int64(1)}),
				del("q", "a", header.Map{header.DeferCount: int64(1)}), pub("q-hold-1s", "a", header.Map{header.DeferCount: int64(1)}),
			},
			want{Published: 1, Deferred: 1, Waited: 1, Returned: 1, Balance: ledger.Balance{Held: 1}},
		},
		"rejected and drained": {
			[]ledger.Event{
				pub("q", "a", nil), del("q", "a", nil), pub("q-dlq", "a", header.Map{header.DeathReason: "rejected"}), del("q-dlq", "a", nil),
			},
			want{Published: 1, Dead: 1, Drained: 1, Balance: ledger.Balance{Drained: 1}},
		},
		"an id in a header": {
			[]ledger.Event{
				{Published: true, Queue: "q", Headers: header.Map{header.MessageID: "a"}}, {Queue: "q", Headers: header.Map{header.MessageID: "a"}},
			},
			want{Published: 1, Balance: ledger.Balance{Handled: 1}},
		},
		"a queue that is none of ours": {[]ledger.Event{pub("other", "a", nil)}, want{Unknown: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			l := ledger.New(queues)
			for _, e := range c.events {
				l.Record(e)
			}
			n := l.Counts()
			got := want{Published: n.Published, Retried: n.RetriedTotal(), Deferred: n.Deferred, Waited: n.Waited, Returned: n.Returned,
				Dead: n.DeadTotal(), Drained: n.Drained, Unknown: n.Unknown, Balance: l.Balance()}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Errorf("books (-want +got):\n%s", d)
			}
		})
	}
}

func TestCauses(t *testing.T) {
	l := ledger.New(queues)
	for i, reason := range []string{"the stock service is down", "no outcome within 2s", "panic: assignment to entry in nil map"} {
		id := string(rune('a' + i))
		l.Record(pub("q", id, nil))
		l.Record(del("q", id, nil))
		l.Record(pub("q-hold-1s", id, header.Map{header.RetryCount: int64(1), header.History: because(reason)}))
	}
	want := map[ledger.Cause]int{ledger.CauseError: 1, ledger.CauseTimeout: 1, ledger.CausePanic: 1}
	if d := cmp.Diff(want, l.Counts().RetriedBy); d != "" {
		t.Errorf("causes (-want +got):\n%s", d)
	}
}

func TestRepeatedPublishIsOneMessage(t *testing.T) {
	l := ledger.New(queues)
	l.Record(pub("q", "a", nil))
	l.Record(pub("q", "a", nil))
	if n := l.Counts(); n.Published != 1 || n.Repeated != 1 {
		t.Errorf("published %d, repeated %d; want 1 and 1", n.Published, n.Repeated)
	}
}

func TestDeadReasonsAreKeptApart(t *testing.T) {
	l := ledger.New(queues)
	for _, reason := range []settle.Reason{settle.Rejected, settle.MaxRetriesExceeded, settle.Rejected} {
		l.Record(pub("q-dlq", string(reason), header.Map{header.DeathReason: string(reason)}))
	}
	want := map[settle.Reason]int{settle.Rejected: 2, settle.MaxRetriesExceeded: 1}
	if d := cmp.Diff(want, l.Counts().Dead); d != "" {
		t.Errorf("reasons (-want +got):\n%s", d)
	}
}
