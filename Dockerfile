# syntax=docker/dockerfile:1
# The operator's image: one static binary, no shell, no root. Build it with
#   docker build --build-arg VERSION=$(git describe --tags --always) -t shove-operator .
FROM --platform=$BUILDPLATFORM golang:1.26 AS build
ARG TARGETOS TARGETARCH
ARG VERSION=unknown
WORKDIR /src
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download
COPY . .
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH \
    go build -trimpath -ldflags "-s -w -X main.version=$VERSION" -o /out/shove-operator ./cmd/operator

FROM gcr.io/distroless/static:nonroot
COPY --from=build /out/shove-operator /shove-operator
USER 65532:65532
ENTRYPOINT ["/shove-operator"]
