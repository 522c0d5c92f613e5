// Quickstart shows what shove does with a message, on a broker in this process: no server, no cluster, a few seconds.
//
//	go run ./examples/quickstart
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/broker/memory"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/config"
)

// Mail is the message.
type Mail struct {
	To string `json:"to"`
}

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

// settings is what the operator would hand to the process as a file: a queue, two hold queues, a dead-letter queue, and
// who works on it.
func settings() *config.RuntimeConfig {
	return &config.RuntimeConfig{
		APIVersion: config.APIVersion, Kind: config.Kind,
		Brokers: []config.Broker{{Name: "local", Kind: "memory"}},
		Topologies: []config.Topology{{
			Name: "mails", Broker: "local", Queue: "mails", DeadLetter: "mails-dlq",
			HoldQueues: []config.Hold{{Delay: config.Duration(200 * time.Millisecond)}, {Delay: config.Duration(600 * time.Millisecond)}},
		}},
		Consumers: []config.Consumer{{Group: "mailers", Topology: "mails", Options: config.Options{MaxRetries: new(uint32(2))}}},
		Publish:   []config.Publish{{Topology: "mails"}},
	}
}

func run(ctx context.Context, out io.Writer) error {
	ctx, stop := context.WithTimeout(ctx, 30*time.Second)
	defer stop()
	m := &mailer{out: out, began: time.Now(), left: 5, done: stop}
	r, err := runtime.New(
		runtime.Drivers(memory.Driver(memory.New(memory.Options{}))),
		runtime.Config(settings()), runtime.Declare(), // no operator here: the process declares its queues itself
		runtime.HTTPAddr(""), runtime.Registerer(prometheus.NewRegistry()), runtime.Logger(slog.New(slog.DiscardHandler)),
		runtime.Handle[Mail]("mails", m),
	)
	if err != nil {
		return err
	}
	mails, err := runtime.NewPublisher[Mail](r, "mails", runtime.PublisherConfig{})
	if err != nil {
		return err
	}
	ran := make(chan error, 1)
	go func() { ran <- r.Run(ctx) }()
	for _, to := range []string{"ann", "busy", "early", "unknown", "nobody"} {
		if err := mails.Publish(ctx, Mail{To: to}); err != nil {
			stop()
			return errors.Join(err, <-ran)
		}
	}
	err = <-ran // ends when every mail has found its end
	if m.left > 0 && err == nil {
		return fmt.Errorf("%d mails did not find their end in time", m.left)
	}
	fmt.Fprintln(out, "every mail found its end")
	return err
}

// mailer handles mails, and the dead ones.
type mailer struct {
	out   io.Writer
	began time.Time
	done  func()

	mu   sync.Mutex
	left int
}

var errMailbox = errors.New("mailbox busy")

// Handle shows the four outcomes.
func (m *mailer) Handle(_ context.Context, mail Mail, meta *runtime.Metadata) runtime.Outcome {
	switch {
	case mail.To == "unknown":
		m.say(mail, meta, "reject: no such mailbox; dead-lettered at once")
		return runtime.Reject.Because("no such mailbox")
	case mail.To == "early" && meta.DeferCount == 0:
		m.say(mail, meta, "defer:  too early; held, and no retry is spent")
		return runtime.Defer
	case mail.To == "nobody", mail.To == "busy" && meta.RetryCount < 2:
		next := "held for its tier's delay"
		if meta.RetryCount == 2 {
			next = "the retries are used up"
		}
		m.say(mail, meta, "retry:  "+errMailbox.Error()+"; "+next)
		return runtime.FromError(errMailbox)
	}
	m.say(mail, meta, "ack:    delivered")
	m.end()
	return runtime.Ack
}

// HandleDead drains the dead-letter queue.
func (m *mailer) HandleDead(_ context.Context, mail Mail, meta *runtime.DeadMetadata) {
	m.say(mail, meta.Metadata, fmt.Sprintf("dead:   %s (%s)", meta.Death.Reason, meta.Death.Detail))
	m.end()
}

func (m *mailer) say(mail Mail, meta *runtime.Metadata, what string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	fmt.Fprintf(m.out, "%5.2fs  %-8s call %d  %s\n", time.Since(m.began).Seconds(), mail.To, meta.RetryCount+meta.DeferCount+1, what)
}

// end counts a mail that found its end; the last one ends the process.
func (m *mailer) end() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.left--; m.left == 0 {
		m.done()
	}
}
