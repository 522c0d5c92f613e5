package config

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shove-dev/shove/internal/testenv"
)

// content is a configuration file with a generation.
func content(generation string, more ...string) string {
	return fmt.Sprintf("apiVersion: %s\nkind: %s\ngeneration: %q\n%s", APIVersion, Kind, generation, strings.Join(more, "\n"))
}

// volume is a directory as Kubernetes mounts a ConfigMap: config.yaml -> ..data/config.yaml, ..data -> a directory with
// a time in its name.
type volume struct {
	t    *testing.T
	dir  string
	swap int
}

func newVolume(t *testing.T, text string) *volume {
	v := &volume{t: t, dir: t.TempDir()}
	v.write(text)
	v.must(os.Symlink(filepath.Join("..data", "config.yaml"), v.path()))
	return v
}

func (v *volume) path() string { return filepath.Join(v.dir, "config.yaml") }

func (v *volume) must(err error) {
	v.t.Helper()
	if err != nil {
		v.t.Fatal(err)
	}
}

// write does what kubelet's AtomicWriter does: a new directory, a new link, a rename over the old one.
func (v *volume) write(text string) {
	v.t.Helper()
	v.swap++
	name := fmt.Sprintf("..2026_01_02_%d", v.swap)
	v.must(os.Mkdir(filepath.Join(v.dir, name), 0o755))
	v.must(os.WriteFile(filepath.Join(v.dir, name, "config.yaml"), []byte(text), 0o644))
	tmp := filepath.Join(v.dir, "..data_tmp")
	v.must(os.Symlink(name, tmp))
	old, err := os.Readlink(filepath.Join(v.dir, "..data"))
	v.must(os.Rename(tmp, filepath.Join(v.dir, "..data")))
	if err == nil {
		v.must(os.RemoveAll(filepath.Join(v.dir, old)))
	}
}

// told collects what Watch tells: a generation, or "error".
type told struct {
	mu   sync.Mutex
	all  []string
	errs []error
}

func (r *told) changed(c *RuntimeConfig, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.all, r.errs = append(r.all, "error"), append(r.errs, err)
		return
	}
	r.all = append(r.all, c.Generation)
}

func (r *told) list() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string(nil), r.all...)
}

// await waits until the last thing told is the given one.
func (r *told) await(t *testing.T, want string) {
	t.Helper()
	testenv.Eventually(t, 10*time.Second, func() error {
		if all := r.list(); len(all) == 0 || all[len(all)-1] != want {
			return fmt.Errorf("told %q, want %q at the end", all, want)
		}
		return nil
	})
}

func watch(t *testing.T, path string, current *RuntimeConfig) *told {
	t.Helper()
	r := &told{}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { Watch(ctx, path, current, slog.New(slog.DiscardHandler), r.changed) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	return r
}

func load(t *testing.T, path string) *RuntimeConfig {
	t.Helper()
	c, _, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestWatchDataSwap(t *testing.T) {
	t.Parallel()
	v := newVolume(t, content("1"))
	r := watch(t, v.path(), load(t, v.path()))
	for i := 2; i < 6; i++ {
		v.write(content(fmt.Sprint(i)))
		r.await(t, fmt.Sprint(i))
	}
	for i, g := range r.list() {
		if g == "error" || i > 0 && g == r.list()[i-1] {
			t.Errorf("told %q, want each generation once and no error", r.list())
		}
	}
}

func TestWatchKeepsTheLastGoodOne(t *testing.T) {
	t.Parallel()
	v := newVolume(t, content("1"))
	r := watch(t, v.path(), load(t, v.path()))
	v.write(content("bad", "requires: [teleport]"))
	r.await(t, "error")
	if err := r.errs[0]; !strings.Contains(err.Error(), `"teleport"`) || !strings.Contains(err.Error(), v.path()) {
		t.Errorf("got %v, want the file and the feature", err)
	}
	v.write(content("1")) // back as it was: the caller has to learn that all is well again
	r.await(t, "1")
	v.write(content("bad", "requires: [teleport]"))
	r.await(t, "error")
	v.write(content("2", "unknownField: 1"))
	r.await(t, "2")
}

func TestWatchChangeBeforeItBegan(t *testing.T) {
	t.Parallel()
	v := newVolume(t, content("1"))
	current := load(t, v.path())
	v.write(content("2"))
	r := watch(t, v.path(), current)
	r.await(t, "2")
}

func TestWatchPlainFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "config.yaml")
	write := func(p, text string) {
		t.Helper()
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(path, content("1"))
	r := watch(t, path, load(t, path))

	write(path, content("2")) // in place
	r.await(t, "2")
	write(path+".tmp", content("3")) // by rename, as editors do
	if err := os.Rename(path+".tmp", path); err != nil {
		t.Fatal(err)
	}
	r.await(t, "3")
	if err := os.Remove(path); err != nil { // away for a moment
		t.Fatal(err)
	}
	write(path, content("4"))
	r.await(t, "4")
	if err := os.Remove(path); err != nil { // away for good
		t.Fatal(err)
	}
	r.await(t, "error")
	r.mu.Lock()
	if err := r.errs[len(r.errs)-1]; !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v, want fs.ErrNotExist", err)
	}
	r.mu.Unlock()
	write(path, content("4")) // and back
	r.await(t, "4")
}

func TestWatchTellsNothingWithoutAChange(t *testing.T) {
	t.Parallel()
	v := newVolume(t, content("1"))
	r := watch(t, v.path(), load(t, v.path()))
	v.write(content("1")) // kubelet rewrites for other reasons, such as a rotated token beside it
	if err := os.WriteFile(filepath.Join(v.dir, "neighbour"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	testenv.Consistently(t, 3*settleTime, func() error {
		if all := r.list(); len(all) > 0 {
			return fmt.Errorf("told %q", all)
		}
		return nil
	})
}
