package rabbitmq

import (
	"bufio"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shove-dev/shove/broker/brokertest"
)

// wire is a proxy that reads the AMQP frames which pass it. It breaks connections at chosen frames, and knows what its
// clients have not acknowledged, which the server's statistics tell only seconds later.
type wire struct {
	server   string
	listener net.Listener

	mu      sync.Mutex
	pairs   map[*pair]struct{}
	refuse  bool
	hold    chan struct{} // not nil: confirms wait until it is closed
	reached func(brokertest.Step) bool
	unacked map[string]int // by queue
}

// pair is one connection of a client and the one to the server behind it.
type pair struct {
	client, server net.Conn
	gone           chan struct{}
	once           sync.Once
	ending         atomic.Bool // nothing goes to the client any more
	channels       map[uint16]*unacked
}

// unacked are the deliveries of one channel.
type unacked struct {
	queues map[string]string // by consumer tag
	tags   map[uint64]string // queue by delivery tag
}

// Method numbers of the class basic, and of channel.close.
const (
	classBasic, classChannel        = 60, 20
	basicConsume, basicPublish      = 20, 40
	basicDeliver, basicAck          = 60, 80
	basicReject, basicNack          = 90, 120
	channelClose, frameMethod  byte = 40, 1
)

// newWire starts a proxy. Reached is asked at each step; when it says true, every connection is cut there.
func newWire(server string, reached func(brokertest.Step) bool) (*wire, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	w := &wire{server: server, listener: l, pairs: map[*pair]struct{}{}, reached: reached, unacked: map[string]int{}}
	go w.accept()
	return w, nil
}

func testWire(t testing.TB, server string) *wire {
	t.Helper()
	w, err := newWire(server, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.close)
	return w
}

func (w *wire) addr() string { return w.listener.Addr().String() }

func (w *wire) close() {
	_ = w.listener.Close()
	w.cut()
}

func (w *wire) accept() {
	for {
		in, err := w.listener.Accept()
		if err != nil {
			return
		}
		w.mu.Lock()
		refuse := w.refuse
		w.mu.Unlock()
		out, err := net.Dial("tcp", w.server)
		if err != nil || refuse {
			_ = in.Close()
			if out != nil {
				_ = out.Close()
			}
			continue
		}
		p := &pair{client: in, server: out, gone: make(chan struct{}), channels: map[uint16]*unacked{}}
		w.mu.Lock()
		w.pairs[p] = struct{}{}
		w.mu.Unlock()
		go w.pass(p, in, out, 8, true) // the protocol header is no frame
		go w.pass(p, out, in, 0, false)
	}
}

// cut closes every connection in the middle of whatever is under way.
func (w *wire) cut() {
	for _, p := range w.open() {
		w.drop(p)
	}
}

// end ends every connection as the death of a client's process does: what it has sent arrives, and nothing comes back.
// It returns when both sides know.
func (w *wire) end() {
	all := w.open()
	for _, p := range all {
		p.ending.Store(true)
		_ = p.client.(*net.TCPConn).CloseWrite()
	}
	patience := time.After(2 * time.Second)
	for _, p := range all {
		select {
		case <-p.gone:
		case <-patience:
			w.drop(p)
		}
	}
	time.Sleep(30 * time.Millisecond) // what the client makes of it is not on the wire
}

func (w *wire) open() []*pair {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := make([]*pair, 0, len(w.pairs))
	for p := range w.pairs {
		all = append(all, p)
	}
	return all
}

func (w *wire) drop(p *pair) {
	p.once.Do(func() {
		close(p.gone)
		_ = p.client.Close()
		_ = p.server.Close()
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.pairs, p)
		for id := range p.channels {
			w.forget(p, id)
		}
	})
}

func (w *wire) setRefuse(on bool) {
	w.mu.Lock()
	w.refuse = on
	w.mu.Unlock()
}

// holdConfirms keeps back what the server sends on a connection from its first confirm on.
func (w *wire) holdConfirms() (release func()) {
	hold := make(chan struct{})
	w.mu.Lock()
	w.hold = hold
	w.mu.Unlock()
	return func() {
		w.mu.Lock()
		w.hold = nil
		w.mu.Unlock()
		close(hold)
	}
}

// arm cuts every connection at the next frame of a step.
func (w *wire) arm(step brokertest.Step) (disarm func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reached = func(s brokertest.Step) bool {
		if s != step {
			return false
		}
		w.mu.Lock()
		w.reached = nil
		w.mu.Unlock()
		return true
	}
	return func() { w.mu.Lock(); w.reached = nil; w.mu.Unlock() }
}

