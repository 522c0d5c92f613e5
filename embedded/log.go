package embedded

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
)

// natsLog hands what the server says to a slog.Logger. What the server calls fatal does not end the process.
type natsLog struct {
	log *slog.Logger

	mu   sync.Mutex
	last string
}

// fatal is what the server gave up with; empty: it did not.
func (l *natsLog) fatal() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last
}

func (l *natsLog) say(level slog.Level, format string, args []any) {
	if l.log.Enabled(context.Background(), level) {
		l.log.Log(context.Background(), level, fmt.Sprintf(format, args...), "from", "nats-server")
	}
}

// Noticef is of the server's everyday life, which is no news to people who run something else.
func (l *natsLog) Noticef(format string, args ...any) { l.say(slog.LevelDebug, format, args) }

// Warnf passes a warning on.
func (l *natsLog) Warnf(format string, args ...any) { l.say(slog.LevelWarn, format, args) }

// Errorf passes an error on.
func (l *natsLog) Errorf(format string, args ...any) { l.say(slog.LevelError, format, args) }

// Fatalf keeps why the server gave up, for Start to return it.
func (l *natsLog) Fatalf(format string, args ...any) {
	l.mu.Lock()
	l.last = fmt.Sprintf(format, args...)
	l.mu.Unlock()
	l.say(slog.LevelError, format, args)
}

// Debugf is off.
func (l *natsLog) Debugf(string, ...any) {}

// Tracef is off: it would show payloads.
func (l *natsLog) Tracef(string, ...any) {}
