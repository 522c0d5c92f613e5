package runtime

import (
	"context"
	"errors"
	"log/slog"
	"sync"

	"github.com/shove-dev/shove/runtime/codec"
)

// AuditTopology is the name of the topology that audit records usually go to.
const AuditTopology = "shove-audit-log"

// LogSink writes records to a logger at level info, without payloads and headers.
func LogSink(log *slog.Logger) AuditSink { return logSink{log: log} }

// LogSinkWithPayload is LogSink with payloads and headers. Logs are seen by more people than queues are: use it where
// that is meant.
func LogSinkWithPayload(log *slog.Logger) AuditSink { return logSink{log: log, payload: true} }

type logSink struct {
	log     *slog.Logger
	payload bool
}

func (s logSink) Write(ctx context.Context, records []AuditRecord) error {
	for i := range records {
		s.log.LogAttrs(ctx, slog.LevelInfo, "audit", s.attrs(&records[i])...)
	}
	return nil
}

func (s logSink) attrs(r *AuditRecord) []slog.Attr {
	attrs := []slog.Attr{
		slog.String("trace", r.TraceID), slog.String("event", string(r.Event)), slog.String("topology", r.Topology), slog.String("group", r.Group),
		slog.String("queue", r.Queue), slog.String("outcome", r.Outcome), slog.Time("at", r.Time), slog.Duration("duration", r.Duration),
		slog.String("message", r.MessageID), slog.String("delivery", r.DeliveryID), slog.Uint64("retries", uint64(r.RetryCount)),
		slog.Uint64("defers", uint64(r.DeferCount)), slog.Bool("redelivered", r.Redelivered), slog.Int("size", r.PayloadSize),
	}
	if r.Reason != "" {
		attrs = append(attrs, slog.String("reason", r.Reason))
	}
	if d := r.Death; d != nil {
		attrs = append(attrs, slog.Group("death", "reason", d.Reason, "detail", d.Detail, "count", d.Count, "queue", d.OriginalQueue))
	}
	if s.payload {
		attrs = append(attrs, slog.String("payload", string(r.Payload)), slog.Any("headers", r.Headers))
	}
	return attrs
}

// TopologySink publishes every record as JSON to a topology that the configuration lets this workload publish to,
// usually AuditTopology. Its handlers cannot be audited into it.
func TopologySink(topology string) AuditSink { return &topologySink{topology: topology} }

type topologySink struct {
	topology string
	mu       sync.Mutex
	records  *Publisher[AuditRecord]
}

var errSinkUnbound = errors.New("the audit sink's handler is not bound to a runtime")

// open makes the publisher when the runtime's configuration is known.
func (s *topologySink) open(r *Runtime) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.records != nil {
		return nil
	}
	p, err := NewPublisher[AuditRecord](r, s.topology, PublisherConfig{Codec: codec.JSON, Type: "dev.shove.audit"})
	if err != nil {
		return err
	}
	s.records = p
	return nil
}

func (s *topologySink) Write(ctx context.Context, records []AuditRecord) error {
	s.mu.Lock()
	p := s.records
	s.mu.Unlock()
	if p == nil {
		return errSinkUnbound
	}
	items := make([]Item[AuditRecord], len(records))
	for i, r := range records {
		items[i] = Item[AuditRecord]{Value: r, Options: []PublishOption{WithTraceID(r.TraceID)}}
	}
	return p.PublishBatch(ctx, items)
}
