// Package kubeassets finds the binaries of a Kubernetes control plane: etcd, kube-apiserver and kubectl.
package kubeassets

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// Var is the environment variable, known from envtest, that names the folder with the binaries.
const Var = "KUBEBUILDER_ASSETS"

// ErrNotBuilt is returned by [Find] where the binaries are not on the machine.
var ErrNotBuilt = errors.New("no Kubernetes control plane: set " + Var + ", or run `make controlplane`, which builds one " +
	"from source (about 10 minutes on two cores, once)")

// Find returns the folder with the binaries: what [Var] names, else what hack/controlplane/build.sh made.
func Find() (string, error) {
	if dir := os.Getenv(Var); dir != "" {
		if missing := incomplete(dir); missing != "" {
			return "", fmt.Errorf("%s=%q: %s is missing there", Var, dir, missing)
		}
		return dir, nil
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("looking for the control plane: %w", err)
	}
	dir := filepath.Join(cache, "shove", "envtest")
	if incomplete(dir) != "" {
		return "", ErrNotBuilt
	}
	return dir, nil
}

// incomplete returns the name of a binary that dir does not have, or "".
func incomplete(dir string) string {
	for _, name := range []string{"etcd", "kube-apiserver", "kubectl"} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			return name
		}
	}
	return ""
}
