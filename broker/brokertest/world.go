package brokertest

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/topology"
)

// world is what one subtest works with.
type world struct {
	t       *testing.T
	b       Backend
	variant Variant
	rule    string
	inst    Instance
	caps    broker.Capabilities
	admin   broker.Admin
	log     *logBook

	mu      sync.Mutex
	undo    []func() // of what the test left running
	queues  []string // to delete at the end, physical names
	clients int
}

func newWorld(t *testing.T, b Backend, v Variant, rule string) *world {
	w := &world{t: t, b: b, variant: v, rule: rule, inst: b.Open(t), caps: b.Capabilities(v.Options), log: &logBook{}}
	var err error
	w.admin, err = w.inst.Driver.OpenAdmin(w.ctx(), w.inst.Admin)
	if err != nil {
		t.Fatalf("open an admin: %v", err)
	}
	return w
}

// ctx bounds one call on the broker.
func (w *world) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), w.b.Patience)
	w.defers(cancel)
	return ctx
}

// defers registers what has to happen at the end, also when the test fails halfway.
func (w *world) defers(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.undo = append(w.undo, f)
}

func (w *world) tearDown() {
	for {
		w.mu.Lock()
		n := len(w.undo)
		if n == 0 {
			w.mu.Unlock()
			break
		}
		f := w.undo[n-1]
		w.undo = w.undo[:n-1]
		w.mu.Unlock()
		f()
	}
	ctx, cancel := context.WithTimeout(context.Background(), w.b.Patience)
	defer cancel()
	if len(w.queues) > 0 {
		if _, err := w.admin.Delete(ctx, w.queues); err != nil {
			w.t.Logf("could not delete the queues of the test: %v", err)
		}
	}
	if err := w.admin.Close(ctx); err != nil {
		w.t.Errorf("close the admin: %v", err)
	}
}

// tier is the delay of the i-th hold queue.
func (w *world) tier(i int) time.Duration { return w.b.Tiers[i] }

// moment is long enough for what happens at once to have happened, where nothing tells.
func (w *world) moment() time.Duration { return w.b.Tiers[1] }

// rig is a topology under test.
type rig struct {
	*world
	decl broker.Declaration
}

// setup changes the topology of a rig.
type setup func(*topology.Spec)

func noHolds(s *topology.Spec)      { s.Holds = nil }
func noDeadLetter(s *topology.Spec) { s.DeadLetter = false }
func external(s *topology.Spec)     { s.External = true }

// spec is a topology with all tiers and a dead-letter queue, under a name of its own.
func (w *world) spec(change ...setup) topology.Spec {
	s := topology.Spec{Queue: "ct." + strings.ToLower(w.rule) + "." + strings.ToLower(rand.Text()[:8]), Holds: w.b.Tiers, DeadLetter: true}
	for _, c := range change {
		c(&s)
	}
	return s
}

// derive makes the declaration of a spec.
func (w *world) derive(s topology.Spec) broker.Declaration {
	w.t.Helper()
	top, err := topology.Derive(s)
	if err != nil {
		w.t.Fatalf("derive %+v: %v", s, err)
	}
	d := broker.Declaration{Topology: top, Options: w.variant.Options}
	if s.External && w.b.ExternalOptions != nil {
		d.Options = w.b.ExternalOptions
	}
	return d
}

// rig declares a topology.
func (w *world) rig(change ...setup) *rig {
	w.t.Helper()
	r := &rig{world: w, decl: w.derive(w.spec(change...))}
	r.declare(r.decl)
	return r
}

// declare declares, and sees to it that the queues go away after the test.
func (w *world) declare(d broker.Declaration) {
	w.t.Helper()
	w.owned(d)
	if err := w.admin.Declare(w.ctx(), d); err != nil {
		w.t.Fatalf("declare %q: %v", d.Topology.Queue, err)
	}
}

// owned notes the queues of a declaration for deletion.
func (w *world) owned(d broker.Declaration) {
	objects, err := w.inst.Driver.Objects(d)
	if err != nil {
		w.t.Fatalf("objects of %q: %v", d.Topology.Queue, err)
	}
	for i := len(objects) - 1; i >= 0; i-- { // hold queues before their targets
		w.queues = append(w.queues, objects[i].Name)
	}
}

// Queues of the rig.
func (r *rig) main() topology.Queue {
	return topology.Queue{Name: r.decl.Topology.Source, Role: topology.RoleMain}
}

func (r *rig) dead() topology.Queue {
	return topology.Queue{Name: r.decl.Topology.DeadLetter, Role: topology.RoleDeadLetter}
}

func (r *rig) hold(i int) topology.Queue {
	h := r.decl.Topology.Holds[i]
	return topology.Queue{Name: h.Queue, Role: topology.RoleHold, Delay: h.Delay}
}

// client opens a client that is closed at the end.
func (w *world) client() broker.Client {
	w.t.Helper()
	w.mu.Lock()
	w.clients++
	cfg := w.inst.Client
	cfg.Name = fmt.Sprintf("%s-%d", w.rule, w.clients)
	w.mu.Unlock()
	c, err := w.inst.Driver.OpenClient(w.ctx(), cfg)
	if err != nil {
		w.t.Fatalf("open a client: %v", err)
	}
	w.defers(func() {
		ctx, cancel := context.WithTimeout(context.Background(), w.b.Patience)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			w.t.Logf("close a client: %v", err)
		}
	})
	return c
}

