package redis

import (
	"errors"
	"strings"
	"testing"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/redisserver"
	"github.com/shove-dev/shove/settle"
)

func publishItem(t testing.TB, err error, index int) error {
	t.Helper()
	e, ok := errors.AsType[*broker.PublishError](err)
	if !ok {
		t.Fatalf("got %v, want a *PublishError", err)
	}
	for _, it := range e.Items {
		if it.Index == index {
			return it.Err
		}
	}
	return nil
}

// A server that is out of memory refuses what it would have to store, and still lets consumers acknowledge and held
// messages return.
func TestOutOfMemory(t *testing.T) {
	srv := testenv.StartRedis(t, redisserver.Options{})
	b := benchOn(t, srv.Addr(), srv.Addr())
	d := b.declare(orders(t))
	b.publish(d, messages("m", 4)...)
	s := b.subscribe(d, 4)
	ds := receive(t, s, 4)
	hold := settle.Action{Kind: settle.Hold, Retries: 1, Delay: d.Topology.Holds[0].Delay}
	mustSettle(t, s, []broker.Settlement{copying(ds[0], hold)})
	if err := b.raw.ConfigSet(t.Context(), "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	p, err := b.client.Publisher(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	err = p.Publish(t.Context(), messages("n", 2))
	for i := range 2 {
		if got := publishItem(t, err, i); !errors.Is(got, broker.ErrRejected) {
			t.Errorf("message %d: %v", i, got)
		}
	}
	err = s.Settle(t.Context(), []broker.Settlement{copying(ds[1], hold), {Delivery: ds[2], Action: settle.Action{Kind: settle.Done}}})
	e, ok := errors.AsType[*broker.SettleError](err)
	if !ok || len(e.Items) != 1 || e.Items[0].Index != 0 || !errors.Is(e.Items[0].Err, broker.ErrRejected) {
		t.Errorf("a copy and an acknowledgement: %v", err)
	}
	back := receive(t, s, 1) // the held one
	if string(back[0].Body) != "m000" {
		t.Errorf("%q came back", back[0].Body)
	}
	if err := b.raw.ConfigSet(t.Context(), "maxmemory", "0").Err(); err != nil {
		t.Fatal(err)
	}
	mustSettle(t, s, append(act(settle.Done, back[0], ds[3]), copying(ds[1], hold)))
}

func TestPublish(t *testing.T) {
	b := newBench(t)
	d := b.declare(orders(t))
	p, err := b.client.Publisher(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	t.Run("fields", func(t *testing.T) {
		b := b.on(t)
		m := broker.Message{ID: "id-1", Key: "k", ContentType: "text/plain", Body: []byte("\x00\xffbody"), Headers: header.Map{
			"payload": "a header of this name", "n": int64(7), "yes": true, "raw": []byte{0, 254}}}
		if err := p.Publish(t.Context(), []broker.Message{m}); err != nil {
			t.Fatal(err)
		}
		s := b.subscribe(d, 1)
		got := receive(t, s, 1)[0]
		if string(got.Body) != "\x00\xffbody" || got.Key != "k" || got.ContentType != "text/plain" || got.Headers["payload"] != "a header of this name" ||
			got.Headers["n"] != "7" || got.Headers["yes"] != "true" || got.Headers["raw"] != "\x00\xfe" || got.Headers[header.MessageID] != "id-1" {
			t.Errorf("got %+v", got)
		}
		mustSettle(t, s, []broker.Settlement{copying(got, settle.Action{Kind: settle.Copy, Retries: 1})})
		again := receive(t, s, 1)[0]
		if string(again.Body) != "\x00\xffbody" || again.Headers["payload"] != "a header of this name" || again.ContentType != "text/plain" || again.Headers["raw"] != "\x00\xfe" {
			t.Errorf("the copy: %+v", again)
		}
		mustSettle(t, s, act(settle.Done, again))
		closeBounded(t, s)
	})
	t.Run("refused", func(t *testing.T) {
		b := b.on(t)
		msgs := messages("m", 3)
		msgs[0].Headers = header.Map{"what": struct{}{}}
		msgs[2].Headers = header.Map{"nested": []any{1}}
		err := p.Publish(t.Context(), msgs)
		if got := publishItem(t, err, 0); !errors.Is(got, broker.ErrUnsupported) || !strings.Contains(got.Error(), `"what"`) {
			t.Errorf("got %v", got)
		}
		if publishItem(t, err, 1) != nil || publishItem(t, err, 2) == nil {
			t.Errorf("got %v", err)
		}
		b.wantDepth(main(d), 1, 0)
	})
	t.Run("large_batch", func(t *testing.T) {
		b := b.on(t)
		if err := p.Publish(t.Context(), messages("b", 2*pipelineMessages+1)); err != nil {
			t.Fatal(err)
		}
		b.wantDepth(main(d), 1+2*pipelineMessages+1, 0)
	})
	t.Run("closed", func(t *testing.T) {
		if err := p.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := publishItem(t, p.Publish(t.Context(), messages("m", 1)), 0); !errors.Is(got, broker.ErrClosed) {
			t.Errorf("got %v", got)
		}
	})
}
