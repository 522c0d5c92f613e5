package runtime

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

type valueKey struct{}

func newCall() *callContext {
	return &callContext{parent: context.WithValue(context.Background(), valueKey{}, "v"), deadline: time.Now().Add(time.Hour)}
}

func TestCallContextBehavesLikeAContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCall()
		if c.Value(valueKey{}) != "v" || c.Err() != nil {
			t.Error("a fresh context has its parent's values and no error")
		}
		if d, ok := c.Deadline(); !ok || time.Until(d) != time.Hour {
			t.Errorf("deadline %v %v", d, ok)
		}
		child, cancel := context.WithCancel(c)
		defer cancel()
		shorter, cancelShorter := context.WithTimeout(c, time.Minute)
		defer cancelShorter()
		ran := make(chan struct{})
		context.AfterFunc(c, func() { close(ran) })
		stop := context.AfterFunc(c, func() { t.Error("a stopped AfterFunc ran") })
		if !stop() || stop() {
			t.Error("stop reports wrongly")
		}
		select {
		case <-c.Done():
			t.Error("done before its end")
		default:
		}
		c.end(context.DeadlineExceeded)
		c.end(context.Canceled) // the first reason counts
		<-c.Done()
		<-child.Done()
		<-shorter.Done()
		<-ran
		for _, x := range []context.Context{c, child, shorter} {
			if !errors.Is(x.Err(), context.DeadlineExceeded) || !errors.Is(context.Cause(x), context.DeadlineExceeded) {
				t.Errorf("ended with %v, cause %v", x.Err(), context.Cause(x))
			}
		}
	})
}

func TestCallContextAskedAfterItsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCall()
		c.end(context.Canceled)
		<-c.Done()
		ran := make(chan struct{})
		context.AfterFunc(c, func() { close(ran) })
		<-ran
		child, cancel := context.WithTimeout(c, time.Minute)
		defer cancel()
		<-child.Done()
		if !errors.Is(child.Err(), context.Canceled) {
			t.Error(child.Err())
		}
	})
}

func TestCallContextLeavesNoGoroutine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // the bubble fails when one remains
		c := newCall()
		_, cancel := context.WithCancel(c)
		cancel()
		if len(c.after) != 0 {
			t.Error("a cancelled child is still registered")
		}
	})
}
