package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// writeImage writes an image archive (docker's format, which every container runtime imports) of one layer with
// static programs in its root, by the names that they have there. The first one is the entrypoint.
func writeImage(file, ref string, programs ...program) (err error) {
	layer, err := tarOf(programs)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(layer)
	type object = map[string]any
	config, err := json.Marshal(object{
		"architecture": runtime.GOARCH, "os": "linux",
		"config":  object{"Entrypoint": []string{"/" + programs[0].name}, "User": "65532:65532", "WorkingDir": "/"},
		"rootfs":  object{"type": "layers", "diff_ids": []string{"sha256:" + hex.EncodeToString(sum[:])}},
		"history": []object{{"created_by": "shove's demo"}},
	})
	if err != nil {
		return err
	}
	id := sha256.Sum256(config)
	configName := hex.EncodeToString(id[:]) + ".json"
	manifest, err := json.Marshal([]object{{"Config": configName, "RepoTags": []string{ref}, "Layers": []string{"layer.tar"}}})
	if err != nil {
		return err
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := tar.NewWriter(f)
	for _, part := range []struct {
		name string
		data []byte
	}{{"manifest.json", manifest}, {configName, config}, {"layer.tar", layer}} {
		if err := add(w, part.name, part.data, 0o644); err != nil {
			return err
		}
	}
	return w.Close()
}

// program is a file of an image.
type program struct {
	name string // in the image's root
	path string // on this machine
}

func tarOf(programs []program) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, p := range programs {
		data, err := os.ReadFile(p.path)
		if err != nil {
			return nil, err
		}
		if err := add(w, p.name, data, 0o755); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return b.Bytes(), err
}

func add(w *tar.Writer, name string, data []byte, mode int64) error {
	if err := w.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(data)), Format: tar.FormatUSTAR}); err != nil {
		return err
	}
	_, err := io.Copy(w, bytes.NewReader(data))
	return err
}

// loader is the command that gets an image archive into a cluster's nodes.
func loader(kubeContext, load string) ([]string, error) {
	if load != "" {
		if !strings.Contains(load, "{}") {
			return nil, fmt.Errorf("LOAD=%q: write {} where the image archive's file belongs", load)
		}
		return []string{"/bin/sh", "-c", load}, nil
	}
	switch name, isKind := strings.CutPrefix(kubeContext, "kind-"); {
	case isKind:
		return []string{"kind", "load", "image-archive", "{}", "--name", name}, nil
	case strings.HasPrefix(kubeContext, "k3d-"):
		return []string{"k3d", "image", "import", "{}", "--cluster", strings.TrimPrefix(kubeContext, "k3d-")}, nil
	case kubeContext == "minikube":
		return []string{"minikube", "image", "load", "{}"}, nil
	}
	return nil, fmt.Errorf("how images get into the cluster of context %q is not known: set LOAD to a command that loads the archive {}, such as LOAD='ctr -n k8s.io images import {}'", kubeContext)
}

func loadImage(ctx context.Context, command []string, file string) error {
	args := make([]string, len(command))
	for i, a := range command {
		args[i] = strings.ReplaceAll(a, "{}", file)
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...) //nolint:gosec // the user's own command
	_, err := output(cmd, "load "+filepath.Base(file))
	return err
}
