#!/usr/bin/env bash
# What `make demo` calls: finds or builds the control plane, compiles the demo, and runs it. Says what takes long.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ "${CLUSTER:-}" = "" ]; then
  KUBEBUILDER_ASSETS=$(hack/controlplane/build.sh)
  export KUBEBUILDER_ASSETS
fi
mkdir -p .cache
echo "compiling the demo (minutes the first time, seconds later) …"
started=$SECONDS
(while sleep 15; do echo "  still compiling, $((SECONDS - started)) s so far"; done) &
progress=$!
trap 'kill $progress 2>/dev/null || true' EXIT
go build -o .cache/demo ./hack/demo
kill $progress
trap - EXIT
exec .cache/demo
