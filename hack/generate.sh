#!/usr/bin/env bash
# Generates what is derived from the Go types and markers: deep copies, CRDs, RBAC, and the chart's copy of the CRDs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

controller-gen object paths=./api/...
controller-gen crd paths=./api/... output:crd:dir=config/crd
if [ -d controllers ]; then
  controller-gen rbac:roleName=shove-operator paths=./controllers/... output:rbac:dir=config/rbac
fi
if [ -d charts/shove ]; then
  mkdir -p charts/shove/crds
  for crd in config/crd/shove.dev_*.yaml; do cp "$crd" charts/shove/crds/; done
fi
