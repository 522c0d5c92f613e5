package kafka

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/shove-dev/shove/broker/brokertest"
	"github.com/shove-dev/shove/internal/testenv"
)

// Keys of requests (https://kafka.apache.org/protocol#protocol_api_keys).
const (
	keyProduce      = 0
	keyOffsetCommit = 8
)

// network is the way from the clients of a test to the brokers: it can be cut, blocked, and made to keep answers back.
type network struct {
	admin *kgo.Client // not on it

	mu      sync.Mutex
	conns   map[*conn]struct{}
	subs    map[*subscription]struct{}
	refuse  bool
	holding chan struct{} // closed when answers to produce requests go on; nil: they do
	armed   brokertest.Step
	hit     func(brokertest.Step) (lost bool) // what happens at the armed step, and whether the answer gets lost
}

func newNetwork(admin *kgo.Client) *network {
	n := &network{admin: admin, conns: map[*conn]struct{}{}, subs: map[*subscription]struct{}{}}
	n.hit = func(brokertest.Step) bool { n.cut(); return true }
	return n
}

// mode makes a driver use the network.
func (n *network) mode() mode {
	return mode{
		dial:           n.dial,
		sessionTimeout: 2 * time.Second, heartbeat: 100 * time.Millisecond, watch: 500 * time.Millisecond, idle: 500 * time.Millisecond,
		reached: func(_ *subscription, at step) { n.reached(brokertest.Step(at)) },
		opened: func(s *subscription) {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.subs[s] = struct{}{}
		},
	}
}

func (n *network) dial(ctx context.Context, _, proto, addr string) (net.Conn, error) {
	n.mu.Lock()
	refuse := n.refuse
	n.mu.Unlock()
	if refuse {
		return nil, &net.OpError{Op: "dial", Net: proto, Err: errors.New("connection refused by the test")}
	}
	raw, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, proto, addr)
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: raw, network: n, keys: map[int32]int16{}, deadline: time.Time{}}
	c.cond.L = &c.mu
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.refuse {
		raw.Close()
		return nil, &net.OpError{Op: "dial", Net: proto, Err: errors.New("connection refused by the test")}
	}
	n.conns[c] = struct{}{}
	go c.pump()
	return c, nil
}

// cut ends every connection, and lets the groups notice at once what they would notice when the sessions of their
// members are over.
func (n *network) cut() {
	n.breakConns()
	for _, s := range n.live() {
		if err := n.evict(s); err != nil {
			panic(fmt.Sprintf("a member of group %q cannot be removed: %v", s.group, err)) // called without a test at hand, too
		}
	}
}

// breakConns ends every connection, for a moment only.
func (n *network) breakConns() {
	n.mu.Lock()
	conns := n.conns
	n.conns = map[*conn]struct{}{}
	n.mu.Unlock()
	for c := range conns {
		_ = c.broken(io.EOF)
	}
}

// shared waits until every subscription has a part of its topic.
func (n *network) shared(t testing.TB) {
	t.Helper()
	testenv.Eventually(t, bound, func() error {
		for _, s := range n.live() {
			s.mu.Lock()
			have := len(s.ready)
			s.mu.Unlock()
			if have != 1 {
				return fmt.Errorf("a consumer has %d of the partitions of %q", have, s.main)
			}
		}
		return nil
	})
}

// evict removes a member from its group, until it knows.
func (n *network) evict(s *subscription) error {
	return testenv.Poll(bound, func() error {
		if s.isOver() {
			return nil
		}
		id, _ := s.member.GroupMetadata()
		if id == "" {
			return errors.New("it has not joined yet")
		}
		req := kmsg.NewPtrLeaveGroupRequest()
		req.Group = s.group
		req.MemberID = id
		m := kmsg.NewLeaveGroupRequestMember()
		m.MemberID = id
		req.Members = append(req.Members, m)
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if _, err := req.RequestWith(ctx, n.admin); err != nil {
			return err
		}
		select { // a member that is about to join anew takes another id, and is to be found again
		case <-s.ended:
			return nil
		case <-time.After(time.Second):
			return errors.New("it is still a member")
		}
	})
}

func (s *subscription) isOver() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// live are the subscriptions that are not over.
func (n *network) live() []*subscription {
	n.mu.Lock()
	defer n.mu.Unlock()
	var subs []*subscription
	for s := range n.subs {
		if s.isOver() {
			delete(n.subs, s)
			continue
		}
		subs = append(subs, s)
	}
	return subs
}

