package nats

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"

	natsgo "github.com/nats-io/nats.go"

	"github.com/shove-dev/shove/broker"
)

// window is how many messages of one flight may be without an answer: a server refuses what it cannot queue.
const window = 2000

// outgoing is a message whose storing is to be confirmed, or an acknowledgement that is to be answered.
type outgoing struct {
	subject string
	header  natsgo.Header
	data    []byte
	// stream must be the one that stores the message; empty: an acknowledgement.
	stream string
}

// flights are the messages of one connection that wait for an answer. All answers come to one inbox, whose further
// tokens are the flight's number and the message's place in it.
type flights struct {
	conn  *conn
	inbox string // ends in a dot

	mu   sync.Mutex
	byID map[uint64]*flight
	last uint64
	over bool
}

// flight is a batch of messages on its way.
type flight struct {
	owner    *flights
	id       uint64
	messages []outgoing

	// Guarded by owner.mu.
	errs     []error // errPending: no answer yet
	sent     int     // the messages before it are sent
	answered int
	progress chan struct{} // poked at an answer
}

var errPending = errors.New("pending")

func (f *flights) open(c *conn) error {
	f.conn, f.inbox, f.byID = c, c.NewInbox()+".", map[uint64]*flight{}
	sub, err := c.Subscribe(f.inbox+">", f.answer)
	if err != nil {
		return err
	}
	return sub.SetPendingLimits(-1, -1)
}

// send starts a flight. Its wait has to be called.
func (f *flights) send(messages []outgoing) *flight {
	fl := &flight{owner: f, messages: messages, errs: make([]error, len(messages)), progress: make(chan struct{}, 1)}
	for i := range fl.errs {
		fl.errs[i] = errPending
	}
	f.mu.Lock()
	f.last++
	fl.id = f.last
	if !f.over {
		f.byID[fl.id] = fl
	}
	f.mu.Unlock()
	fl.publish()
	return fl
}

// publish sends what the window has room for.
func (fl *flight) publish() {
	f := fl.owner
	f.mu.Lock()
	from := fl.sent
	to := min(len(fl.messages), fl.answered+window)
	fl.sent = max(from, to)
	f.mu.Unlock()
	if from >= to {
		return
	}
	reply := append(make([]byte, 0, len(f.inbox)+24), f.inbox...)
	reply = append(strconv.AppendUint(reply, fl.id, 36), '.')
	n := len(reply)
	for i := from; i < to; i++ {
		m := &fl.messages[i]
		reply = strconv.AppendInt(reply[:n], int64(i), 10)
		err := f.conn.PublishMsg(&natsgo.Msg{Subject: m.subject, Reply: string(reply), Header: m.header, Data: m.data})
		if err != nil {
			fl.resolve(i, notSent(err))
		}
	}
}

// notSent is the error of a message that never left.
func notSent(err error) error {
	if known := classify(err); errors.Is(known, broker.ErrTooLarge) || errors.Is(known, broker.ErrUnsupported) {
		return fmt.Errorf("%w: %w", known, err)
	}
	return fmt.Errorf("not sent: %w: %w", broker.ErrUnavailable, err)
}

func (fl *flight) resolve(i int, err error) {
	fl.owner.mu.Lock()
	defer fl.owner.mu.Unlock()
	fl.resolveLocked(i, err)
}

func (fl *flight) resolveLocked(i int, err error) {
	if i < 0 || i >= len(fl.errs) || fl.errs[i] != errPending { //nolint:errorlint // a mark, never wrapped
		return
	}
	fl.errs[i] = err
	fl.answered++
	if fl.answered == len(fl.errs) || fl.answered == fl.sent || fl.sent-fl.answered == window/2 {
		select {
		case fl.progress <- struct{}{}:
		default:
		}
	}
}

// answer takes one answer of the server.
func (f *flights) answer(m *natsgo.Msg) {
	number, place, ok := strings.Cut(strings.TrimPrefix(m.Subject, f.inbox), ".")
	if !ok {
		return
	}
	id, err := strconv.ParseUint(number, 36, 64)
	if err != nil {
		return
	}
	i, err := strconv.Atoi(place)
	if err != nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if fl := f.byID[id]; fl != nil && i >= 0 && i < len(fl.messages) {
		fl.resolveLocked(i, readAnswer(m, fl.messages[i].stream))
	}
}

// stored begins the answer of a stream that stored a message.
var stored = []byte(`{"stream":"`)

// readAnswer says whether a stream stored a message, or an acknowledgement was taken.
func readAnswer(m *natsgo.Msg, stream string) error {
	if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
		if stream == "" {
			return fmt.Errorf("nobody takes the acknowledgement: the consumer is gone: %w", broker.ErrLost)
		}
		return fmt.Errorf("no stream takes the subject: %w", broker.ErrUnroutable)
	}
	if stream == "" {
		return nil
	}
	if rest, ok := bytes.CutPrefix(m.Data, stored); ok {
		if rest, ok = bytes.CutPrefix(rest, []byte(stream)); ok && len(rest) > 0 && rest[0] == '"' {
			return nil
		}
	}
	var out struct {
		Error  *apiError `json:"error"`
		Stream string    `json:"stream"`
	}
	switch err := json.Unmarshal(m.Data, &out); {
	case err != nil:
		return fmt.Errorf("the answer is not one of a stream: somebody else answers on the subject: %w", broker.ErrUnknown)
	case out.Error == nil && out.Stream == stream:
		return nil
	case out.Error == nil:
		return fmt.Errorf("stored by stream %q instead of %q: %w", out.Stream, stream, broker.ErrRejected)
	}
	refused := broker.ErrRejected
	switch {
	case out.Error.seam() == broker.ErrTooLarge: //nolint:errorlint // one of the seam's, never wrapped
		refused = broker.ErrTooLarge
	case out.Error.Code == codeClusterNotReady, out.Error.Code == codeNoPeers, out.Error.Status == 429:
		refused = broker.ErrUnavailable
	}
	return fmt.Errorf("%w: %w", refused, out.Error)
}

// deny ends the waiting for what the server refused to take, or to answer, on some subjects.
func (f *flights) deny(denied func(subject string) bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, fl := range f.byID {
		for i := range fl.sent {
			if denied(fl.messages[i].subject) {
				fl.resolveLocked(i, err)
			}
		}
	}
}

// abandon ends the waiting because the connection is gone.
func (f *flights) abandon() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.over = true
	for _, fl := range f.byID {
		select {
		case fl.progress <- struct{}{}:
		default:
		}
	}
}

// wait sends what is left and waits for every answer. The result has one error per message, nil where it is stored.
func (fl *flight) wait(ctx context.Context) []error {
	f := fl.owner
	var cause error
	for cause == nil {
		f.mu.Lock()
		done, sent := fl.answered == len(fl.errs), fl.sent
		over := f.over
		f.mu.Unlock()
		if done {
			break
		}
		if over {
			cause = errors.New("connection lost")
			break
		}
		if sent < len(fl.messages) {
			fl.publish()
		}
		select {
		case <-fl.progress:
		case <-ctx.Done():
			cause = ctx.Err()
		case <-f.conn.done:
			cause = errors.New("connection lost")
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.byID, fl.id)
	for i, err := range fl.errs {
		switch {
		case err != errPending: //nolint:errorlint // a mark, never wrapped
		case i < fl.sent:
			fl.errs[i] = fmt.Errorf("no confirm: %w: %w", broker.ErrUnknown, cause)
		default:
			fl.errs[i] = fmt.Errorf("not sent: %w: %w", broker.ErrUnavailable, cause)
		}
	}
	return fl.errs
}
