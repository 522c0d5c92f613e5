package memory

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// Options of a Server. The zero value is a broker without limits.
type Options struct {
	// ID is what broker.Server.ID reports. Defaults to a name that is unique in this process.
	ID string
	// MaxHeaderBytes bounds the size of a message's headers (names and values); a message above it is refused with
	// broker.ErrTooLarge. Zero: no bound.
	MaxHeaderBytes int
	// Anonymous makes the broker one that gives messages no identity of its own, so that consumers have to derive
	// one for messages whose publisher sent none (C8).
	Anonymous bool
}

// Server is a broker in this process. It is safe for concurrent use. It needs no closing: it has no goroutine of its
// own, and what it holds is freed with it.
type Server struct {
	opts   Options
	faults faults

	mu      sync.Mutex
	queues  map[string]*queue
	clients map[*client]struct{}
	entries uint64 // the last entry id given out
	down    bool
}

var serverIDs atomic.Int64

// New makes an empty Server.
func New(opts Options) *Server {
	if opts.ID == "" {
		opts.ID = "memory-" + strconv.FormatInt(serverIDs.Add(1), 10)
	}
	return &Server{opts: opts, queues: map[string]*queue{}, clients: map[*client]struct{}{}}
}

// DefaultServer is the broker behind Default.
var DefaultServer = New(Options{ID: "memory"})

// Default is the driver of DefaultServer, for programs that need one in-memory broker and no more.
var Default = Driver(DefaultServer)

// Driver makes a driver whose clients and admins all talk to s. The endpoint, credentials and TLS of a broker.Config
// are not looked at.
func Driver(s *Server) broker.Driver {
	return broker.Driver{
		Kind:         topology.Memory,
		OpenClient:   func(_ context.Context, cfg broker.Config) (broker.Client, error) { return s.openClient(cfg), nil },
		OpenAdmin:    func(context.Context, broker.Config) (broker.Admin, error) { return s.openAdmin() },
		Objects:      Objects,
		Capabilities: s.capabilities,
	}
}

func (s *Server) openClient(cfg broker.Config) *client {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := &client{server: s, name: cfg.Name, subs: map[*subscription]struct{}{}}
	s.clients[c] = struct{}{}
	return c
}

// add creates a stored message's entry in q and wakes who waits for it. s.mu is held.
func (s *Server) add(q *queue, m *stored, now time.Time) {
	s.entries++
	m.entry = s.entries
	m.at = now
	q.push(m, now)
}

// find returns a queue, or ErrUnroutable. s.mu is held.
func (s *Server) find(name string) (*queue, error) {
	if q := s.queues[name]; q != nil {
		return q, nil
	}
	return nil, fmt.Errorf("no queue %q: %w", name, broker.ErrUnroutable)
}

// admit finds the queue that a message goes to and says why it cannot be stored. s.mu is held.
func (s *Server) admit(name string, m *stored) (*queue, error) {
	q, err := s.find(name)
	if err != nil {
		return nil, err
	}
	if limit := s.opts.MaxHeaderBytes; limit > 0 {
		if n := headerBytes(m.headers); n > limit {
			return nil, fmt.Errorf("queue %q: headers of %d bytes, at most %d: %w", name, n, limit, broker.ErrTooLarge)
		}
	}
	if q.props.maxLength > 0 && q.ready()+q.unsettled >= q.props.maxLength {
		return nil, fmt.Errorf("queue %q is full (%d messages): %w", name, q.props.maxLength, broker.ErrRejected)
	}
	return q, nil
}

// errDown is what a stopped broker answers. s.mu is held.
func (s *Server) errDown() error {
	if s.down {
		return fmt.Errorf("in-memory broker %q is stopped: %w", s.opts.ID, broker.ErrUnavailable)
	}
	return nil
}
