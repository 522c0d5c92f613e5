package brokertest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/codec"
)

func publishRules() []rule {
	return []rule{{id: "Q2", test: confirmedAndRouted}, {id: "Q3", test: batchTellsEach}}
}

// publisherRuntime starts a runtime that only publishes.
func (r *rig) publisherRuntime() *runtime.Runtime {
	r.t.Helper()
	cfg := r.config(options{})
	cfg.Consumers = nil
	rt, err := runtime.New(runtime.Drivers(r.driver()), runtime.Config(cfg), runtime.HTTPAddr(""), runtime.Pod("pod-0"),
		runtime.Registerer(prometheus.NewRegistry()), runtime.Logger(slog.New(r.logHandler())))
	if err != nil {
		r.t.Fatalf("make a runtime: %v", err)
	}
	c := &consumer{recorder: &recorder{}, rig: r, done: make(chan struct{})}
	c.start(rt)
	return rt
}

// publishing is a publisher of raw bytes to the rig's topology, which sends everything once.
func (r *rig) publishing() *runtime.Publisher[[]byte] {
	r.t.Helper()
	rt := r.publisherRuntime()
	p, err := runtime.NewPublisher[[]byte](rt, "t", runtime.PublisherConfig{Codec: codec.Raw, Attempts: 1})
	if err != nil {
		r.t.Fatalf("make a publisher: %v", err)
	}
	return p
}

func confirmedAndRouted(w *world) {
	r := w.rig()
	p := r.publishing()
	if err := p.Publish(w.ctx(), []byte("m"), runtime.WithHeader("tenant", "acme")); err != nil {
		w.t.Fatalf("publish: %v", err)
	}
	if ready, _ := r.count(r.main()); ready != 1 {
		w.t.Fatalf("%d messages are there when Publish returns", ready)
	}
	c := r.consume(inTurn(runtime.Retry, runtime.Defer, runtime.Reject))
	calls := c.called(3)
	dead := r.deadLetters(1)[0]
	c.clean()
	id, err := uuid.Parse(calls[0].ID)
	if err != nil || id.Version() != 7 {
		w.t.Errorf("message id %q, want a UUIDv7", calls[0].ID)
	}
	for _, call := range calls {
		if call.ID != calls[0].ID || call.Headers["tenant"] != "acme" {
			w.t.Errorf("after a hop: id %q and headers %v", call.ID, call.Headers)
		}
	}
	if dead.text(header.MessageID) != calls[0].ID {
		w.t.Errorf("the dead letter has the id %q, want %q", dead.text(header.MessageID), calls[0].ID)
	}

	missing := &rig{world: w, decl: w.derive(w.spec())}
	err = missing.publishing().Publish(w.ctx(), []byte("m"))
	var failed *runtime.PublishError
	if !errors.As(err, &failed) || len(failed.Failed) != 1 || len(failed.Unknown) != 0 {
		w.t.Fatalf("publish to a queue that does not exist: %v", err)
	}
	if !errors.Is(err, broker.ErrUnroutable) && !errors.Is(err, broker.ErrNotFound) {
		w.t.Errorf("publish to a queue that does not exist: %v, want unroutable or not found", err)
	}
}

// batchTellsEach: of a batch each message is confirmed, failed or unknown, and what is unknown is not sent again.
func batchTellsEach(w *world) {
	r := w.rig()
	if limit := w.caps.MaxHeaderBytes; limit > 0 {
		p := r.publisher()
		msgs, ids := messages("0", "1", "2", "3")
		msgs[1].Headers = header.Map{"big": strings.Repeat("x", limit+1)}
		msgs[3].Headers = msgs[1].Headers
		err := p.Publish(w.ctx(), msgs)
		var failed *broker.PublishError
		if !errors.As(err, &failed) {
			w.t.Fatalf("a batch with two messages that do not fit: %v", err)
		}
		var index []int
		for _, item := range failed.Items {
			index = append(index, item.Index)
			w.want(item.Err, broker.ErrTooLarge, fmt.Sprintf("message %d", item.Index))
		}
		slices.Sort(index)
		if !slices.Equal(index, []int{1, 3}) {
			w.t.Errorf("failed: %v, want 1 and 3", index)
		}
		r.holds(r.main(), 2, 0)
		got := r.inst.Raw.Take(w.t, r.decl, r.main())
		if len(got) != 2 || got[0].text(header.MessageID) != ids[0] || got[1].text(header.MessageID) != ids[2] {
			w.t.Errorf("stored %d messages; want those with the ids %s and %s", len(got), ids[0], ids[2])
		}
	}

	if w.inst.Faults.HoldConfirms == nil || w.inst.Faults.Cut == nil {
		w.t.Fatal("an unknown outcome takes Faults.HoldConfirms and Faults.Cut")
	}
	p := r.publishing()
	for range 2 { // the connection stands, and every part of the queue knows the publisher
		if err := p.Publish(w.ctx(), []byte("first")); err != nil {
			w.t.Fatalf("publish: %v", err)
		}
	}
	release := w.inst.Faults.HoldConfirms(w.t)
	result := make(chan error, 1)
	patience := w.b.Patience
	if w.caps.ResendsSafely { // it learns what became of them, unless the broker is out of reach for as long as it waits
		patience = 2 * time.Second
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	go func() {
		result <- p.PublishBatch(ctx, []runtime.Item[[]byte]{{Value: []byte("a")}, {Value: []byte("b")}, {Value: []byte("c")}})
	}()
	r.holds(r.main(), 5, 0)
	if w.caps.ResendsSafely {
		unblock := w.inst.Faults.Block(w.t)
		defer unblock()
	} else {
		w.inst.Faults.Cut(w.t)
	}
	release()
	var err error
	select {
	case err = <-result:
	case <-time.After(w.b.Patience):
		w.t.Fatal("publishing did not return after its connection was lost")
	}
	var told *runtime.PublishError
	if !errors.As(err, &told) || len(told.Unknown) != 3 || len(told.Failed) != 0 || len(told.Confirmed) != 0 {
		w.t.Fatalf("a batch whose confirms are lost: %v", err)
	}
	w.consistently("nothing is sent a second time", w.moment(), func() error {
		if ready, _ := r.count(r.main()); ready != 5 {
			return fmt.Errorf("%d messages, want 5", ready)
		}
		return nil
	})
}