// publisher opens a publisher of the rig's topology.
func (r *rig) publisher() broker.Publisher {
	r.t.Helper()
	p, err := r.client().Publisher(r.ctx(), r.decl)
	if err != nil {
		r.t.Fatalf("open a publisher: %v", err)
	}
	return p
}

// publish sends bodies through a publisher and returns their message ids.
func (r *rig) publish(bodies ...string) []string {
	r.t.Helper()
	msgs, ids := messages(bodies...)
	p := r.publisher()
	if err := p.Publish(r.ctx(), msgs); err != nil {
		r.t.Fatalf("publish: %v", err)
	}
	if err := p.Close(r.ctx()); err != nil {
		r.t.Fatalf("close the publisher: %v", err)
	}
	return ids
}

// messages makes messages with ids for bodies.
func messages(bodies ...string) (msgs []broker.Message, ids []string) {
	for _, body := range bodies {
		id := newID()
		ids = append(ids, id)
		msgs = append(msgs, broker.Message{ID: id, Body: []byte(body), ContentType: "text/plain", Timestamp: time.Now()})
	}
	return msgs, ids
}

func newID() string { return uuid.Must(uuid.NewV7()).String() }

// put stores messages as a foreign program would.
func (r *rig) put(msgs ...Message) {
	r.t.Helper()
	r.inst.Raw.Publish(r.t, r.decl, r.main(), msgs...)
}

// foreign is a message without anything that shove would add, except the headers given.
func foreign(body string, h header.Map) Message {
	return Message{Body: []byte(body), Headers: h, ContentType: "text/plain"}
}

// withCount is a message that was retried n times already.
func withCount(body string, n int64) Message {
	return foreign(body, header.Map{header.RetryCount: n, header.MessageID: newID()})
}

// count is what a queue holds.
func (r *rig) count(q topology.Queue) (ready, inFlight int) {
	return r.inst.Raw.Count(r.t, r.decl, q)
}

// eventually waits until check returns nil.
func (w *world) eventually(what string, check func() error) {
	w.t.Helper()
	pause := 5 * time.Millisecond
	for began := time.Now(); ; {
		err := check()
		if err == nil {
			return
		}
		if time.Since(began) > w.b.Patience {
			w.t.Fatalf("%s: not within %s: %v", what, w.b.Patience, err)
		}
		time.Sleep(pause)
		pause = min(pause*3/2, 100*time.Millisecond)
	}
}

// consistently fails the test when check does within d: for what must not happen.
func (w *world) consistently(what string, d time.Duration, check func() error) {
	w.t.Helper()
	for began := time.Now(); time.Since(began) < d; time.Sleep(min(20*time.Millisecond, d/4)) {
		if err := check(); err != nil {
			w.t.Fatalf("%s: %v", what, err)
		}
	}
}

// holds waits until a queue has these numbers of messages.
func (r *rig) holds(q topology.Queue, ready, inFlight int) {
	r.t.Helper()
	r.eventually(fmt.Sprintf("queue %q with %d ready and %d in flight", q.Name, ready, inFlight), func() error {
		a, b := r.count(q)
		if a != ready || b != inFlight {
			return fmt.Errorf("it has %d and %d", a, b)
		}
		return nil
	})
}

// empty waits until nothing is left in any queue of the rig but its dead letters. It looks at all of them twice in a
// row, because a message may go from one that was not looked at to one that was.
func (r *rig) empty() {
	r.t.Helper()
	queues := []topology.Queue{r.main()}
	if !r.decl.Topology.External {
		for i := range r.decl.Topology.Holds {
			queues = append(queues, r.hold(i))
		}
	}
	// Twice in a row: a message that goes from one queue to another may be missed by the first look.
	passes := 0
	r.eventually("nothing is left in any queue but the dead letters", func() error {
		for _, q := range queues {
			if ready, inFlight := r.count(q); ready+inFlight > 0 {
				passes = 0
				return fmt.Errorf("queue %q has %d ready and %d in flight", q.Name, ready, inFlight)
			}
		}
		if passes++; passes < 2 {
			return errors.New("looking again")
		}
		return nil
	})
}

// deadLetters waits for n dead letters, takes them, and checks that there is no other.
func (r *rig) deadLetters(n int) []Message {
	r.t.Helper()
	r.holds(r.dead(), n, 0)
	all := r.inst.Raw.Take(r.t, r.decl, r.dead())
	if len(all) != n {
		r.t.Fatalf("took %d dead letters, want %d", len(all), n)
	}
	return all
}

// text is a header of a message as text.
func (m Message) text(name string) string {
	s, _ := m.Headers.Text(name)
	return s
}

// asJSON is for messages in failures.
func asJSON(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprint(v)
	}
	return string(b)
}

// want fails the test unless err is what is wanted.
func (w *world) want(err, target error, what string) {
	w.t.Helper()
	if !errors.Is(err, target) {
		w.t.Fatalf("%s: %v, want %v", what, err, target)
	}
}
