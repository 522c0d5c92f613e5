#!/usr/bin/env bash
# Runs the NATS tests on servers of other generations than the one in the tests' own process: 2.10 and 2.11, which have no
# scheduled messages, and 2.12, the first that has them. The servers are built once in the user's cache, each in its own
# module. NATS_VERSIONS="2.11.17" limits the run. The conformance suite is left out: it counts what a server has handed out by
# looking into it, which takes a server in the test's process.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p .cache
cache=${XDG_CACHE_HOME:-$HOME/.cache}/shove/nats
go build -o .cache/testlog ./hack/testlog

failed=()
for version in ${NATS_VERSIONS:-2.10.29 2.11.17 2.12.15}; do
  server=$cache/$version/nats-server
  [ -x "$server" ] || GOBIN=$cache/$version go install "github.com/nats-io/nats-server/v2@v$version"
  echo "matrix: NATS $version"
  SHOVE_TEST_NATS_SERVER=$server REQUIRE_ALL=1 go test -race -json -count 1 -timeout 20m -skip TestConformance ./broker/nats | .cache/testlog -o ".cache/nats-$version.json" || failed+=("$version")
done
[ ${#failed[@]} = 0 ] || { echo "matrix: failed on NATS ${failed[*]}" >&2; exit 1; }
