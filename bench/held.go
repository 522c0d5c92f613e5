package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	goruntime "runtime"
	"sync/atomic"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/runtime"
)

// held is a check of many messages that wait at once. They are published at a rate and retried once, by a tier that is
// longer than that takes, so that all of them are held before the first is due.
type held struct {
	name string
	// p99 is how late one in a hundred may be. None may be early.
	p99  time.Duration
	make func() (setup, error)
}

const (
	heldMessages = 100_000
	heldRate     = 2_500 // a second
	heldFor      = 45 * time.Second
	// heldGrowth is what the consumer's heap may grow by meanwhile, in bytes: some 80 a message would be a list of
	// them.
	heldGrowth = 4 << 20
)

// heldRun is what is known of each message.
type heldRun struct {
	due   []atomic.Int64 // Unix nanoseconds
	late  []atomic.Int64 // nanoseconds
	early atomic.Int64
	first countdown
	left  *countdown
}

func (h *heldRun) handle(m *runtime.Metadata) runtime.Outcome {
	i := binary.BigEndian.Uint64(m.Body())
	now := time.Now()
	if m.RetryCount == 0 {
		h.due[i].Store(now.Add(heldFor).UnixNano()) // the copy is written after this
		h.first.tick()
		return runtime.Retry
	}
	late := now.UnixNano() - h.due[i].Load()
	if late < 0 {
		h.early.Add(1)
	}
	if h.late[i].Swap(late) == 0 { // else it is a duplicate
		h.left.tick()
	}
	return runtime.Ack
}

// run prints one line and says whether the goals are met.
func (c held) run(out io.Writer) (bool, error) {
	s, err := c.make()
	if err != nil {
		return false, err
	}
	h := &heldRun{due: make([]atomic.Int64, heldMessages), late: make([]atomic.Int64, heldMessages), left: newCountdown(heldMessages)}
	h.first = *newCountdown(heldMessages)
	r, err := s.runtime(h.handle)
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	publish := make(chan error, 1)
	go func() { publish <- s.publish(ctx) }()
	heap, err := h.watch(ended, publish)
	cancel()
	if err = errors.Join(err, <-ended); err != nil {
		return false, err
	}
	all := make([]time.Duration, heldMessages)
	for i := range all {
		all[i] = time.Duration(h.late[i].Load())
	}
	p50, p99, most := percentile(all, 0.5), percentile(all, 0.99), percentile(all, 1)
	ok := h.early.Load() == 0 && p99 <= c.p99 && heap <= heldGrowth
	ms := func(d time.Duration) float64 { return d.Seconds() * 1000 }
	fmt.Fprintf(out, "%-46s late p50 %.0f p99 %.0f max %.0f ms goal ≤%.0f | %d early | heap %+.1f MB goal ≤%.0f | %s\n",
		c.name, ms(p50), ms(p99), ms(most), ms(c.p99), h.early.Load(), float64(heap)/(1<<20), float64(heldGrowth)/(1<<20), map[bool]string{true: "ok", false: "MISSED"}[ok])
	return ok, nil
}

// watch waits for the end and returns by how much the heap grew from when the first tenth was held to its peak while
// all were.
func (h *heldRun) watch(ended, publish chan error) (growth int64, err error) {
	heap := func() int64 {
		var m goruntime.MemStats
		goruntime.GC()
		goruntime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	limit := time.After(5 * time.Minute)
	var before, peak int64
	for {
		select {
		case <-h.left.done:
			return peak - before, nil
		case err := <-ended:
			ended <- nil
			return 0, errors.Join(errors.New("the runtime ended"), err)
		case err := <-publish:
			if err != nil {
				return 0, fmt.Errorf("publish: %w", err)
			}
		case <-limit:
			return 0, fmt.Errorf("not done within 5 minutes: %d not held, %d not back", h.first.left.Load(), h.left.left.Load())
		case <-tick.C:
			switch first := h.first.left.Load(); {
			case first > heldMessages*9/10:
			case before == 0:
				before = heap()
			case h.left.left.Load() == heldMessages: // none is back: a collection then would make it late
				peak = max(peak, heap())
			}
		}
	}
}

// publish sends the messages, each with its number, at the rate.
func (s setup) publish(ctx context.Context) error {
	c, err := s.driver.OpenClient(ctx, broker.Config{Endpoint: s.kind.Endpoint})
	if err != nil {
		return err
	}
	defer c.Close(context.WithoutCancel(ctx))
	p, err := c.Publisher(ctx, s.declaration())
	if err != nil {
		return err
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	began := time.Now()
	for sent := 0; sent < heldMessages; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		var batch []broker.Message
		for due := min(heldMessages, int(time.Since(began).Seconds()*heldRate)); sent < due; sent++ {
			b := make([]byte, len(body))
			binary.BigEndian.PutUint64(b, uint64(sent))
			batch = append(batch, broker.Message{ID: fmt.Sprintf("held-%d-%d", began.UnixNano(), sent), Body: b})
		}
		if err := p.Publish(ctx, batch); err != nil {
			return err
		}
	}
	return p.Close(ctx)
}
