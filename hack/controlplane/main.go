// Command controlplane is a Kubernetes control plane in one binary: etcd, kube-apiserver and kubectl, chosen by
// the name it is called by. Tests and the demo use it where no prebuilt API server can be downloaded.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
)

// exitWithParentVar set to "1" makes a server end when the process that started it is gone, so that a test which
// is killed leaves none behind.
const exitWithParentVar = "CONTROLPLANE_EXIT_WITH_PARENT"

func main() {
	name := filepath.Base(os.Args[0])
	if os.Getenv(exitWithParentVar) == "1" {
		go exitWithParent(os.Getppid())
	}
	switch name {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kube-apiserver":
		os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
	case "kubectl":
		os.Exit(cli.Run(kubectl.NewDefaultKubectlCommand()))
	default:
		fmt.Fprintf(os.Stderr, "controlplane: called as %q: call it as etcd, kube-apiserver or kubectl (symlinks)\n", name)
		os.Exit(2)
	}
}

// exitWithParent ends the process once its parent is no longer the given one.
func exitWithParent(parent int) {
	for range time.Tick(time.Second) {
		if os.Getppid() != parent {
			os.Exit(1)
		}
	}
}