func (w *wire) unackedOf(queue string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.unacked[queue]
}

// pass forwards frame by frame, after the first bytes.
func (w *wire) pass(p *pair, from, to net.Conn, first int64, client bool) {
	defer w.over(p, client)
	r := bufio.NewReader(from)
	if _, err := io.CopyN(to, r, first); err != nil {
		return
	}
	for {
		frame := make([]byte, 7)
		if _, err := io.ReadFull(r, frame); err != nil {
			return
		}
		frame = append(frame, make([]byte, int(binary.BigEndian.Uint32(frame[3:]))+1)...)
		if _, err := io.ReadFull(r, frame[7:]); err != nil {
			return
		}
		var class, method uint16
		var args []byte
		if frame[0] == frameMethod && len(frame) >= 11 {
			class, method, args = binary.BigEndian.Uint16(frame[7:]), binary.BigEndian.Uint16(frame[9:]), frame[11:]
		}
		if class == classBasic && w.at(before(method, client)) {
			w.cut()
			return
		}
		if class == classBasic && !client && (method == basicAck || method == basicNack) && !w.confirmable(p) {
			return
		}
		if !client && p.ending.Load() {
			continue
		}
		w.track(p, binary.BigEndian.Uint16(frame[1:]), class, method, client, args)
		if _, err := to.Write(frame); err != nil {
			return
		}
		if class == classBasic && client && method == basicAck && w.at(brokertest.StepAcked) {
			_ = to.(*net.TCPConn).CloseWrite() // the server reads it, and then the end
			_ = p.client.Close()
			return
		}
	}
}

// over ends a connection when one side is at its end. What a client sent before its end still arrives.
func (w *wire) over(p *pair, client bool) {
	if !client || !p.ending.Load() {
		w.drop(p)
		return
	}
	_ = p.server.(*net.TCPConn).CloseWrite() // the server answers by closing, which ends the other direction
}

// before is the step that a frame would end.
func before(method uint16, client bool) brokertest.Step {
	switch {
	case !client && method == basicDeliver:
		return brokertest.StepReceived
	case client && method == basicPublish:
		return brokertest.StepBeforeCopy
	case !client && method == basicAck:
		return brokertest.StepCopied
	case client && method == basicAck:
		return brokertest.StepBeforeAck
	}
	return ""
}

func (w *wire) at(step brokertest.Step) bool {
	w.mu.Lock()
	reached := w.reached
	w.mu.Unlock()
	return step != "" && reached != nil && reached(step)
}

// confirmable waits until confirms may pass, and says whether the connection is still there.
func (w *wire) confirmable(p *pair) bool {
	w.mu.Lock()
	hold := w.hold
	w.mu.Unlock()
	if hold == nil {
		return true
	}
	select {
	case <-hold:
		return true
	case <-p.gone:
		return false
	}
}

// track follows what is delivered and not acknowledged.
func (w *wire) track(p *pair, id, class, method uint16, client bool, args []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if class == classChannel && method == uint16(channelClose) {
		w.forget(p, id)
		return
	}
	if class != classBasic {
		return
	}
	ch := p.channels[id]
	if ch == nil {
		ch = &unacked{queues: map[string]string{}, tags: map[uint64]string{}}
		p.channels[id] = ch
	}
	switch {
	case client && method == basicConsume:
		queue, rest := shortString(args[2:]) // after a reserved short
		tag, _ := shortString(rest)
		ch.queues[tag] = queue
	case !client && method == basicDeliver:
		tag, rest := shortString(args)
		queue := ch.queues[tag]
		ch.tags[binary.BigEndian.Uint64(rest)] = queue
		w.unacked[queue]++
	case client && (method == basicAck || method == basicNack):
		w.settled(ch, binary.BigEndian.Uint64(args), args[8]&1 == 1)
	case client && method == basicReject:
		w.settled(ch, binary.BigEndian.Uint64(args), false)
	}
}

func (w *wire) settled(ch *unacked, tag uint64, multiple bool) {
	for t, queue := range ch.tags {
		if t == tag || multiple && t < tag {
			delete(ch.tags, t)
			w.unacked[queue]--
		}
	}
}

func (w *wire) forget(p *pair, id uint16) {
	if ch := p.channels[id]; ch != nil {
		for _, queue := range ch.tags {
			w.unacked[queue]--
		}
	}
	delete(p.channels, id)
}

func shortString(b []byte) (string, []byte) {
	n := int(b[0])
	return string(b[1 : 1+n]), b[1+n:]
}
