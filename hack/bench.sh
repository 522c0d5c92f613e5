#!/usr/bin/env bash
# Runs the comparisons of ./bench against servers of RabbitMQ, Redis and Kafka that live as long as this script, and a NATS server of its own. PAIRS is how many measured
# couples each takes, ONLY limits them to names that contain it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p .cache
go build -o .cache/servers ./hack/servers
go build -o .cache/bench ./bench
.cache/servers -rabbitmq -redis -kafka .cache/bench -pairs "${PAIRS:-15}" -only "${ONLY:-}"

# What 1,000 Topologies cost the operator: alone on a fake broker, then built and with real servers.
if [[ topologies == *"${ONLY:-}"* ]]; then
  go test ./controllers ./cmd/operator -p 1 -run '^$' -bench ThousandTopologies -benchtime 1x -timeout 30m
fi
