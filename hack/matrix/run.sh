#!/usr/bin/env bash
# Runs the RabbitMQ tests on every supported generation of the server:
#
#   3.10  the machine's own package (Debian 12)
#   4.0   from a root folder with Debian 13 (trixie)
#   4.3   from a root folder with Debian unstable (sid)
#
# The folders are made once by debootstrap (about 80 s and 400 MB each) in the user's cache; a server in them is
# started by chroot and listens on loopback only. Needs root. VERSIONS="3.10 4.3" limits the run; a version of the
# machine's own package other than 3.10 is run all the same and said.
set -euo pipefail
# Mounts in a namespace of its own: they end with it, and another run does not take them away.
[ -n "${MATRIX_NAMESPACE:-}" ] || [ "$(id -u)" != 0 ] || exec env MATRIX_NAMESPACE=1 unshare --mount "$0" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p .cache
cache=${XDG_CACHE_HOME:-$HOME/.cache}/shove
versions=${VERSIONS:-3.10 4.0 4.3}
# shellcheck source=hack/matrix/roots.sh
source hack/matrix/roots.sh

go build -o .cache/servers ./hack/servers
go build -o .cache/testlog ./hack/testlog

failed=()
for version in $versions; do
  case $version in
    3.10) dir= ;;
    4.0) dir=$(root trixie rabbitmq-server) ;;
    4.3) dir=$(root sid rabbitmq-server) ;;
    *) echo "matrix: unknown version $version" >&2; exit 2 ;;
  esac
  if [ -n "$dir" ]; then
    mount_into "$dir"
    real=$(chroot "$dir" dpkg-query -W -f '${Version}' rabbitmq-server)
  else
    real=$(dpkg-query -W -f '${Version}' rabbitmq-server)
  fi
  echo "=== RabbitMQ $version (package $real)"
  env ${dir:+SHOVE_TEST_RABBITMQ_ROOT="$dir"} REQUIRE_ALL=1 .cache/servers -rabbitmq \
    go test -race -json -count=1 -timeout 25m ${RUN:+-run "$RUN"} ./internal/testenv/ ./broker/rabbitmq/... |
    .cache/testlog -o ".cache/matrix-$version.json" || failed+=("$version")
done

if [ ${#failed[@]} -gt 0 ]; then
  echo "matrix: failed on RabbitMQ ${failed[*]}"
  exit 1
fi
echo "matrix: passed on RabbitMQ $versions"
