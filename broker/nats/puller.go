package nats

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	natsgo "github.com/nats-io/nats.go"

	"github.com/shove-dev/shove/broker"
)

const (
	// pullExpires is how long a request for messages stays at the server, heartbeatEvery how often the server shows
	// meanwhile that it still knows of it.
	pullExpires    = 30 * time.Second
	heartbeatEvery = 5 * time.Second
	// silence is how long nothing may be heard of a request before the consumer is looked for.
	silence = 2*heartbeatEvery + 2*time.Second
)

// puller requests messages of one consumer. The client library's own loop prefetches beyond what is free and counts
// what it handed out as free; here the owner says how many it can take.
type puller struct {
	conn     *conn
	stream   string
	consumer string
	inbox    string
	sub      *natsgo.Subscription
	maxBatch int
	expires  time.Duration
	prefix   string // of the reply subjects

	// take gets each message and has to call less for it, moved is called when requests ended without one, broke when
	// there will be no more. All of them are called by the library's goroutine for this subscription.
	take  func(*natsgo.Msg)
	moved func()
	broke func(error)

	requested atomic.Int64 // asked for and not delivered yet
	heard     atomic.Int64 // when the server last showed that it knows of a request, in Unix nanoseconds
	suspect   atomic.Bool  // the consumer should be looked for
	ended     chan struct{}
	endOnce   sync.Once
}

// open subscribes to the puller's inbox.
func (p *puller) open(c *conn, info *consumerInfo) error {
	p.conn, p.inbox, p.ended = c, c.NewInbox(), make(chan struct{})
	p.maxBatch, p.expires = int(info.Config.number("max_batch")), pullExpires
	if most := time.Duration(info.Config.number("max_expires")); most > 0 { // of a durable that somebody else made
		p.expires = min(p.expires, most)
	}
	sub, err := c.Subscribe(p.inbox, p.handle)
	if err != nil {
		return mapError(err)
	}
	sub.SetClosedHandler(func(string) { p.endOnce.Do(func() { close(p.ended) }) })
	p.sub = sub
	p.heard.Store(time.Now().UnixNano())
	return mapError(sub.SetPendingLimits(-1, -1)) // what comes was asked for
}

// request asks for n more messages.
func (p *puller) request(n int) {
	if n <= 0 {
		return
	}
	if p.maxBatch > 0 {
		n = min(n, p.maxBatch)
	}
	if p.requested.Add(int64(n)) == int64(n) {
		p.heard.Store(time.Now().UnixNano()) // nothing was to be heard before
	}
	body := make([]byte, 0, 80)
	body = strconv.AppendInt(append(body, `{"batch":`...), int64(n), 10)
	body = strconv.AppendInt(append(body, `,"expires":`...), int64(p.expires), 10)
	body = strconv.AppendInt(append(body, `,"idle_heartbeat":`...), int64(min(heartbeatEvery, p.expires/2)), 10)
	// An error means that the connection is gone, which everybody learns of by itself.
	_ = p.conn.PublishRequest(apiConsumerNext+p.stream+"."+p.consumer, p.inbox, append(body, '}'))
}

// handle takes what comes to the inbox: messages, and words of the server about requests.
func (p *puller) handle(m *natsgo.Msg) {
	if m.Reply == "" { // every message has one, to be acknowledged by
		p.status(m)
		return
	}
	p.take(m)
}

// less counts down what is asked for, which may have been forgotten meanwhile. The owner of a message calls it when the
// message takes a place, not before: the place would be filled twice.
func (p *puller) less(n int64) {
	if p.requested.Add(-n) < 0 {
		p.requested.Store(0)
	}
}

// status takes a word of the server about a request. Codes and texts are those of nats-server's consumer.go.
func (p *puller) status(m *natsgo.Msg) {
	p.heard.Store(time.Now().UnixNano())
	pending, _ := strconv.ParseInt(m.Header.Get("Nats-Pending-Messages"), 10, 64)
	text := m.Header.Get("Description")
	switch m.Header.Get("Status") {
	case "100": // heartbeat
		return
	case "503": // nobody takes the request: the consumer is gone, or has no leader at the moment
		p.requested.Store(0)
		p.suspect.Store(true)
		return
	case "409":
		switch {
		case strings.Contains(text, "Consumer Deleted"):
			p.broke(fmt.Errorf("%w: consumer %q of stream %q was deleted", broker.ErrLost, p.consumer, p.stream))
			return
		case strings.Contains(text, "push based"):
			p.broke(fmt.Errorf("%w: consumer %q of stream %q pushes its messages now", broker.ErrLost, p.consumer, p.stream))
			return
		case strings.Contains(text, "Leadership Change"), strings.Contains(text, "Server Shutdown"):
			p.requested.Store(0)
			p.moved()
			return
		case pending == 0: // refused, such as "Exceeded MaxWaiting": asked again at the next tick
			p.requested.Store(0)
			return
		}
	}
	p.less(pending)
	p.moved()
}

// silent says whether the server shows no more that it knows of a request.
func (p *puller) silent(now time.Time) bool {
	return p.suspect.Load() || p.requested.Load() > 0 && now.UnixNano()-p.heard.Load() > int64(silence)
}

// check looks for the consumer. Nil: it is there, and what was requested is to be requested again.
func (p *puller) check(ctx context.Context) error {
	_, err := p.conn.consumer(ctx, p.stream, p.consumer)
	switch {
	case err == nil:
		p.suspect.Store(false)
		p.heard.Store(time.Now().UnixNano())
		p.requested.Store(0)
		return nil
	case errors.Is(err, broker.ErrNotFound):
		return fmt.Errorf("%w: consumer %q of stream %q is gone", broker.ErrLost, p.consumer, p.stream)
	default:
		return err
	}
}

// stop ends the requests. When it returns nil the server sends nothing more, and everything it sent was taken.
func (p *puller) stop(ctx context.Context) error {
	if err := p.sub.Drain(); err != nil {
		return nil // the connection is gone, or the subscription is
	}
	select {
	case <-p.ended:
		return nil
	case <-p.conn.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stop consuming from stream %q: %w: %w", p.stream, broker.ErrUnavailable, ctx.Err())
	}
}
