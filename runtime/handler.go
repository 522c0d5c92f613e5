package runtime

import (
	"context"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/runtime/codec"
	"github.com/shove-dev/shove/settle"
)

// Handler handles the messages of one topology (A12). It is called from up to Concurrency goroutines at once. What it
// needs (pools, clients, configuration) are its fields.
//
// The context ends at the handler's deadline and when the process gives up on it at shutdown. A handler that outlives
// its deadline has already been overruled: what it returns then is dropped (H4).
type Handler[T any] interface {
	Handle(ctx context.Context, msg T, meta *Metadata) Outcome
}

// DeadHandler is implemented by a Handler that also drains the topology's dead-letter queue (E1). The message is
// removed after HandleDead returns; a panic or timeout is tried again up to three times before that (E5). Where the
// body cannot be decoded msg is the zero value and meta.DecodeError says why; meta.Body has the bytes (E7).
type DeadHandler[T any] interface {
	HandleDead(ctx context.Context, msg T, meta *DeadMetadata)
}

// HandlerFunc is a function as a Handler.
type HandlerFunc[T any] func(ctx context.Context, msg T, meta *Metadata) Outcome

// Handle calls f.
func (f HandlerFunc[T]) Handle(ctx context.Context, msg T, meta *Metadata) Outcome {
	return f(ctx, msg, meta)
}

// ErrorFunc is a function that returns an error as a Handler; see FromError.
type ErrorFunc[T any] func(ctx context.Context, msg T, meta *Metadata) error

// Handle calls f.
func (f ErrorFunc[T]) Handle(ctx context.Context, msg T, meta *Metadata) Outcome {
	return settle.FromError(f(ctx, msg, meta))
}

// DeadHandlerFunc is a function as a DeadHandler.
type DeadHandlerFunc[T any] func(ctx context.Context, msg T, meta *DeadMetadata)

// HandleDead calls f.
func (f DeadHandlerFunc[T]) HandleDead(ctx context.Context, msg T, meta *DeadMetadata) {
	f(ctx, msg, meta)
}

// call runs a handler on a delivery: it decodes, calls, and returns the outcome. It may panic.
type call func(ctx context.Context, d *broker.Delivery, m *Metadata) settle.Outcome

func handlerCall[T any](h Handler[T], c codec.Codec) call {
	return func(ctx context.Context, d *broker.Delivery, m *Metadata) settle.Outcome {
		var msg T
		if err := codec.Decode(c, d.Body, &msg); err != nil {
			return settle.Poison(settle.Deserialize, err.Error())
		}
		return h.Handle(ctx, msg, m)
	}
}

func deadCall[T any](h DeadHandler[T], c codec.Codec) call {
	return func(ctx context.Context, d *broker.Delivery, m *Metadata) settle.Outcome {
		var msg T
		dead := &DeadMetadata{Metadata: m, Death: deathOf(d, m)}
		if err := codec.Decode(c, d.Body, &msg); err != nil {
			var zero T
			msg, dead.DecodeError = zero, err
		}
		h.HandleDead(ctx, msg, dead)
		return settle.Ack
	}
}
