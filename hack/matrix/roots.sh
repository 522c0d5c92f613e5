# Root folders of other Debian releases, for run.sh and redis.sh; $cache is where they are kept. Read by bash, not run.
# shellcheck shell=bash

mounts=()
unmount() { for m in "${mounts[@]}"; do umount -l "$m" 2>/dev/null || true; done; }
trap unmount EXIT
trap 'exit 130' INT TERM

# root SUITE PACKAGE… prints a folder with that suite's packages in it. It is made once by debootstrap, about 80 s and
# 400 MB; packages that it lacks are added.
root() {
  local suite=$1 dir=$cache/roots/$1 missing=() p
  shift
  [ "$(id -u)" = 0 ] || { echo "matrix: needs root, for chroot and mount" >&2; return 1; }
  if [ ! -d "$dir" ]; then
    command -v debootstrap >/dev/null || { apt-get update -qq && apt-get install -y -qq debootstrap >/dev/null; }
    echo "matrix: making a root folder of $suite" >&2
    rm -rf "$dir.new"
    mkdir -p "$cache/roots"
    debootstrap --variant=minbase --include="$(IFS=,; echo "$*")" "$suite" "$dir.new" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} \
      >"$cache/roots/$suite.log" 2>&1 || { tail -20 "$cache/roots/$suite.log" >&2; return 1; }
    grep -qs localhost "$dir.new/etc/hosts" || echo "127.0.0.1 localhost" >>"$dir.new/etc/hosts"
    mv "$dir.new" "$dir"
  fi
  for p in "$@"; do [ -e "$dir/var/lib/dpkg/info/$p.list" ] || missing+=("$p"); done
  if [ ${#missing[@]} -gt 0 ]; then
    echo "matrix: adding ${missing[*]} to the root folder of $suite" >&2
    printf '#!/bin/sh\nexit 101\n' >"$dir/usr/sbin/policy-rc.d" # nothing is started by installing it
    chmod +x "$dir/usr/sbin/policy-rc.d"
    { chroot "$dir" apt-get update -qq && chroot "$dir" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } \
      >>"$cache/roots/$suite.log" 2>&1 || { tail -20 "$cache/roots/$suite.log" >&2; return 1; }
  fi
  echo "$dir"
}

# mount_into FOLDER gives it /proc and /dev, until this script ends.
mount_into() {
  local m
  for m in proc dev; do
    mountpoint -q "$1/$m" || { mount --rbind "/$m" "$1/$m" && mount --make-rslave "$1/$m" && mounts+=("$1/$m"); }
  done
}
