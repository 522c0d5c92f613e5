#!/usr/bin/env bash
# Runs the tests of PKG (default all) with the race detector against servers of RabbitMQ, Redis and Kafka that live as long as this
# script, and prints which rule is proven where. RUN and COUNT are go test's -run and -count; NO_RULES=1 leaves the
# table out, as does a run of only a part.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p .cache
pkg=${PKG:-./...}
KUBEBUILDER_ASSETS=$(hack/controlplane/build.sh)
export KUBEBUILDER_ASSETS

go build -o .cache/servers ./hack/servers
go build -o .cache/testlog ./hack/testlog

args=(test -race -json -timeout 25m)
[ -z "${RUN:-}" ] || args+=(-run "$RUN")
[ -z "${COUNT:-}" ] || args+=(-count "$COUNT")
# shellcheck disable=SC2206 # PKG may name several packages
args+=($pkg)

status=0
.cache/servers -rabbitmq -redis -kafka go "${args[@]}" | .cache/testlog -o .cache/test.json || status=$?
if [ "${NO_RULES:-}" != 1 ] && [ "$pkg" = ./... ] && [ -z "${RUN:-}" ]; then
  go run ./hack/rules .cache/test.json || status=1
fi
exit $status
