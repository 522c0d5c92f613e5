package runtime

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/settle"
)

// AuditEvent says what an AuditRecord tells of.
type AuditEvent string

const (
	// AuditHandled: the handler returned an outcome.
	AuditHandled AuditEvent = "handled"
	// AuditTimeout: the handler ran into its deadline; the outcome is the one that was applied instead of its own.
	AuditTimeout AuditEvent = "timeout"
	// AuditPanic: the handler panicked, or ended its goroutine; the outcome is Retry.
	AuditPanic AuditEvent = "panic"
	// AuditAbandoned: the process gave up on the handler at shutdown; the broker redelivers the message.
	AuditAbandoned AuditEvent = "abandoned"
)

// AuditRecord is one call of a handler (O1). Every delivery that reaches the handler has one; a call that is overruled
// in the instant in which it returns has two, of which the later one counts.
type AuditRecord struct {
	// TraceID is the message's x-trace-id, or a new one. The handler's context carries it, see TraceID.
	TraceID string     `json:"traceId"`
	Event   AuditEvent `json:"event"`
	// Time is when the call began, on this process's clock.
	Time     time.Time     `json:"time"`
	Duration time.Duration `json:"durationNs"`
	Pod      string        `json:"pod,omitempty"`
	Topology string        `json:"topology"`
	Group    string        `json:"group,omitempty"`
	Queue    string        `json:"queue"`

	// Outcome is ack, retry, reject or defer; release with AuditAbandoned; handled for a dead letter.
	Outcome string `json:"outcome"`
	// Reason is the text that the handler gave with it.
	Reason    string    `json:"reason,omitempty"`
	NotBefore time.Time `json:"notBefore,omitzero"`

	MessageID   string `json:"messageId"`
	DeliveryID  string `json:"deliveryId"`
	RetryCount  uint32 `json:"retryCount"`
	DeferCount  uint32 `json:"deferCount"`
	Redelivered bool   `json:"redelivered"`
	// DeliveryCount, Partition, Offset and Timestamp are absent where the broker does not tell.
	DeliveryCount *uint32           `json:"deliveryCount,omitempty"`
	Partition     *int32            `json:"partition,omitempty"`
	Offset        *int64            `json:"offset,omitempty"`
	Timestamp     time.Time         `json:"timestamp,omitzero"`
	Key           string            `json:"key,omitempty"`
	Headers       map[string]string `json:"headers,omitempty"`

	ContentType string `json:"contentType,omitempty"`
	// Payload is the body as it came, at most AuditConfig.MaxPayload bytes of it. A sink must not change it.
	Payload     []byte `json:"payload,omitempty"`
	PayloadSize int    `json:"payloadSize"`

	// Death is set for a call of a dead handler.
	Death *AuditDeath `json:"death,omitempty"`
}

// AuditDeath is how a dead letter died.
type AuditDeath struct {
	Reason        string    `json:"reason"`
	Detail        string    `json:"detail,omitempty"`
	Count         uint32    `json:"count"`
	OriginalQueue string    `json:"originalQueue,omitempty"`
	DiedAt        time.Time `json:"diedAt,omitzero"`
}

// AuditSink takes audit records.
type AuditSink interface {
	// Write keeps records, in the order in which the calls ended. It is called by one goroutine at a time for every
	// audited handler, with whatever collected meanwhile, and should return when the context ends. An error means
	// that any of the records may be lost.
	Write(ctx context.Context, records []AuditRecord) error
}

// AuditSinkFunc is a function as an AuditSink.
type AuditSinkFunc func(ctx context.Context, records []AuditRecord) error

// Write calls f.
func (f AuditSinkFunc) Write(ctx context.Context, records []AuditRecord) error {
	return f(ctx, records)
}

// AuditConfig says how records are written. The zero value is meaningful.
type AuditConfig struct {
	// Strict makes a message whose record could not be written a Retry, whatever its handler said (O2). A timeout's
	// outcome is applied on time all the same, and a dead letter is removed all the same. Defaults to false: a sink
	// that fails or hangs never changes an outcome; what it loses is counted and logged.
	Strict bool
	// MaxPayload bounds the bytes of a body that a record holds; negative: none. Defaults to 1 MiB.
	MaxPayload int
	// Timeout bounds one write. Defaults to 5 s.
	Timeout time.Duration
	// Buffer is how many records may wait for a slow sink; more are lost, or in strict mode retried. Defaults to 1000.
	Buffer int
}

// Defaults of an AuditConfig.
const (
	auditMaxPayload = 1 << 20
	auditTimeout    = 5 * time.Second
	auditBuffer     = 1000
)

func (c AuditConfig) withDefaults() AuditConfig {
	if c.MaxPayload == 0 {
		c.MaxPayload = auditMaxPayload
	}
	if c.Timeout <= 0 {
		c.Timeout = auditTimeout
	}
	if c.Buffer <= 0 {
		c.Buffer = auditBuffer
	}
	return c
}

// Audited wraps a handler so that every call of it is recorded (O1): also timeouts, panics and, where it is a
// DeadHandler, calls for dead letters (O2). The wrapped handler keeps the contract of the handler, and is a DeadHandler
// exactly where that is one. A record is usually written before the outcome is applied, but a slow sink is not waited
// for at the cost of the deadline.
func Audited[T any](h Handler[T], sink AuditSink, cfg AuditConfig) Handler[T] {
	if h == nil || sink == nil {
		return nil // binding it fails
	}
	a := &audited[T]{auditor: newAuditor(sink, cfg), inner: h}
	if dead, ok := h.(DeadHandler[T]); ok {
		return &auditedBoth[T]{audited: a, auditedDead: &auditedDead[T]{auditor: a.auditor, inner: dead}}
	}
	return a
}

