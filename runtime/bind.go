package runtime

import (
	"context"
	"errors"
	"fmt"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/runtime/codec"
	"github.com/shove-dev/shove/runtime/config"
)

// binding is a handler bound to a topology's name.
type binding struct {
	topology string
	role     broker.Role
	codec    codec.Codec
	options  config.Options
	make     func(codec.Codec) (call, error)
}

// Handle binds a handler to a topology by its name (A12). Where the handler is also a DeadHandler, the dead-letter
// queue is drained too (E1). A topology without a consumer in the configuration makes the process not ready; a consumer
// without a handler makes Run fail.
func Handle[T any](topology string, h Handler[T], opts ...HandleOption) Option {
	return func(r *Runtime) error {
		if h == nil {
			return fmt.Errorf("handler of %q: nil", topology)
		}
		err := r.bind(topology, broker.ReadMain, func(c codec.Codec) (call, error) {
			return handlerCall(h, c), errors.Join(codec.Check[T](c), r.bindAudit(topology, h))
		}, opts)
		if err != nil {
			return err
		}
		if dead, ok := h.(DeadHandler[T]); ok {
			return HandleDead(topology, dead, opts...)(r)
		}
		return nil
	}
}

// HandleFrom binds a handler that is made anew for every consumer (A13).
func HandleFrom[T any](topology string, factory func() (Handler[T], error), opts ...HandleOption) Option {
	return func(r *Runtime) error {
		return r.bind(topology, broker.ReadMain, func(c codec.Codec) (call, error) {
			h, err := factory()
			if err != nil {
				return nil, fmt.Errorf("make it: %w", err)
			}
			return handlerCall(h, c), errors.Join(codec.Check[T](c), r.bindAudit(topology, h))
		}, opts)
	}
}

// HandleDead binds a dead handler to a topology's dead-letter queue (E1). A topology without one makes Run fail (E2).
func HandleDead[T any](topology string, h DeadHandler[T], opts ...HandleOption) Option {
	return func(r *Runtime) error {
		if h == nil {
			return fmt.Errorf("dead handler of %q: nil", topology)
		}
		return r.bind(topology, broker.ReadDeadLetter, func(c codec.Codec) (call, error) {
			return deadCall(h, c), errors.Join(codec.Check[T](c), r.bindAudit(topology, h))
		}, opts)
	}
}

// DrainDead binds the default dead handler, which logs a warning for each dead letter and removes it (E4).
func DrainDead(topology string, opts ...HandleOption) Option {
	return func(r *Runtime) error {
		opts := append([]HandleOption{Codec(codec.Raw)}, opts...)
		return HandleDead(topology, DeadHandlerFunc[[]byte](func(_ context.Context, _ []byte, m *DeadMetadata) {
			r.log.Warn("dead letter", "topology", topology, "delivery", m.DeliveryID(), "id", m.MessageID(), "reason", m.Death.Reason,
				"queue", m.Death.OriginalQueue, "deaths", m.Death.Count)
		}), opts...)(r)
	}
}

func (r *Runtime) bind(topology string, role broker.Role, prepare func(codec.Codec) (call, error), opts []HandleOption) error {
	b := binding{topology: topology, role: role, codec: codec.JSON, make: prepare}
	for _, o := range opts {
		if err := o(&b); err != nil {
			return fmt.Errorf("handler of %q: %w", topology, err)
		}
	}
	for _, other := range r.bindings {
		if other.topology == topology && other.role == role {
			return fmt.Errorf("handler of %q: bound twice", topology)
		}
	}
	r.bindings = append(r.bindings, b)
	return nil
}
