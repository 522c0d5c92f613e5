package main

import (
	"context"
	"sync"
	"time"

	"github.com/shove-dev/shove/hack/demo/ledger"
)

// state is everything that the view shows, gathered from the API server, the broker and the books.
type state struct {
	title   string
	begun   time.Time     // when the example was applied
	ready   time.Time     // when all objects were Ready for the first time; zero: not yet
	length  time.Duration // how long to run from then on; 0: until it is interrupted
	phase   string
	objects []objectState
	names   ledger.Queues
	queues  map[string]queueState
	counts  ledger.Counts
	notes   []ledger.Note
	problem string // why the last look failed
}

// watcher gathers the state once a second.
type watcher struct {
	backend backend
	objects *objects
	// publish lets the publisher begin.
	publish func(context.Context) error

	mu    sync.Mutex
	books *ledger.Ledger
	state state
}

func (w *watcher) run(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		w.look(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// look reads everything once.
func (w *watcher) look(ctx context.Context) {
	problem := ""
	note := func(err error) {
		if err != nil && ctx.Err() == nil {
			problem = err.Error()
		}
	}
	objects, err := w.objects.states(ctx)
	note(err)
	w.mu.Lock()
	opened, names := w.books != nil, w.state.names
	w.mu.Unlock()
	if !opened {
		note(w.openBooks(ctx))
	}
	queues, err := w.backend.queues(ctx, names)
	note(err)
	w.mu.Lock()
	defer w.mu.Unlock()
	if objects != nil {
		w.state.objects = objects
	}
	if w.state.ready.IsZero() && w.state.allReady() {
		w.state.ready = time.Now()
	}
	if queues != nil {
		w.state.queues = queues
	}
	w.state.problem = problem
}

// openBooks opens the books once the queues are declared, and lets the publisher begin.
func (w *watcher) openBooks(ctx context.Context) error {
	names, ok, err := w.objects.queues(ctx)
	if err != nil || !ok {
		return err
	}
	books := ledger.New(names)
	if err := w.backend.book(ctx, books); err != nil {
		return err
	}
	if err := w.publish(ctx); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.books, w.state.names = books, names
	return nil
}

// now is the state with the books as they are this moment.
func (w *watcher) now() state {
	w.mu.Lock()
	s, books := w.state, w.books
	w.mu.Unlock()
	if books != nil {
		s.counts, s.notes = books.Counts(), books.Notes()
	}
	return s
}

func (w *watcher) setPhase(phase string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.state.phase = phase
}

// elapsed is the time since everything was Ready, or 0.
func (s state) elapsed() time.Duration {
	if s.ready.IsZero() {
		return 0
	}
	return time.Since(s.ready).Round(time.Second)
}

// allReady says whether all three objects are.
func (s state) allReady() bool {
	for _, o := range s.objects {
		if !o.Ready {
			return false
		}
	}
	return len(s.objects) == len(objectNames)
}

// all are the names of the topology's queues, main first.
func (s state) all() []string {
	if s.names.Main == "" {
		return nil
	}
	return append(append([]string{s.names.Main}, s.names.Holds...), s.names.DeadLetter)
}

// acked is the number of messages that consumers of the main queue acknowledged without sending a copy on first:
// acknowledgements on the main queue, less copies written to hold queues and to the dead-letter queue. All three are
// the broker's counters. ok is false while the server has not computed them.
func (s state) acked() (n int, ok bool) {
	main, ok := s.queues[s.names.Main]
	if !ok {
		return 0, false
	}
	n = main.Stats.Ack
	for _, name := range append(append([]string(nil), s.names.Holds...), s.names.DeadLetter) {
		n -= s.queues[name].Stats.Publish
	}
	return max(n, 0), true
}

// balance is where every message is now.
func (w *watcher) balance() ledger.Balance {
	w.mu.Lock()
	books := w.books
	w.mu.Unlock()
	if books == nil {
		return ledger.Balance{}
	}
	return books.Balance()
}
