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
cache=${XDG_CACHE_HOME:-$HOME/.cache}/shove/roots
versions=${VERSIONS:-3.10 4.0 4.3}
mounts=()

[ "$(id -u)" = 0 ] || { echo "matrix: needs root, for chroot and mount" >&2; exit 1; }

unmount() { for m in "${mounts[@]}"; do umount -l "$m" 2>/dev/null || true; done; }
trap unmount EXIT
trap 'exit 130' INT TERM

# root SUITE prints a folder with that suite's RabbitMQ, with /proc and /dev in it.
root() {
  local suite=$1 dir=$cache/$1
  if [ ! -x "$dir/usr/lib/rabbitmq/bin/rabbitmq-server" ]; then
    command -v debootstrap >/dev/null || { apt-get update -qq && apt-get install -y -qq debootstrap >/dev/null; }
    echo "matrix: making a root folder of $suite" >&2
    rm -rf "$dir.new"
    mkdir -p "$cache"
    debootstrap --variant=minbase --include=rabbitmq-server "$suite" "$dir.new" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} \
      >"$cache/$suite.log" 2>&1 || { tail -20 "$cache/$suite.log" >&2; return 1; }
    grep -qs localhost "$dir.new/etc/hosts" || echo "127.0.0.1 localhost" >>"$dir.new/etc/hosts"
    mv "$dir.new" "$dir"
  fi
  echo "$dir"
}

go build -o .cache/servers ./hack/servers
go build -o .cache/testlog ./hack/testlog

failed=()
for version in $versions; do
  case $version in
    3.10) dir= ;;
    4.0) dir=$(root trixie) ;;
    4.3) dir=$(root sid) ;;
    *) echo "matrix: unknown version $version" >&2; exit 2 ;;
  esac
  if [ -n "$dir" ]; then
    for m in proc dev; do
      mountpoint -q "$dir/$m" || { mount --rbind "/$m" "$dir/$m" && mount --make-rslave "$dir/$m" && mounts+=("$dir/$m"); }
    done
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
