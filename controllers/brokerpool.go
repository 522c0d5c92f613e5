package controllers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/shove-dev/shove/broker"
)

const (
	// openTimeout bounds one attempt to connect, callTimeout one call on a connection.
	openTimeout = 15 * time.Second
	callTimeout = 60 * time.Second
	// drainTimeout is how long a replaced connection is kept for the calls that run on it.
	drainTimeout = 30 * time.Second
	// maxDeclares bounds the declarations that run at once on one Broker.
	maxDeclares = 16
)

// brokerPool holds one connection per Broker object. What is kept for a Broker survives the replacement of its
// connection, so that a rotated Secret disturbs nobody. It is safe for concurrent use.
type brokerPool struct {
	clock   clock.WithTicker
	metrics *operatorMetrics
	// lost is told once that a Broker's connection failed, by a goroutine that must not be kept.
	lost func(types.NamespacedName)
	// byHand leaves the reading at intervals to the caller; tests use it.
	byHand bool

	mu      sync.Mutex
	entries map[types.UID]*brokerEntry
	closed  bool
	work    sync.WaitGroup
	// stop ends what runs for all entries.
	ctx  context.Context
	stop context.CancelFunc
}

func newBrokerPool(clk clock.WithTicker, m *operatorMetrics, lost func(types.NamespacedName)) *brokerPool {
	p := &brokerPool{clock: clk, metrics: m, lost: lost, entries: map[types.UID]*brokerEntry{}}
	p.ctx, p.stop = context.WithCancel(context.Background())
	return p
}

// Start closes every connection when the manager stops. It implements manager.Runnable.
func (p *brokerPool) Start(ctx context.Context) error {
	<-ctx.Done()
	p.close()
	return nil
}

// close ends every connection and waits for what runs on them. Safe to call twice.
func (p *brokerPool) close() {
	p.mu.Lock()
	p.closed = true
	uids := make([]types.UID, 0, len(p.entries))
	for uid := range p.entries {
		uids = append(uids, uid)
	}
	p.mu.Unlock()
	p.stop()
	for _, uid := range uids {
		p.remove(uid)
	}
	p.work.Wait()
}

// entry is what is kept for a Broker, nil where it has never been connected or is gone.
func (p *brokerPool) entry(uid types.UID) *brokerEntry {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.entries[uid]
}

// ensure returns a Broker's entry with a connection that was opened for key, opening one where there is none or where
// it was opened for another key. The replaced one is closed once the calls on it have returned.
func (p *brokerPool) ensure(ctx context.Context, uid types.UID, name types.NamespacedName, key string,
	open func(context.Context) (broker.Admin, error)) (*brokerEntry, error) {
	if e := p.entry(uid); e != nil && e.connectedWith(key) {
		return e, nil
	}
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	admin, err := open(ctx)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		_ = admin.Close(ctx)
		return nil, fmt.Errorf("the operator stops: %w", broker.ErrUnavailable)
	}
	e := p.entries[uid]
	if e == nil {
		e = &brokerEntry{pool: p, uid: uid, name: name, declares: make(chan struct{}, maxDeclares)}
		e.observer = newObserver(e, p.clock)
		p.entries[uid] = e
		if !p.byHand {
			p.work.Go(func() { e.observer.run(p.ctx) })
		}
	}
	p.mu.Unlock()
	e.swap(&connection{admin: admin, key: key})
	if p.entry(uid) != e { // removed in the meantime
		e.swap(nil)
		return nil, errNotConnected
	}
	return e, nil
}

// remove ends a Broker's connection and forgets it.
func (p *brokerPool) remove(uid types.UID) {
	p.mu.Lock()
	e := p.entries[uid]
	delete(p.entries, uid)
	p.mu.Unlock()
	if e == nil {
		return
	}
	e.observer.stop()
	e.swap(nil)
	p.metrics.forgetBroker(e.name)
}

// all are the entries there are.
func (p *brokerPool) all() []*brokerEntry {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Values(p.entries))
}

// removeOthers removes what is kept for a Broker of that name with another UID: one that was deleted.
func (p *brokerPool) removeOthers(name types.NamespacedName, uid types.UID) {
	for _, e := range p.all() {
		if e.name == name && e.uid != uid {
			p.remove(e.uid)
		}
	}
}

