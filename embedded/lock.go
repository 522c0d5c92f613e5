package embedded

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
)

// lock is the right to a directory. The operating system takes it back when the process ends, however it does.
type lock struct {
	once sync.Once
	file *os.File
	err  error
}

// errLocked is what tryLock returns while somebody else has the lock.
var errLocked = errors.New("locked")

// takeLock makes the directory if need be, and locks it. Two servers in one store would destroy it.
func takeLock(dir string) (*lock, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the store: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "LOCK"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the store: %w", err)
	}
	if err := tryLock(f); err != nil {
		holder := holderOf(f)
		_ = f.Close()
		if errors.Is(err, errLocked) {
			return nil, fmt.Errorf("store %q is %w (%s): stop it, or name another folder", dir, ErrInUse, holder)
		}
		return nil, fmt.Errorf("lock store %q: %w", dir, err)
	}
	host, _ := os.Hostname()
	err = f.Truncate(0)
	if err == nil {
		_, err = f.WriteAt(fmt.Appendf(nil, "process %d on %s\n", os.Getpid(), host), 0)
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock store %q: %w", dir, err)
	}
	return &lock{file: f}, nil
}

// holderOf is what the holder of a lock wrote about itself.
func holderOf(f *os.File) string {
	b, err := io.ReadAll(io.LimitReader(f, 200))
	if text := strings.TrimSpace(string(b)); err == nil && text != "" {
		return text
	}
	return "which one is unknown"
}

// release gives the lock back. Safe to call twice.
func (l *lock) release() error {
	l.once.Do(func() {
		if err := l.file.Close(); err != nil {
			l.err = fmt.Errorf("unlock the store: %w", err)
		}
	})
	return l.err
}
