# `make help` lists what there is. Everything runs on a bare machine with Go, as root or not; tools are built from
# the versions pinned in hack/tools and kept in the user's cache, so that a second clone does not build them again.

SHELL := /usr/bin/env bash -o pipefail -eu
.DEFAULT_GOAL := help

CACHE   := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/shove
TOOLS   := $(CACHE)/tools/$(shell cat hack/tools/go.mod hack/tools/go.sum | sha256sum | cut -c1-12)-$(shell go env GOVERSION)
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION)

CONTROLLER_GEN := $(TOOLS)/controller-gen
GOLANGCI_LINT  := $(TOOLS)/golangci-lint
GOVULNCHECK    := $(TOOLS)/govulncheck
HELM           := $(TOOLS)/helm

export CACHE TOOLS
# The linter's results depend on the folder's path (the import rules match it), so they are not shared by clones.
export GOLANGCI_LINT_CACHE := $(CURDIR)/.cache/golangci-lint
export PATH := $(TOOLS):$(PATH)

# What can be given: PKG (packages to test), RUN (a pattern for tests), COUNT, DURATION, BROKER and CLUSTER (of the demo).
PKG      ?= ./...
RUN      ?=
COUNT    ?=
DURATION ?=
CLUSTER  ?=
BROKER   ?=

##@ General

.PHONY: help
help: ## Show this help
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-zA-Z0-9_-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Try it

.PHONY: demo
demo: ## Run the whole system with a live view; DURATION=60s ends it by itself, BROKER=rabbitmq and CLUSTER=1 take yours
	@DURATION='$(DURATION)' CLUSTER='$(CLUSTER)' BROKER='$(BROKER)' hack/demo/run.sh

##@ Build

.PHONY: build
build: ## Build bin/shove-operator and bin/kubectl-shove, static
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o bin/shove-operator ./cmd/operator
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o bin/kubectl-shove ./cmd/kubectl-shove

.PHONY: generate
generate: $(CONTROLLER_GEN) ## Generate deep copies, CRDs, RBAC, the chart's copies, and the table of what brokers can do
	@hack/generate.sh

.PHONY: fmt
fmt: $(GOLANGCI_LINT) ## Format the Go code
	$(GOLANGCI_LINT) fmt ./...

.PHONY: clean
clean: ## Remove what builds and tests leave in this folder (the cache in $(CACHE) stays)
	rm -rf bin .cache

##@ Check

.PHONY: verify
verify: $(CONTROLLER_GEN) ## Generate and tidy again, and fail when that changes a file
	@hack/verify.sh

.PHONY: lint
lint: $(GOLANGCI_LINT) ## Run the linters, the import rules among them
	$(GOLANGCI_LINT) run --allow-serial-runners ./...

.PHONY: vulncheck
vulncheck: $(GOVULNCHECK) ## Look for known vulnerabilities; needs the network, so it is not part of lint
	$(GOVULNCHECK) ./...

##@ Test

.PHONY: test
test: controlplane $(HELM) ## Run every test against a real broker and API server; REQUIRE_ALL=1 makes a skip a failure
	@PKG='$(PKG)' RUN='$(RUN)' COUNT='$(COUNT)' hack/test.sh

.PHONY: test-unit
test-unit: ## Run the tests that need no server, in seconds
	go test -short $(if $(RUN),-run '$(RUN)') ./topology/... ./settle/... ./broker ./broker/header/... ./broker/memory/... ./runtime/... ./hack/rules/...

.PHONY: test-matrix
test-matrix: ## Run the tests of RabbitMQ on 3.10, 4.0 and 4.3 (needs root and debootstrap), of NATS on 2.10, 2.11 and 2.12, and of Redis on 7.0, 8.0, 8.2 and Valkey
	@hack/matrix/run.sh
	@hack/matrix/nats.sh
	@hack/matrix/redis.sh

.PHONY: deflake
deflake: controlplane ## Repeat the tests until one fails: make deflake PKG=./runtime RUN=TestX
	@n=0; while PKG='$(PKG)' RUN='$(RUN)' COUNT=1 NO_RULES=1 hack/test.sh; do n=$$((n + 1)); echo "passed $$n times"; done; exit 1

.PHONY: fuzz
fuzz: ## Run each fuzz target for a short while (FUZZTIME, default 10s)
	@hack/fuzz.sh

.PHONY: bench
bench: ## Print speed and memory side by side with hand-written code, as ratios
	@hack/bench.sh

.PHONY: rules
rules: ## Print which rule is proven where, from the last `make test`
	go run ./hack/rules .cache/test.json

##@ Tools

.PHONY: tools
tools: $(CONTROLLER_GEN) $(GOLANGCI_LINT) $(GOVULNCHECK) $(HELM) $(TOOLS)/setup-envtest $(TOOLS)/protoc-gen-go ## Build the pinned tools

.PHONY: controlplane
controlplane: ## Find, download or build etcd, kube-apiserver and kubectl
	@hack/controlplane/build.sh

tool = cd hack/tools && echo "building $(notdir $(1))" >&2 && CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o $(1) $(2)

$(CONTROLLER_GEN):
	@$(call tool,$@,sigs.k8s.io/controller-tools/cmd/controller-gen)
$(GOLANGCI_LINT):
	@$(call tool,$@,sigs.k8s.io/kube-api-linter/cmd/golangci-lint-kube-api-linter)
$(GOVULNCHECK):
	@$(call tool,$@,golang.org/x/vuln/cmd/govulncheck)
$(HELM):
	@$(call tool,$@,helm.sh/helm/v3/cmd/helm)
$(TOOLS)/setup-envtest:
	@$(call tool,$@,sigs.k8s.io/controller-runtime/tools/setup-envtest)
$(TOOLS)/protoc-gen-go:
	@$(call tool,$@,google.golang.org/protobuf/cmd/protoc-gen-go)
