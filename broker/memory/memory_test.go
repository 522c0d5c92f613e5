package memory_test

import (
	"context"
	"testing"

	"go.uber.org/goleak"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/memory"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newTopology derives a topology or fails the test.
func newTopology(t testing.TB, spec topology.Spec) broker.Declaration {
	t.Helper()
	top, err := topology.Derive(spec)
	if err != nil {
		t.Fatal(err)
	}
	return broker.Declaration{Topology: top}
}

// declare opens an admin and declares.
func declare(t testing.TB, s *memory.Server, d broker.Declaration) broker.Admin {
	t.Helper()
	a, err := memory.Driver(s).OpenAdmin(context.Background(), broker.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Declare(context.Background(), d); err != nil {
		t.Fatal(err)
	}
	return a
}

func newClient(t testing.TB, s *memory.Server, name string) broker.Client {
	t.Helper()
	c, err := memory.Driver(s).OpenClient(context.Background(), broker.Config{Name: name})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(context.Background()) })
	return c
}

func BenchmarkReceiveSettle(b *testing.B) {
	ctx := b.Context()
	s := memory.New(memory.Options{})
	d := newTopology(b, topology.Spec{Queue: "q"})
	declare(b, s, d)
	c := newClient(b, s, "c")
	pub, err := c.Publisher(ctx, d)
	if err != nil {
		b.Fatal(err)
	}
	body := make([]byte, 128)
	msgs := make([]broker.Message, 1000)
	for i := range msgs {
		msgs[i] = broker.Message{ID: "id", Body: body}
	}
	for n := 0; n < b.N; n += len(msgs) {
		if err := pub.Publish(ctx, msgs); err != nil {
			b.Fatal(err)
		}
	}
	sub, err := c.Subscribe(ctx, broker.Subscribe{Declaration: d, Prefetch: 100, Concurrency: 10})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	b.ResetTimer()
	settlements := make([]broker.Settlement, 0, 100)
	for n := 0; n < b.N; {
		ds, err := sub.Receive(ctx)
		if err != nil {
			b.Fatal(err)
		}
		settlements = settlements[:0]
		for _, d := range ds {
			settlements = append(settlements, broker.Settlement{Delivery: d, Action: settle.Action{Kind: settle.Done}})
		}
		if err := sub.Settle(ctx, settlements); err != nil {
			b.Fatal(err)
		}
		n += len(ds)
	}
}
