package testenv

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shove-dev/shove/internal/testenv/kubeassets"
)

// KubeAssets returns a folder with etcd, kube-apiserver and kubectl, or calls [Skip].
func KubeAssets(tb testing.TB) string {
	tb.Helper()
	dir, err := kubeassets.Find()
	switch {
	case errors.Is(err, kubeassets.ErrNotBuilt):
		Skip(tb, err.Error())
	case err != nil:
		tb.Fatal(err)
	}
	return dir
}

// RepositoryRoot is the folder of the module's go.mod.
func RepositoryRoot(tb testing.TB) string {
	tb.Helper()
	root, err := repositoryRoot()
	if err != nil {
		tb.Fatal(err)
	}
	return root
}

func repositoryRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		text, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(text), "module github.com/shove-dev/shove\n") {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("the repository's go.mod is in no folder above the working directory")
		}
		dir = parent
	}
}
