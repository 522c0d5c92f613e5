#!/usr/bin/env bash
# Generates what is derived from the Go code: deep copies, CRDs, RBAC, the chart's copies of them, and the table of what
# each broker can do.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

controller-gen object paths=./api/...
controller-gen crd paths=./api/... output:crd:dir=config/crd
controller-gen rbac:roleName=shove-operator paths=./controllers/... output:rbac:dir=config/rbac
cp config/crd/shove.dev_*.yaml charts/shove/files/crds/
cp config/rbac/role.yaml charts/shove/files/role.yaml
go run ./hack/capabilities docs/capabilities.md
