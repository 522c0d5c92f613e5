#!/usr/bin/env bash
# Runs every fuzz target of the module for FUZZTIME (default 10s), one after the other.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
time=${FUZZTIME:-10s}
found=0
while IFS=: read -r file target; do
  found=$((found + 1))
  echo "fuzz: $target in ${file%/*} for $time"
  go test "./${file%/*}" -run '^$' -fuzz "^$target\$" -fuzztime "$time"
done < <(git ls-files '*_test.go' | xargs grep -oE '^func Fuzz[A-Za-z0-9_]+' /dev/null | sed 's/:func /:/')
echo "fuzz: $found targets"
[ "$found" -gt 0 ]
