package redis

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/shove-dev/shove/broker/brokertest"
)

// wire is a proxy in front of a server that reads what passes it, so that it can break a connection at a step.
type wire struct {
	l        net.Listener
	upstream string

	mu      sync.Mutex
	cond    *sync.Cond
	conns   map[net.Conn]struct{}
	refuse  bool
	held    bool            // answers are held back
	step    brokertest.Step // at which the connections are cut
	reached func(brokertest.Step)
	wg      sync.WaitGroup
}

// startWire starts a proxy; reached, if given, is called at every step before it goes on.
func startWire(upstream string, reached func(brokertest.Step)) (*wire, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	w := &wire{l: l, upstream: upstream, conns: map[net.Conn]struct{}{}, reached: reached}
	w.cond = sync.NewCond(&w.mu)
	w.wg.Go(w.accept)
	return w, nil
}

func testWire(t testing.TB, upstream string) *wire {
	t.Helper()
	w, err := startWire(upstream, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.close)
	return w
}

func (w *wire) addr() string { return w.l.Addr().String() }
func (w *wire) port() int    { return w.l.Addr().(*net.TCPAddr).Port }

func (w *wire) close() {
	_ = w.l.Close()
	w.setRefuse(true)
	w.end()
	w.wg.Wait()
}

func (w *wire) accept() {
	for {
		in, err := w.l.Accept()
		if err != nil {
			return
		}
		w.mu.Lock()
		refuse, upstream := w.refuse, w.upstream
		w.mu.Unlock()
		if refuse {
			_ = in.Close()
			continue
		}
		out, err := net.Dial("tcp", upstream)
		if err != nil {
			_ = in.Close()
			continue
		}
		p := &pass{wire: w, client: in, server: out}
		w.mu.Lock()
		if w.refuse { // it closed meanwhile
			_ = in.Close()
			_ = out.Close()
			w.mu.Unlock()
			continue
		}
		w.conns[in], w.conns[out] = struct{}{}, struct{}{}
		w.mu.Unlock()
		w.wg.Go(p.commands)
		w.wg.Go(p.answers)
	}
}

// end cuts every connection. What was held back is gone.
func (w *wire) end() {
	w.mu.Lock()
	for c := range w.conns {
		_ = c.Close()
	}
	clear(w.conns)
	w.held = false
	w.mu.Unlock()
	w.cond.Broadcast()
}

func (w *wire) setRefuse(b bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refuse = b
}

func (w *wire) hold() (release func()) {
	w.mu.Lock()
	w.held = true
	w.mu.Unlock()
	return func() {
		w.mu.Lock()
		w.held = false
		w.mu.Unlock()
		w.cond.Broadcast()
	}
}

func (w *wire) arm(s brokertest.Step) (disarm func()) {
	set := func(s brokertest.Step) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.step = s
	}
	set(s)
	return func() { set("") }
}

// at is called at a step, and cuts the connections where it is the one.
func (w *wire) at(s brokertest.Step) {
	if s == "" {
		return
	}
	if w.reached != nil {
		w.reached(s)
	}
	w.mu.Lock()
	hit := w.step == s
	if hit {
		w.step = ""
	}
	w.mu.Unlock()
	if hit {
		w.end()
	}
}

// pass is one connection through the proxy.
type pass struct {
	wire           *wire
	client, server net.Conn

	mu   sync.Mutex
	sent []sent
}

// sent is a command whose answer has not come.
type sent struct {
	after     brokertest.Step // what the answer means
	handshake bool            // it belongs to making a connection
}

// commands passes commands on.
func (p *pass) commands() {
	defer p.client.Close()
	defer p.server.Close()
	r := bufio.NewReader(p.client)
	for {
		raw, words, err := readValue(r)
		if err != nil {
			return
		}
		before, after := steps(words)
		p.wire.at(before)
		p.mu.Lock()
		p.sent = append(p.sent, sent{after, len(words) > 0 && (words[0] == "hello" || words[0] == "client")})
		p.mu.Unlock()
		if _, err := p.server.Write(raw); err != nil {
			return
		}
	}
}

// steps are the steps that a command begins, and that its answer ends.
func steps(words []string) (before, after brokertest.Step) {
	if len(words) < 2 {
		return "", ""
	}
	switch {
	case strings.EqualFold(words[0], "XREADGROUP"):
		return "", brokertest.StepReceived
	case words[1] == copyScript.sha, words[1] == copyScript.source:
		return brokertest.StepBeforeCopy, brokertest.StepCopied
	case words[1] == settleScript.sha, words[1] == settleScript.source:
		return brokertest.StepBeforeAck, brokertest.StepAcked
	}
	return "", ""
}

// answers passes answers back.
func (p *pass) answers() {
	defer p.client.Close()
	defer p.server.Close()
	r := bufio.NewReader(p.server)
	for {
		raw, words, err := readValue(r)
		if err != nil {
			return
		}
		p.mu.Lock()
		var about sent
		if len(p.sent) > 0 {
			about, p.sent = p.sent[0], p.sent[1:]
		}
		p.mu.Unlock()
		after := about.after
		p.wire.mu.Lock()
		for p.wire.held && !about.handshake && raw[0] != '-' { // what stores nothing goes on
			p.wire.cond.Wait()
		}
		p.wire.mu.Unlock()
		switch {
		case after == brokertest.StepReceived && len(words) == 0: // nothing came
		case raw[0] == '-': // an error, such as that the script is not known
		default:
			p.wire.at(after)
		}
		if _, err := p.client.Write(raw); err != nil {
			return
		}
	}
}

// readValue reads one value of RESP2, and returns it as it is and the texts in it.
func readValue(r *bufio.Reader) (raw []byte, words []string, err error) {
	var b bytes.Buffer
	err = readInto(r, &b, &words)
	return b.Bytes(), words, err
}

func readInto(r *bufio.Reader, b *bytes.Buffer, words *[]string) error {
	line, err := r.ReadBytes('\n')
	if err != nil {
		return err
	}
	b.Write(line)
	n, _ := strconv.Atoi(strings.TrimSpace(string(line[1:])))
	switch line[0] {
	case '*':
		for range max(n, 0) {
			if err := readInto(r, b, words); err != nil {
				return err
			}
		}
	case '$':
		if n < 0 {
			return nil
		}
		text := make([]byte, n+2)
		if _, err := io.ReadFull(r, text); err != nil {
			return err
		}
		b.Write(text)
		*words = append(*words, string(text[:n]))
	case '+', '-', ':':
		*words = append(*words, strings.TrimSpace(string(line[1:])))
	default:
		return fmt.Errorf("not RESP2: %q", line)
	}
	return nil
}