func (n *network) block() (unblock func()) {
	n.setRefuse(true)
	n.cut()
	return func() { n.setRefuse(false) }
}

func (n *network) setRefuse(refuse bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.refuse = refuse
}

func (n *network) holdConfirms() (release func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	held := make(chan struct{})
	n.holding = held
	var once sync.Once
	return func() {
		once.Do(func() {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.holding = nil
			close(held)
		})
	}
}

// arm makes something happen when a step is reached next.
func (n *network) arm(at brokertest.Step) (disarm func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.armed = at
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.armed = ""
	}
}

// reached makes happen what is to happen at a step, and reports whether the answer gets lost.
func (n *network) reached(at brokertest.Step) bool {
	n.mu.Lock()
	is := n.armed == at
	if is {
		n.armed = ""
	}
	n.mu.Unlock()
	return is && n.hit(at)
}

// conn is a connection that looks at the frames on it.
type conn struct {
	net.Conn
	network *network

	mu       sync.Mutex
	cond     sync.Cond
	keys     map[int32]int16 // of requests without an answer, by their correlation ids
	in       bytes.Buffer
	err      error
	deadline time.Time
}

// Write notes what is asked. The library writes each request at once.
func (c *conn) Write(b []byte) (int, error) {
	if len(b) >= 12 {
		c.mu.Lock()
		c.keys[int32(binary.BigEndian.Uint32(b[8:]))] = int16(binary.BigEndian.Uint16(b[4:]))
		c.mu.Unlock()
	}
	return c.Conn.Write(b)
}

// pump reads answers, and keeps back those that the test keeps back.
func (c *conn) pump() {
	var head [8]byte
	for {
		_, err := io.ReadFull(c.Conn, head[:])
		var body []byte
		if err == nil {
			body = make([]byte, max(int(binary.BigEndian.Uint32(head[:]))-4, 0))
			_, err = io.ReadFull(c.Conn, body)
		}
		if err != nil {
			_ = c.broken(err)
			return
		}
		id := int32(binary.BigEndian.Uint32(head[4:]))
		c.mu.Lock()
		key := c.keys[id]
		delete(c.keys, id)
		c.mu.Unlock()
		switch key {
		case keyProduce:
			c.network.mu.Lock()
			held := c.network.holding
			c.network.mu.Unlock()
			if held != nil {
				<-held
			}
			if c.network.reached(brokertest.StepCopied) {
				continue
			}
		case keyOffsetCommit:
			if c.network.reached(brokertest.StepAcked) {
				continue
			}
		}
		c.mu.Lock()
		if c.err == nil {
			c.in.Write(head[:])
			c.in.Write(body)
		}
		c.mu.Unlock()
		c.cond.Broadcast()
	}
}

func (c *conn) Read(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case c.in.Len() > 0:
			return c.in.Read(b)
		case c.err != nil:
			return 0, c.err
		case !c.deadline.IsZero() && !time.Now().Before(c.deadline):
			return 0, &net.OpError{Op: "read", Err: errTimeout{}}
		}
		var timer *time.Timer
		if !c.deadline.IsZero() {
			timer = time.AfterFunc(time.Until(c.deadline), c.cond.Broadcast)
		}
		c.cond.Wait()
		if timer != nil {
			timer.Stop()
		}
	}
}

type errTimeout struct{}

func (errTimeout) Error() string   { return "i/o timeout" }
func (errTimeout) Timeout() bool   { return true }
func (errTimeout) Temporary() bool { return true }

func (c *conn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	c.deadline = t
	c.mu.Unlock()
	c.cond.Broadcast()
	return nil
}

func (c *conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.Conn.SetWriteDeadline(t))
}

func (c *conn) Close() error { return c.broken(net.ErrClosed) }

// broken ends the connection. What was not read by then never is.
func (c *conn) broken(err error) error {
	c.mu.Lock()
	if c.err == nil {
		c.err = err
	}
	c.in.Reset()
	c.mu.Unlock()
	c.cond.Broadcast()
	c.network.mu.Lock()
	delete(c.network.conns, c)
	c.network.mu.Unlock()
	return c.Conn.Close()
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
