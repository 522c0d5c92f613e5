package config

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"time"

	"github.com/fsnotify/fsnotify"
)

// How a file is followed.
const (
	// settleTime is how long the directory must be quiet: a file that is written in place is read when it is whole.
	settleTime = 100 * time.Millisecond
	// settleLimit bounds that in a directory that is never quiet.
	settleLimit = time.Second
	// pollEvery finds what no event told: an overflowed queue, a network file system, a directory made anew.
	pollEvery = 30 * time.Second
	// pollAlone replaces events where the system gives none.
	pollAlone = 5 * time.Second
	// missingFor is how long the file may be away while somebody replaces it.
	missingFor = time.Second
)

// Watch follows a configuration file until the context ends, and calls changed from its own goroutine with every new
// content: the configuration, validated and whole, or the reason why it cannot be used. Each content is told once.
// The caller keeps its last good configuration on an error. Current is what the caller has already read.
//
// The file may be replaced in place, by a rename, or as Kubernetes does in a mounted volume, by the swap of the
// symbolic link "..data" (a file that is mounted by subPath is never updated). Unknown fields are logged.
func Watch(ctx context.Context, path string, current *RuntimeConfig, log *slog.Logger, changed func(*RuntimeConfig, error)) {
	w := &watcher{path: path, current: current, log: log, changed: changed}
	events, stop := w.listen()
	defer stop()
	w.look()
	for {
		poll := pollEvery
		if w.notify == nil {
			poll = pollAlone
		}
		if !w.wait(ctx, events, poll) {
			return
		}
		w.look()
	}
}

type watcher struct {
	path    string
	current *RuntimeConfig // what the caller has, until the first content that differs
	log     *slog.Logger
	changed func(*RuntimeConfig, error)

	notify  *fsnotify.Watcher
	watched string // the directory that is watched
	last    []byte // the content that was told last
	told    bool
	failure string // the last error of reading, told once
	missing time.Time
}

// listen asks the system for events. Without them the file is polled.
func (w *watcher) listen() (events <-chan fsnotify.Event, stop func()) {
	notify, err := fsnotify.NewWatcher()
	if err != nil {
		w.log.Warn("the system does not tell changes of files; the configuration is looked at every few seconds", "every", pollAlone, "error", err)
		return nil, func() {}
	}
	w.notify = notify
	w.attach()
	return notify.Events, func() {
		if err := notify.Close(); err != nil {
			w.log.Debug("stop watching the configuration", "error", err)
		}
	}
}

// attach watches the file's directory, also after it was deleted and made anew. A directory and not the file itself:
// a swapped link and a rename are events of the directory.
func (w *watcher) attach() {
	if w.notify == nil {
		return
	}
	dir := filepath.Dir(w.path)
	if err := w.notify.Add(dir); err != nil && w.watched != "" {
		w.log.Debug("watch the configuration's directory", "directory", dir, "error", err)
	}
	w.watched = dir
}

// wait returns when something may have changed, or false when the context ended.
func (w *watcher) wait(ctx context.Context, events <-chan fsnotify.Event, poll time.Duration) bool {
	timer := time.NewTimer(w.pause(poll))
	defer timer.Stop()
	var errs <-chan error
	if w.notify != nil {
		errs = w.notify.Errors
	}
	var quietBy time.Time // zero: no event yet
	for {
		select {
		case <-ctx.Done():
			return false
		case _, ok := <-events:
			if !ok {
				events = nil
				continue
			}
			now := time.Now()
			if quietBy.IsZero() {
				quietBy = now.Add(settleLimit)
			}
			timer.Reset(max(0, min(settleTime, quietBy.Sub(now))))
		case err, ok := <-errs:
			if !ok {
				errs = nil
				continue
			}
			w.log.Debug("watch the configuration", "error", err) // an overflow: look at once
			timer.Reset(0)
		case <-timer.C:
			w.attach()
			return true
		}
	}
}

// pause is how long to wait without an event.
func (w *watcher) pause(poll time.Duration) time.Duration {
	if !w.missing.IsZero() && w.failure == "" {
		return min(poll, max(settleTime, time.Until(w.missing.Add(missingFor))))
	}
	return poll
}

// look reads the file and tells what is new.
func (w *watcher) look() {
	content, err := os.ReadFile(w.path)
	if err != nil {
		w.unreadable(err)
		return
	}
	w.missing, w.failure = time.Time{}, ""
	if w.told && bytes.Equal(content, w.last) {
		return
	}
	c, warnings, err := Parse(content)
	if !w.told && err == nil && reflect.DeepEqual(c, w.current) {
		w.last, w.told = content, true
		return
	}
	w.last, w.told, w.current = content, true, nil
	if err != nil {
		w.changed(nil, fmt.Errorf("configuration %q: %w", w.path, err))
		return
	}
	for _, warning := range warnings {
		w.log.Warn("configuration has something this runtime does not know; it is ignored", "field", warning)
	}
	w.changed(c, nil)
}

// unreadable tells an error once. A file that is away for a moment is being replaced.
func (w *watcher) unreadable(err error) {
	if errors.Is(err, fs.ErrNotExist) {
		if w.missing.IsZero() {
			w.missing = time.Now()
		}
		if time.Since(w.missing) < missingFor {
			return
		}
	}
	if w.failure == err.Error() {
		return
	}
	w.failure = err.Error()
	// The content may come back as it was, and is then in force again: it must be told, to clear the error.
	w.told, w.current = false, nil
	w.changed(nil, fmt.Errorf("read configuration: %w", err))
}
