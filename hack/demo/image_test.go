package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestImageHoldsItsPrograms(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a", "b"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("program "+name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(dir, "image.tar")
	if err := writeImage(file, "example.com/x:1", program{"worker", filepath.Join(dir, "a")}, program{"publisher", filepath.Join(dir, "b")}); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	parts := untar(t, b)
	var manifest []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := json.Unmarshal(parts["manifest.json"], &manifest); err != nil || len(manifest) != 1 || len(manifest[0].Layers) != 1 {
		t.Fatalf("manifest %s: %v", parts["manifest.json"], err)
	}
	if d := cmp.Diff([]string{"example.com/x:1"}, manifest[0].RepoTags); d != "" {
		t.Errorf("tags (-want +got):\n%s", d)
	}
	var config struct {
		Config struct {
			Entrypoint []string
			User       string
		}
	}
	if err := json.Unmarshal(parts[manifest[0].Config], &config); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"/worker"}, config.Config.Entrypoint); d != "" || config.Config.User != "65532:65532" {
		t.Errorf("runs as %q, entrypoint (-want +got):\n%s", config.Config.User, d)
	}
	layer := untar(t, parts[manifest[0].Layers[0]])
	if string(layer["worker"]) != "program a" || string(layer["publisher"]) != "program b" {
		t.Errorf("layer holds %q", layer)
	}
}

func untar(t *testing.T, b []byte) map[string][]byte {
	t.Helper()
	out := map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(b)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		if out[h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}

func TestLoader(t *testing.T) {
	for name, c := range map[string]struct {
		context, load string
		want          []string
		says          string
	}{
		"kind":       {context: "kind-dev", want: []string{"kind", "load", "image-archive", "{}", "--name", "dev"}},
		"k3d":        {context: "k3d-dev", want: []string{"k3d", "image", "import", "{}", "--cluster", "dev"}},
		"minikube":   {context: "minikube", want: []string{"minikube", "image", "load", "{}"}},
		"given":      {context: "kind-dev", load: "import {}", want: []string{"/bin/sh", "-c", "import {}"}},
		"no place":   {load: "import", says: "{}"},
		"not known":  {context: "prod", says: "set LOAD"},
		"no context": {says: "set LOAD"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := loader(c.context, c.load)
			if c.says != "" {
				if err == nil || !strings.Contains(err.Error(), c.says) {
					t.Errorf("got %q, %v; want an error with %q", got, err, c.says)
				}
				return
			}
			if err != nil || !slices.Equal(got, c.want) {
				t.Errorf("got %q, %v; want %q", got, err, c.want)
			}
		})
	}
}

func TestForwardingLines(t *testing.T) {
	if m := forwarding.FindStringSubmatch("Forwarding from 127.0.0.1:34567 -> 5672"); m == nil || m[1] != "127.0.0.1:34567" || m[2] != "5672" {
		t.Errorf("got %q", m)
	}
	if m := forwarding.FindStringSubmatch("Handling connection for 34567"); m != nil {
		t.Errorf("got %q", m)
	}
}
