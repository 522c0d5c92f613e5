package rabbitmq

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/settle"
)

func TestHoldComesBackWithEverything(t *testing.T) {
	b := newBench(t)
	d := b.declare(orders(), "")
	s := b.subscribe(d, 10)
	sent := amqp.Publishing{
		ContentType: "application/json", ContentEncoding: "identity", Priority: 3, CorrelationId: "corr", ReplyTo: "answers",
		Expiration: "60000", MessageId: "foreign-1", Timestamp: time.Unix(1700000000, 0), Type: "order", UserId: "guest", AppId: "shop",
		Headers: amqp.Table{
			"CC": []any{"orders-dlq"}, "x-death": "forged", "x-delivery-count": int64(3), "text": "t", "i8": int8(-1), "i16": int16(2), "i32": int32(3),
			"i64": int64(1 << 40), "bool": true, "f32": float32(1.5), "f64": 2.5, "bytes": []byte("b"), "nil": nil, "ts": time.Unix(1700000001, 0),
			"table": amqp.Table{"a": []any{int64(1), "x"}}, "dec": amqp.Decimal{Scale: 2, Value: 314},
		},
		Body: []byte("hello"),
	}
	delete(sent.Headers, "CC")
	b.publish("orders", sent)
	first := receive(t, s, 1)[0]
	started := time.Now()
	action := settle.Action{Kind: settle.Hold, Tier: 0, Delay: 100 * time.Millisecond, Retries: 1}
	mustSettle(t, s, []broker.Settlement{copying(first, action)})
	again := receive(t, s, 1)[0]
	if waited := time.Since(started); waited < 100*time.Millisecond {
		t.Errorf("came back after %v, before its delay was over", waited)
	}
	if facts := header.Parse(again.Headers); facts.Retries != 1 || facts.Malformed != 0 {
		t.Errorf("facts %+v, want one retry", facts)
	}
	raw := again.Native.(*entry).raw
	got := amqp.Publishing{
		ContentType: raw.ContentType, ContentEncoding: raw.ContentEncoding, Priority: raw.Priority, CorrelationId: raw.CorrelationId, ReplyTo: raw.ReplyTo,
		Expiration: raw.Expiration, MessageId: raw.MessageId, Timestamp: raw.Timestamp, Type: raw.Type, UserId: raw.UserId, AppId: raw.AppId, Body: raw.Body, DeliveryMode: raw.DeliveryMode,
	}
	want := sent
	want.Headers, want.Expiration, want.UserId, want.DeliveryMode = nil, "", "", amqp.Persistent
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("properties (-want +got):\n%s", diff)
	}
	wantHeaders := amqp.Table{}
	for k, v := range sent.Headers {
		if header.Keep(k) {
			wantHeaders[k] = v
		}
	}
	wantHeaders[header.UserID] = "guest"
	gotHeaders := amqp.Table{}
	for k, v := range raw.Headers {
		if header.Keep(k) {
			gotHeaders[k] = v
		}
	}
	if diff := cmp.Diff(wantHeaders, gotHeaders); diff != "" {
		t.Errorf("headers (-want +got):\n%s", diff)
	}
	if again.Redelivered || again.DeliveryCount != 1 || again.Crashes != 0 {
		t.Errorf("redelivered %v, delivery count %d, crashes %d: a copy starts anew (I3)", again.Redelivered, again.DeliveryCount, again.Crashes)
	}
	mustSettle(t, s, act(settle.Done, again))
	closeBounded(t, s)
	b.eventuallyReady("orders", 0)
}
