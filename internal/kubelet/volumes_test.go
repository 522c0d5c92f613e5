package kubelet

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestVolumesAreSwappedWhole(t *testing.T) {
	dir := t.TempDir()
	read := func() map[string]string {
		out := map[string]string{}
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if len(e.Name()) > 2 && e.Name()[:2] == ".." {
				continue
			}
			if b, err := os.ReadFile(filepath.Join(dir, e.Name())); err == nil {
				out[e.Name()] = string(b)
			}
		}
		return out
	}
	for _, step := range []map[string]string{
		{"a": "1", "b": "2"},
		{"a": "1", "b": "3"},
		{"a": "1"},
		{"a": "1", "c": "4"},
		{},
	} {
		files := map[string]file{}
		for name, v := range step {
			files[name] = file{content: []byte(v), mode: 0o644}
		}
		if err := writeVolume(dir, files); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(step, read()); d != "" {
			t.Errorf("files (-want +got):\n%s", d)
		}
		before, _ := os.Readlink(filepath.Join(dir, dataLink))
		if err := writeVolume(dir, files); err != nil {
			t.Fatal(err)
		}
		if after, _ := os.Readlink(filepath.Join(dir, dataLink)); after != before {
			t.Error("writing the same files swapped the link")
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 2 {
		t.Errorf("old folders are left: %v", entries)
	}
}

func TestMountedPathsAreReplaced(t *testing.T) {
	m := mounts{{"/etc/shove/extra", "/real/x"}, {"/etc/shove", "/real/s"}, {"/etc", "/real/e"}}
	for in, want := range map[string]string{
		"/etc/shove":                    "/real/s",
		"/etc/shove/config.yaml":        "/real/s/config.yaml",
		"/etc/shove/extra/a":            "/real/x/a",
		"/etc/shove-other/a":            "/real/e/shove-other/a",
		"--config=/etc/shove/c,/etc/b":  "--config=/real/s/c,/real/e/b",
		"http://host/etc/shove":         "http://host/etc/shove",
		"credentialsDir: /etc/shove\nx": "credentialsDir: /real/s\nx",
		"plain":                         "plain",
	} {
		if got := m.replace(in); got != want {
			t.Errorf("replace(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestVariablesExpand(t *testing.T) {
	vars := map[string]string{"A": "1", "B": "2"}
	for in, want := range map[string]string{"$(A)-$(B)": "1-2", "$(C)": "$(C)", "$$(A)": "$(A)", "$A": "$A", "$(A": "$(A"} {
		if got := expand(in, vars); got != want {
			t.Errorf("expand(%q) = %q, want %q", in, got, want)
		}
	}
}
