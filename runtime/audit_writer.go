package runtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/shove-dev/shove/settle"
)

const (
	// auditBatch bounds one write.
	auditBatch = 64
	// auditPatience is how long a call that has returned waits for a sink that is not known to be slow.
	auditPatience = time.Second
)

var (
	errAuditFull = errors.New("too many audit records wait for their sink")
	errAuditSlow = errors.New("the audit sink did not answer in time")
)

// auditor writes the records of one handler. A goroutine exists only while there is something to write.
type auditor struct {
	sink AuditSink
	cfg  AuditConfig

	mu      sync.Mutex
	queue   []*auditEntry
	writing bool          // a goroutine is at it
	idle    chan struct{} // closed when the goroutine ended; nil while there is none
	slow    bool          // the sink failed, or made a call wait in vain; a write that succeeds ends it
	r       *Runtime
	groups  map[string]string // by topology
	limit   limiter
}

type auditEntry struct {
	record AuditRecord
	done   chan struct{}
	err    error
}

func newAuditor(sink AuditSink, cfg AuditConfig) *auditor {
	return &auditor{sink: sink, cfg: cfg.withDefaults()}
}

// bind makes the runtime known that the audited handler is bound to, and its group on a topology.
func (a *auditor) bind(r *Runtime, topology string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.r != nil && a.r != r {
		return errors.New("an audited handler belongs to one runtime")
	}
	if sink, ok := a.sink.(*topologySink); ok {
		if err := sink.open(r); err != nil {
			return err
		}
	}
	if a.r == nil {
		a.r, a.groups = r, map[string]string{}
		r.audits = append(r.audits, a)
	}
	a.groups[topology], _ = r.groupOf(r.config, topology)
	return nil
}

func (a *auditor) origin(topology string) (pod, group string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.r == nil {
		return "", ""
	}
	return a.r.pod, a.groups[topology]
}

// ended records a call that the loop did not overrule, and waits for the sink as long as that cannot change the
// outcome: in strict mode until it answers, else for a moment, and not at all where the sink is known to be slow.
func (a *auditor) ended(ctx context.Context, rec AuditRecord, event AuditEvent, o settle.Outcome) error {
	rec.complete(event, o)
	e, slow, err := a.put(rec)
	if err != nil {
		return err
	}
	patience := a.cfg.Timeout
	if !a.cfg.Strict {
		if slow {
			return nil
		}
		patience = auditPatience
	}
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		patience = min(patience, left-left/10) // the outcome has to be there before the deadline
	}
	timer := time.NewTimer(max(patience, 0))
	defer timer.Stop()
	select {
	case <-e.done:
		return e.err
	case <-timer.C:
		a.mu.Lock()
		a.slow = true
		a.mu.Unlock()
		return errAuditSlow
	}
}

// overruled records a call whose outcome the loop replaced.
func (a *auditor) overruled(rec AuditRecord, o settle.Outcome) {
	event := AuditTimeout
	if o.Verdict == settle.VerdictRelease {
		event = AuditAbandoned
	}
	rec.complete(event, o)
	_, _, _ = a.put(rec) // counted where it is lost; nobody waits
}

// put queues a record. Slow says that the sink is not to be waited for.
func (a *auditor) put(rec AuditRecord) (e *auditEntry, slow bool, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.queue) >= a.cfg.Buffer {
		a.lost(rec.Topology, 1, errAuditFull)
		return nil, true, errAuditFull
	}
	e = &auditEntry{record: rec, done: make(chan struct{})}
	a.queue = append(a.queue, e)
	if !a.writing {
		a.writing, a.idle = true, make(chan struct{})
		go a.write(a.idle)
	}
	return e, a.slow, nil
}

// write gives the sink everything that is queued and ends.
func (a *auditor) write(idle chan struct{}) {
	defer close(idle)
	for {
		a.mu.Lock()
		n := min(len(a.queue), auditBatch)
		if n == 0 {
			a.writing, a.queue = false, nil
			a.mu.Unlock()
			return
		}
		batch := a.queue[:n:n]
		a.queue = a.queue[n:]
		a.mu.Unlock()

		records := make([]AuditRecord, n)
		for i, e := range batch {
			records[i] = e.record
		}
		err := a.writeBatch(records)
		a.mu.Lock()
		a.slow = err != nil
		if err != nil {
			a.lost(records[0].Topology, n, err)
		}
		a.mu.Unlock()
		for _, e := range batch {
			e.err = err
			close(e.done)
		}
	}
}

func (a *auditor) writeBatch(records []AuditRecord) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), a.cfg.Timeout)
	defer cancel()
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("the audit sink panicked: %v", p)
		}
	}()
	return a.sink.Write(ctx, records)
}

// lost counts and logs records that the sink did not take. The mutex is held.
func (a *auditor) lost(topology string, n int, err error) {
	log := slog.Default()
	if a.r != nil {
		log = a.r.log
		for range n {
			a.r.metrics.AuditFailed(topology)
		}
	}
	if a.limit.allow() {
		log.Error("audit records are lost", "topology", topology, "records", n, "strict", a.cfg.Strict, "error", err)
	}
}

// flush waits until everything that is queued was given to the sink.
func (a *auditor) flush(ctx context.Context) error {
	a.mu.Lock()
	idle, writing := a.idle, a.writing
	a.mu.Unlock()
	if !writing {
		return nil
	}
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("write the last audit records: %w", ctx.Err())
	}
}

// flushAudits gives every sink a last chance at shutdown.
func (r *Runtime) flushAudits() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for _, a := range r.audits {
		if err := a.flush(ctx); err != nil {
			r.log.Error("audit records may be lost", "error", err)
		}
	}
}
