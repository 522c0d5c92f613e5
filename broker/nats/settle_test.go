package nats

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	natsgo "github.com/nats-io/nats.go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

func holdFor(tier int, retries uint32) settle.Action {
	return settle.Action{Kind: settle.Hold, Tier: tier, Delay: orders().Holds[tier], Retries: retries}
}

func TestB4_HeldMessage(t *testing.T) {
	t.Parallel()
	b := newestBench(t)
	d := b.declare(orders(), "")
	s := b.subscribe(d, 4)
	b.put("orders", natsgo.Header{"Nats-Foreign": {"x"}, "tenant": {"a", "b"}}, "m")
	mustSettle(t, s, copying(receive(t, s, 1)[0], holdFor(0, 1)))
	ds := receive(t, s, 1)
	// What the schedule left behind would purge another held message.
	if entryOf(ds[0]).msg.Header.Get(headerScheduler) == "" {
		t.Fatal("a message that was scheduled does not say so any more")
	}
	b.put("orders", nil, "other")
	ds = append(ds, receive(t, s, 1)...)
	before := time.Now()
	mustSettle(t, s, copying(ds[0], holdFor(1, 1)), copying(ds[1], holdFor(1, 1)))
	held := b.eventually("orders", "orders-hold-2s.>", 2)
	if held[0].Subject == held[1].Subject {
		t.Fatalf("two messages on subject %q: the second takes the place of the first", held[0].Subject)
	}
	h := held[0].Header
	text, ok := strings.CutPrefix(h.Get(headerSchedule), "@at ")
	due, err := time.Parse(time.RFC3339Nano, text)
	if !ok || err != nil || !strings.HasSuffix(text, "Z") || due.Before(before.Add(2*time.Second)) || due.After(time.Now().Add(3*time.Second)) {
		t.Errorf("schedule %q: %v", h.Get(headerSchedule), err)
	}
	if ms, err := strconv.ParseInt(h.Get(header.Due), 10, 64); err != nil || time.UnixMilli(ms).Before(due) || time.UnixMilli(ms).After(due.Add(time.Millisecond)) {
		t.Errorf("%s is %q, the schedule %q", header.Due, h.Get(header.Due), text)
	}
	if h.Get(headerTarget) != "orders" || h.Get(headerMsgID) == "" {
		t.Errorf("headers %v", h)
	}
	for _, gone := range []string{headerScheduler, headerNext, "Nats-Foreign"} {
		if h.Get(gone) != "" {
			t.Errorf("the copy kept %s: %q", gone, h.Get(gone))
		}
	}
	again := receive(t, s, 2)
	if now := time.Now(); now.Before(due) {
		t.Errorf("it came %s early", due.Sub(now))
	}
	for _, d := range again {
		if d.DeliveryCount != 1 || d.Redelivered || d.Crashes != 0 {
			t.Errorf("delivery %+v: a copy is a new message", d)
		}
	}
	if got := entryOf(again[0]).msg.Header; len(got["tenant"]) != 2 {
		t.Errorf("several values of one header became %v", got["tenant"])
	}
	mustSettle(t, s, act(settle.Done, again...)...)
}

// TestC8_OneCopyPerOriginal: a copy whose confirm was lost and that is written again is one message, unless it is one of
// another original.
func TestC8_OneCopyPerOriginal(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	d := b.declare(orders(), "")
	s := b.subscribe(d, 4).(*subscription)
	b.publish(d, messages("m", 1)...)
	e := entryOf(receive(t, s, 1)[0])
	for _, a := range []settle.Action{holdFor(1, 1), holdFor(1, 1), {Kind: settle.DeadLetter, Reason: settle.Rejected}, {Kind: settle.DeadLetter, Reason: settle.Rejected}} {
		st := copying(&e.Delivery, a)
		m, err := s.copyOf(e, &st, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		if err := s.conn.flights.send([]outgoing{m}).wait(t.Context())[0]; err != nil {
			t.Fatal(err)
		}
	}
	b.eventually("orders-dlq", "orders-dlq", 1)
	b.eventually("orders", "orders-hold-2s.>", 1)
	mustSettle(t, s, act(settle.Done, &e.Delivery)...)
	// The held copy comes back and is deferred: another original, another copy.
	again := receive(t, s, 1)
	mustSettle(t, s, copying(again[0], holdFor(1, 1)))
	mustSettle(t, s, act(settle.Done, receive(t, s, 1)...)...)
}

func TestC9_LimitsOfHeaders(t *testing.T) {
	b := newBench(t)
	d := b.declare(orders(), "")
	s := b.subscribe(d, 4)
	b.put("orders", natsgo.Header{"big": {strings.Repeat("x", maxHeaders-500)}}, "m")
	b.publish(d, messages("m", 1)...)
	ds := receive(t, s, 2)
	tooLarge := copying(ds[0], settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected, Text: strings.Repeat("why ", 500)})
	lines := copying(ds[1], settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected, Text: "first\r\nsecond"})
	err := s.Settle(t.Context(), []broker.Settlement{tooLarge, lines})
	if got := settleItem(t, err, 0); !errors.Is(got, broker.ErrTooLarge) {
		t.Errorf("headers that a stream does not take: %v", got)
	}
	if got := settleItem(t, err, 1); got != nil {
		t.Errorf("a text of two lines: %v", got)
	}
	dead := b.eventually("orders-dlq", "orders-dlq", 1)
	if got := dead[0].Header.Get(header.DeathDetail); got != "first  second" {
		t.Errorf("detail %q", got)
	}
	// Still ours: it may be settled in another way.
	mustSettle(t, s, copying(ds[0], settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected}))
	b.eventually("orders-dlq", "orders-dlq", 2)
	if n := b.consumerInfo("orders", "orders").NumAckPending; n != 0 {
		t.Errorf("%d are unacknowledged after a confirmed acknowledgement", n)
	}
}

