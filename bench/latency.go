package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// latencies measures the time from publishing a message to its handler.
type latencies struct {
	mu        sync.Mutex
	all       []time.Duration
	n         int
	done      chan struct{}
	published chan error
}

func newLatencies(n int) *latencies {
	return &latencies{n: n, done: make(chan struct{}), published: make(chan error, 1)}
}

// seen notes the arrival of a message whose first bytes are its time.
func (l *latencies) seen(b []byte) {
	d := time.Since(time.Unix(0, int64(binary.BigEndian.Uint64(b))))
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, d)
	if len(l.all) == l.n {
		close(l.done)
	}
}

// publishAt publishes in the background at a steady rate, in ticks of a millisecond.
func (l *latencies) publishAt(url string, rate int) {
	go func() { l.published <- l.publish(url, rate) }()
}

func (l *latencies) publish(url string, rate int) error {
	conn, err := amqp.Dial(url)
	if err != nil {
		return err
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	// Without confirms the server may drop what it cannot take at once, and the count would never be reached.
	if err := ch.Confirm(false); err != nil {
		return err
	}
	confirms := make([]*amqp.DeferredConfirmation, 0, l.n)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	began := time.Now()
	for sent := 0; sent < l.n; {
		<-tick.C
		for due := min(l.n, int(time.Since(began).Seconds()*float64(rate))); sent < due; sent++ {
			b := make([]byte, len(body))
			binary.BigEndian.PutUint64(b, uint64(time.Now().UnixNano()))
			c, err := ch.PublishWithDeferredConfirm("", "bench", false, false, amqp.Publishing{DeliveryMode: amqp.Persistent, Body: b})
			if err != nil {
				return err
			}
			confirms = append(confirms, c)
		}
	}
	for i, c := range confirms {
		if !c.Wait() {
			return fmt.Errorf("message %d of %d was not confirmed", i+1, l.n)
		}
	}
	return nil
}

// err joins what went wrong while consuming with what went wrong while publishing.
func (l *latencies) err(consuming error) error {
	published := <-l.published
	if consuming != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		consuming = fmt.Errorf("%w (%d of %d messages arrived)", consuming, len(l.all), l.n)
	}
	return errors.Join(consuming, published)
}

func (l *latencies) into(s sample) sample {
	s.p50, s.p99 = percentile(l.all, 0.5), percentile(l.all, 0.99)
	return s
}
