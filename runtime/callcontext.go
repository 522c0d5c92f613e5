package runtime

import (
	"context"
	"sync"
	"time"

	"github.com/shove-dev/shove/settle"
)

// callContext is the context of one handler call. Beside context.WithTimeout it makes no timer (one watcher serves
// all calls of a consumer) and makes its Done channel only when it is asked for: most handlers that do no I/O never
// ask, and a timer and channel per message would cost more than the rest of the loop.
type callContext struct {
	parent   context.Context // values only; the loop ends a call itself
	deadline time.Time       // zero: none

	mu    sync.Mutex
	done  chan struct{}
	err   error
	after map[*afterFunc]struct{}
	// overrule is set where somebody wants to know that the call was overruled; see Metadata.onOverruled.
	overrule *overruleHooks
}

// overruleHooks are what an overruled call tells.
type overruleHooks struct {
	overruled bool
	tell      []func(settle.Outcome)
}

// endOverruled ends the context of a call whose outcome the loop has replaced.
func (c *callContext) endOverruled(reason error, instead settle.Outcome) {
	c.mu.Lock()
	var tell []func(settle.Outcome)
	if c.overrule != nil { // before the context ends: the handler may return at once, and asks
		c.overrule.overruled, tell = true, c.overrule.tell
	}
	c.mu.Unlock()
	c.end(reason)
	for _, f := range tell {
		f(instead)
	}
}

type afterFunc struct{ f func() }

func (c *callContext) Deadline() (time.Time, bool) { return c.deadline, !c.deadline.IsZero() }

func (c *callContext) Value(key any) any { return c.parent.Value(key) }

func (c *callContext) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done == nil {
		c.done = make(chan struct{})
		if c.err != nil {
			close(c.done)
		}
	}
	return c.done
}

func (c *callContext) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// AfterFunc lets contexts derived from this one end with it without a goroutine of their own; the context package
// looks for this method.
func (c *callContext) AfterFunc(f func()) (stop func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		go f()
		return func() bool { return false }
	}
	a := &afterFunc{f}
	if c.after == nil {
		c.after = map[*afterFunc]struct{}{}
	}
	c.after[a] = struct{}{}
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		_, waiting := c.after[a]
		delete(c.after, a)
		return waiting
	}
}

// end ends the call's context. The first reason counts.
func (c *callContext) end(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = err
	if c.done != nil {
		close(c.done)
	}
	after := c.after
	c.after = nil
	c.mu.Unlock()
	for a := range after {
		go a.f()
	}
}