// brokerEntry is one Broker's connection, and who watches what is declared on it.
type brokerEntry struct {
	pool     *brokerPool
	uid      types.UID
	name     types.NamespacedName
	observer *observer
	declares chan struct{}

	mu   sync.Mutex
	conn *connection
	// epoch counts connections: what was verified over an older one may have changed behind our back.
	epoch int
	// server is what the connection is to, from the last probe.
	server broker.Server
}

// connection is one Admin and the calls that run on it.
type connection struct {
	admin broker.Admin
	key   string
	calls sync.WaitGroup
	down  bool // guarded by the entry's mutex
}

// errNotConnected is returned without a call while a Broker is known to be down: nobody hammers it.
var errNotConnected = fmt.Errorf("not connected: %w", broker.ErrUnavailable)

func (e *brokerEntry) connectedWith(key string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.conn != nil && e.conn.key == key && !e.conn.down
}

// swap makes c the connection and closes the one before it once its calls have returned.
func (e *brokerEntry) swap(c *connection) {
	e.mu.Lock()
	old := e.conn
	e.conn = c
	if c != nil {
		e.epoch++
	}
	e.mu.Unlock()
	if c != nil {
		e.pool.metrics.connections.WithLabelValues(e.name.Namespace, e.name.Name).Inc()
	}
	if old != nil {
		e.pool.work.Go(func() { e.drain(old) })
	}
}

func (e *brokerEntry) drain(c *connection) {
	done := make(chan struct{})
	go func() { c.calls.Wait(); close(done) }()
	timer := time.NewTimer(drainTimeout)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C: // closing makes the calls fail, which ends the wait above
	}
	ctx, cancel := context.WithTimeout(context.Background(), openTimeout)
	defer cancel()
	if err := c.admin.Close(ctx); err != nil {
		e.pool.metrics.backendError(e.observer.kind(), err)
	}
	<-done
	e.pool.metrics.connectionClosed(e.name)
}

// up says whether calls are worth making.
func (e *brokerEntry) up() bool {
	if e == nil {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.conn != nil && !e.conn.down
}

func (e *brokerEntry) currentEpoch() int {
	if e == nil {
		return 0
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.epoch
}

// do makes a call. The first one that finds the broker unavailable marks the connection, so that the others do not
// try, and has the Broker probed.
func (e *brokerEntry) do(ctx context.Context, call func(context.Context, broker.Admin) error) error {
	if e == nil {
		return errNotConnected
	}
	e.mu.Lock()
	c := e.conn
	if c == nil || c.down {
		e.mu.Unlock()
		return errNotConnected
	}
	c.calls.Add(1)
	e.mu.Unlock()
	defer c.calls.Done()
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err := call(ctx, c.admin)
	if err == nil {
		return nil
	}
	e.pool.metrics.backendError(e.observer.kind(), err)
	if errors.Is(err, broker.ErrUnavailable) || errors.Is(err, context.DeadlineExceeded) {
		e.mu.Lock()
		first := e.conn == c && !c.down
		c.down = true
		e.mu.Unlock()
		if first {
			e.pool.lost(e.name)
		}
		return fmt.Errorf("%w: %w", broker.ErrUnavailable, err)
	}
	return err
}

// declare is Admin.Declare, with a bound on how many run at once.
func (e *brokerEntry) declare(ctx context.Context, d broker.Declaration) error {
	select {
	case e.declares <- struct{}{}:
		defer func() { <-e.declares }()
	case <-ctx.Done():
		return ctx.Err()
	}
	return e.do(ctx, func(ctx context.Context, a broker.Admin) error { return a.Declare(ctx, d) })
}

// remove is Admin.Delete.
func (e *brokerEntry) remove(ctx context.Context, names []string) (deleted []broker.Deleted, err error) {
	err = e.do(ctx, func(ctx context.Context, a broker.Admin) error {
		deleted, err = a.Delete(ctx, names)
		return err
	})
	return deleted, err
}

// probe asks the server who it is.
func (e *brokerEntry) probe(ctx context.Context) (broker.Server, error) {
	var s broker.Server
	err := e.do(ctx, func(ctx context.Context, a broker.Admin) (err error) {
		s, err = a.Server(ctx)
		return err
	})
	if err == nil {
		e.mu.Lock()
		e.server = s
		e.mu.Unlock()
	}
	return s, err
}

func (e *brokerEntry) serverID() string {
	if e == nil {
		return ""
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.server.ID
}