// TestH11_Lease: what is unsettled is renewed for as long as its lease, also in the buffer, and not longer.
func TestH11_Lease(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	d := b.declare(orders(), `{"ackWait": "2s"}`)
	b.publish(d, messages("m", 2)...)
	in := broker.Subscribe{Declaration: d, Prefetch: 2, Concurrency: 2, Lease: 3 * time.Second}
	first := b.subscribeAs(in)
	ds := receive(t, first, 2)
	began := time.Now()
	second := b.subscribeAs(in)
	ext := first.(broker.Extender)
	for time.Since(began) < 5*time.Second { // longer than ack wait and lease
		if err := ext.Extend(t.Context(), ds[:1], 3*time.Second); err != nil {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond)
	}
	again := receive(t, second, 1)
	if string(again[0].Body) != string(ds[1].Body) || !again[0].Redelivered || again[0].Crashes != 1 {
		t.Errorf("got %q, redelivered %v, %d crashes; want %q again", again[0].Body, again[0].Redelivered, again[0].Crashes, ds[1].Body)
	}
	err := first.Settle(t.Context(), act(settle.Done, ds...))
	if got := settleItem(t, err, 1); !errors.Is(got, broker.ErrLost) {
		t.Errorf("settling what another has: %v", got)
	}
	if got := settleItem(t, err, 0); got != nil {
		t.Errorf("settling what was renewed: %v", got)
	}
	if n := len(b.stored("orders", "orders")); n != 1 {
		t.Errorf("%d messages are left, want the one that another has", n)
	}
	mustSettle(t, second, act(settle.Done, again...)...)
}

// TestJ2_External waits in place on a stream of somebody else, over a reconnect and a restart of the process.
func TestJ2_External(t *testing.T) {
	b := newBench(t)
	theirs := b.declare(topology.Spec{Queue: "orders"}, "")
	spec := orders()
	spec.External = true
	d := b.declare(spec, "")
	b.publish(theirs, messages("m", 1)...)
	s := b.subscribe(d, 1)
	wait := func(retries, defers uint32) broker.Settlement {
		m := receive(t, s, 1)[0]
		f := header.Parse(m.Headers)
		if f.Retries != retries || f.Defers != defers {
			t.Fatalf("delivery %d has the counts %d and %d, want %d and %d", m.DeliveryCount, f.Retries, f.Defers, retries, defers)
		}
		if m.Crashes != 0 {
			t.Errorf("%d crashes: what waits in place did not crash", m.Crashes)
		}
		return copying(m, settle.Action{Kind: settle.WaitInPlace, Delay: 300 * time.Millisecond, Retries: retries + 1, Defers: defers})
	}
	began := time.Now()
	mustSettle(t, s, wait(0, 0))
	deferred := wait(1, 0)
	if waited := time.Since(began); waited < 300*time.Millisecond {
		t.Errorf("it came back after %s", waited)
	}
	deferred.Action.Retries, deferred.Action.Defers = 1, 1
	deferred.Stamp = header.Stamp(nil, header.Parse(deferred.Delivery.Headers), deferred.Action, "orders", "", time.Now())
	mustSettle(t, s, deferred)
	mustSettle(t, s, wait(1, 1))
	closeBounded(t, s)
	s = b.subscribe(d, 1) // the same process
	mustSettle(t, s, wait(2, 1))
	closeBounded(t, s)
	b.client = b.openClient(b.config) // another one, which has the server's word only: four deliveries before this one
	s = b.subscribe(d, 1)
	st := wait(4, 0)
	if err := s.Settle(t.Context(), []broker.Settlement{copying(st.Delivery, settle.Action{Kind: settle.Copy})}); !errors.Is(settleItem(t, err, 0), broker.ErrUnsupported) {
		t.Errorf("a copy into somebody else's stream: %v", err)
	}
	if err := s.Settle(t.Context(), []broker.Settlement{copying(st.Delivery, holdFor(0, 1))}); !errors.Is(settleItem(t, err, 0), broker.ErrUnsupported) {
		t.Errorf("a hold of somebody else's message: %v", err)
	}
	mustSettle(t, s, copying(st.Delivery, settle.Action{Kind: settle.DeadLetter, Reason: settle.Rejected}))
	b.eventually("orders-dlq", "orders-dlq", 1)
}

