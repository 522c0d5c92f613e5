#!/usr/bin/env bash
# Prints a folder with etcd, kube-apiserver and kubectl, for KUBEBUILDER_ASSETS. The first that there is of:
#   1. what KUBEBUILDER_ASSETS names;
#   2. what an earlier run made, unless the sources here changed since;
#   3. setup-envtest's download, where its index answers within five seconds (SHOVE_NO_DOWNLOAD=1: not tried);
#   4. a build from source: about 10 minutes on two cores the first time, seconds afterwards.
# Everything but the folder's name goes to standard error.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/shove
version=1.37.2
exec 3>&1 1>&2

complete() { [ -x "$1/etcd" ] && [ -x "$1/kube-apiserver" ] && [ -x "$1/kubectl" ]; }
answer() { echo "$1" >&3; exit 0; }

if [ -n "${KUBEBUILDER_ASSETS:-}" ]; then
  complete "$KUBEBUILDER_ASSETS" || { echo "KUBEBUILDER_ASSETS=$KUBEBUILDER_ASSETS: etcd, kube-apiserver or kubectl is missing there"; exit 1; }
  answer "$KUBEBUILDER_ASSETS"
fi

mkdir -p "$cache/envtest"
exec 9>"$cache/envtest.lock"
flock 9 # two makes at once build once

stamp=$(cat "$here/go.mod" "$here/go.sum" "$here/main.go" | sha256sum | cut -d' ' -f1)-$version
if complete "$cache/envtest" && [ "$(cat "$cache/envtest/stamp" 2>/dev/null)" = "$stamp" ]; then
  answer "$cache/envtest"
fi

index=https://raw.githubusercontent.com/kubernetes-sigs/controller-tools/HEAD/envtest-releases.yaml
if [ "${SHOVE_NO_DOWNLOAD:-}" != 1 ] && command -v curl >/dev/null && curl -fsS -m 5 -o /dev/null "$index" 2>/dev/null; then
  echo "control plane: downloading Kubernetes ${version%.*} with setup-envtest"
  if dir=$(cd "$here/../tools" && timeout 300 go tool setup-envtest use -p path --bin-dir "$cache/envtest-download" "${version%.*}.x") && complete "$dir"; then
    answer "$dir"
  fi
  echo "control plane: the download failed, building instead"
fi

echo "control plane: building Kubernetes $version from source (about 10 minutes on two cores the first time)"
started=$SECONDS
(while sleep 30; do echo "control plane: still building, $((SECONDS - started)) s"; done) 9>&- 3>&- &
progress=$!
trap 'kill $progress 2>/dev/null || true' EXIT
v=k8s.io/component-base/version # without these the server calls itself v0.0.0
(cd "$here" && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X $v.gitVersion=v$version -X $v.gitMajor=1 -X $v.gitMinor=37 -X $v.gitTreeState=clean" \
  -o "$cache/envtest/controlplane.new" .)
mv "$cache/envtest/controlplane.new" "$cache/envtest/controlplane"
for name in etcd kube-apiserver kubectl; do ln -sfn controlplane "$cache/envtest/$name"; done
echo "$stamp" >"$cache/envtest/stamp"
echo "control plane: built in $((SECONDS - started)) s"
answer "$cache/envtest"
