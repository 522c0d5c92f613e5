package brokertest

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"
)

// line is one log line.
type line struct {
	at    time.Time
	level slog.Level
	text  string
	attrs string
}

// logBook keeps what a runtime logs.
type logBook struct {
	mu    sync.Mutex
	lines []line
}

func (b *logBook) add(l line) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lines = append(b.lines, l)
}

// find returns the lines of at least a level whose text contains part.
func (b *logBook) find(level slog.Level, part string) []line {
	b.mu.Lock()
	defer b.mu.Unlock()
	var found []line
	for _, l := range b.lines {
		if l.level >= level && strings.Contains(l.text, part) {
			found = append(found, l)
		}
	}
	return found
}

// bookHandler writes into a logBook, and to the test's output.
type bookHandler struct {
	book  *logBook
	out   slog.Handler
	attrs string
}

func (h bookHandler) Enabled(context.Context, slog.Level) bool { return true }

func (h bookHandler) Handle(ctx context.Context, r slog.Record) error {
	l := line{at: time.Now(), level: r.Level, text: r.Message, attrs: h.attrs}
	r.Attrs(func(a slog.Attr) bool {
		a.Value = a.Value.Resolve() // String would print a LogValuer field by field
		l.attrs += " " + a.String()
		return true
	})
	h.book.add(l)
	if h.out.Enabled(ctx, r.Level) {
		return h.out.Handle(ctx, r)
	}
	return nil
}

func (h bookHandler) WithAttrs(as []slog.Attr) slog.Handler {
	for _, a := range as {
		h.attrs += " " + a.String()
	}
	h.out = h.out.WithAttrs(as)
	return h
}

func (h bookHandler) WithGroup(name string) slog.Handler {
	h.out = h.out.WithGroup(name)
	return h
}
