#!/usr/bin/env bash
# Runs the comparisons of ./bench against a RabbitMQ server that lives as long as this script.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p .cache
go build -o .cache/servers ./hack/servers
.cache/servers -rabbitmq go test ./bench/... -run '^$' -bench "${BENCH:-.}" -benchtime "${BENCHTIME:-1x}" -timeout 60m -v
