#!/usr/bin/env bash
# Fails when what is generated, tidied or formatted differs from what is checked in, or rather from what the working
# tree held before: local changes that are consistent pass.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
failed=0
fail() { echo "verify: $*" >&2; failed=1; }

snapshot() { { git ls-files -z --cached --others --exclude-standard | xargs -0 -r sha256sum 2>/dev/null || true; } | sort -k2; }

echo "verify: generated files"
before=$(snapshot)
hack/generate.sh
if ! changed=$(diff <(echo "$before") <(snapshot)); then
  fail "make generate changed files; check them in:"
  echo "$changed" | awk '{print "  " $3}' | sort -u >&2
fi

for mod in . hack/tools hack/controlplane; do
  echo "verify: go mod tidy in $mod"
  (cd "$mod" && go mod tidy -diff) || fail "go mod tidy changes go.mod or go.sum in $mod"
done

echo "verify: gofmt"
unformatted=$(git ls-files -z --cached --others --exclude-standard '*.go' | xargs -0 -r gofmt -l)
[ -z "$unformatted" ] || fail "not formatted (make fmt): $unformatted"

for script in $(git ls-files 'hack/*.sh' 'hack/**/*.sh' .ci/run); do
  bash -n "$script" || fail "$script does not parse"
done
exit $failed