// AuditedDead wraps a dead handler that is bound by itself, as Audited does.
func AuditedDead[T any](h DeadHandler[T], sink AuditSink, cfg AuditConfig) DeadHandler[T] {
	if h == nil || sink == nil {
		return nil // binding it fails
	}
	return &auditedDead[T]{auditor: newAuditor(sink, cfg), inner: h}
}

type audited[T any] struct {
	auditor *auditor
	inner   Handler[T]
}

type auditedDead[T any] struct {
	auditor *auditor
	inner   DeadHandler[T]
}

type auditedBoth[T any] struct {
	*audited[T]
	*auditedDead[T]
}

// auditedHandler is how binding a handler finds out that it is audited.
type auditedHandler interface{ audit() *auditor }

func (h *audited[T]) audit() *auditor     { return h.auditor }
func (h *auditedDead[T]) audit() *auditor { return h.auditor }
func (h *auditedBoth[T]) audit() *auditor { return h.audited.auditor }

// Handle calls the handler and records the call.
func (h *audited[T]) Handle(ctx context.Context, msg T, m *Metadata) Outcome {
	rec := h.auditor.begin(m)
	m.onOverruled(func(o settle.Outcome) { h.auditor.overruled(rec, o) })
	returned := false
	defer func() {
		// Not recovered: the loop needs the panic with its stack.
		if !returned && !m.overruled() {
			_ = h.auditor.ended(ctx, rec, AuditPanic, Retry) // a panic is a retry already; the sink's failure was logged
		}
	}()
	o := h.inner.Handle(WithTrace(ctx, rec.TraceID), msg, m)
	returned = true
	if m.overruled() { // recorded already; this outcome is dropped
		return o
	}
	if err := h.auditor.ended(ctx, rec, AuditHandled, o); err != nil && h.auditor.cfg.Strict {
		return Retry.Because("the audit record was not written")
	}
	return o
}

// HandleDead calls the dead handler and records the call.
func (h *auditedDead[T]) HandleDead(ctx context.Context, msg T, m *DeadMetadata) {
	rec := h.auditor.begin(m.Metadata)
	rec.Death = &AuditDeath{Reason: string(m.Death.Reason), Detail: m.Death.Detail, Count: m.Death.Count, OriginalQueue: m.Death.OriginalQueue, DiedAt: m.Death.DiedAt}
	begun := rec
	m.onOverruled(func(o settle.Outcome) { h.auditor.overruled(begun, o) })
	returned := false
	defer func() {
		if !returned && !m.overruled() {
			_ = h.auditor.ended(ctx, rec, AuditPanic, Retry) // a panic is a retry already; the sink's failure was logged
		}
	}()
	h.inner.HandleDead(WithTrace(ctx, rec.TraceID), msg, m)
	returned = true
	if !m.overruled() {
		rec.Outcome = "handled"
		_ = h.auditor.ended(ctx, rec, AuditHandled, settle.Outcome{}) // acked all the same (E5); the sink's failure was logged
	}
}

// begin is the record of a call that begins.
func (a *auditor) begin(m *Metadata) AuditRecord {
	rec := AuditRecord{
		Time: time.Now(), Topology: m.Topology, Queue: m.Queue, RetryCount: m.RetryCount, DeferCount: m.DeferCount, Redelivered: m.Redelivered,
		MessageID: m.MessageID(), DeliveryID: m.DeliveryID(), Key: m.Key(), Headers: m.Headers(), ContentType: m.ContentType(), PayloadSize: len(m.Body()),
	}
	rec.Pod, rec.Group = a.origin(m.Topology)
	if n, ok := m.DeliveryCount(); ok {
		rec.DeliveryCount = &n
	}
	if n, ok := m.Partition(); ok {
		rec.Partition = &n
	}
	if n, ok := m.Offset(); ok {
		rec.Offset = &n
	}
	rec.Timestamp, _ = m.Timestamp()
	if a.cfg.MaxPayload > 0 {
		rec.Payload = m.Body()[:min(len(m.Body()), a.cfg.MaxPayload)]
	}
	if trace, ok := m.Header(header.Trace); ok && trace != "" {
		rec.TraceID = header.Clip(trace, maxHeaderName)
	} else {
		rec.TraceID = uuid.NewString()
	}
	return rec
}

// complete fills in how a call ended.
func (rec *AuditRecord) complete(event AuditEvent, o settle.Outcome) {
	rec.Event, rec.Duration = event, time.Since(rec.Time)
	if rec.Outcome != "" { // a dead letter that was handled has no outcome
		return
	}
	rec.Outcome, rec.Reason, rec.NotBefore = o.Verdict.String(), o.Text, o.NotBefore
	if o.Verdict == settle.VerdictUnset {
		rec.Outcome = settle.VerdictRetry.String()
	}
}

// bindAudit makes an audited handler's auditor known to the runtime that it is bound to. The configuration is known.
func (r *Runtime) bindAudit(topology string, handler any) error {
	h, ok := handler.(auditedHandler)
	if !ok {
		return nil
	}
	a := h.audit()
	if sink, ok := a.sink.(*topologySink); ok && sink.topology == topology {
		return fmt.Errorf("audit of %q: it goes into the audited topology itself, which would never end: use another sink", topology)
	}
	if err := a.bind(r, topology); err != nil {
		return fmt.Errorf("audit of %q: %w", topology, err)
	}
	return nil
}