// TestJ2_EarlyAfterACrash: a server that crashed forgets delays; what comes too early goes back for the rest of it.
func TestJ2_EarlyAfterACrash(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	d := b.declare(orders(), `{"ackWait": "1s"}`)
	b.publish(d, messages("m", 1)...)
	s := b.subscribeAs(broker.Subscribe{Declaration: d, Prefetch: 1, Concurrency: 1, InPlace: true}).(*subscription)
	m := receive(t, s, 1)[0]
	began := time.Now()
	mustSettle(t, s, copying(m, settle.Action{Kind: settle.WaitInPlace, Delay: 2 * time.Second, Retries: 1}))
	if err := s.conn.flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	// As if the delay were gone: a plain nak makes the server deliver at once.
	if err := b.raw.conn.Publish(entryOf(m).msg.Reply, nak); err != nil {
		t.Fatal(err)
	}
	again := receive(t, s, 1)[0]
	if waited := time.Since(began); waited < 2*time.Second {
		t.Errorf("it came back after %s of 2s", waited)
	}
	if again.DeliveryCount != 3 || header.Parse(again.Headers).Retries != 1 {
		t.Errorf("delivery %d with headers %v", again.DeliveryCount, again.Headers)
	}
	mustSettle(t, s, act(settle.Done, again)...)
}

// TestSource reads a log that several topologies share, and holds messages in a stream of its own.
func TestSource(t *testing.T) {
	b := newBench(t)
	if _, err := b.raw.js.CreateStream(t.Context(), logStream); err != nil {
		t.Fatal(err)
	}
	var subs []broker.Subscription
	var ds []broker.Declaration
	for _, queue := range []string{"billing", "shipping"} {
		spec := orders()
		spec.Queue, spec.Source = queue, "orders-log"
		d := b.declare(spec, "")
		ds = append(ds, d)
		subs = append(subs, b.subscribe(d, 2))
	}
	for i := range 6 {
		b.put("log.eu", nil, fmt.Sprint(i))
	}
	for i, s := range subs {
		seen := map[string]int{}
		for len(seen) < 6 {
			for _, d := range receiveSome(t, s, 2) {
				if string(d.Body) == "3" && header.Parse(d.Headers).Retries == 0 {
					mustSettle(t, s, copying(d, holdFor(0, 1)))
					continue
				}
				seen[string(d.Body)]++
				mustSettle(t, s, act(settle.Done, d)...)
			}
		}
		nothing(t, s, 300*time.Millisecond)
		if seen["3"] != 1 {
			t.Errorf("%v", seen)
		}
		depth, err := b.admin.Depths(t.Context(), []string{ds[i].Topology.Queue})
		if err != nil || depth[0].Missing || depth[0].Ready.N != 0 || depth[0].InFlight.N != 0 {
			t.Errorf("depth %+v, %v", depth, err)
		}
	}
	if n := len(b.stored("orders-log", "log.>")); n != 6 {
		t.Errorf("the log has %d messages, want what was written to it", n)
	}
	b.put("log.eu", nil, "more")
	testenv.Eventually(t, bound, func() error {
		depth, err := b.admin.Depths(context.Background(), []string{"billing"})
		if err != nil || depth[0].Ready.N+depth[0].InFlight.N != 1 {
			return fmt.Errorf("depth %+v, %v", depth, err)
		}
		return nil
	})
	// Whoever deletes it may have forgotten, or never known, what it reads.
	if _, err := b.openAdmin(b.config).Delete(t.Context(), []string{"billing"}); err != nil {
		t.Fatal(err)
	}
	var left []string
	stream, err := b.raw.js.Stream(t.Context(), "orders-log")
	if err != nil {
		t.Fatal(err)
	}
	for name := range stream.ConsumerNames(t.Context()).Name() {
		left = append(left, name)
	}
	if diff := cmp.Diff([]string{"shipping"}, left); diff != "" {
		t.Errorf("durables of the log (-want +got):\n%s", diff)
	}
}

// receiveSome returns what is there, at most n.
func receiveSome(t testing.TB, s broker.Subscription, n int) []*broker.Delivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	ds, err := s.Receive(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if len(ds) > n {
		t.Fatalf("received %d with a prefetch of %d", len(ds), n)
	}
	return ds
}
