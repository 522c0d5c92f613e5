package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"
)

// kubectl runs kubectl with a kubeconfig; empty: the user's own.
type kubectl struct {
	program    string
	kubeconfig string
}

func (k kubectl) env() []string {
	if k.kubeconfig == "" {
		return os.Environ()
	}
	return append(os.Environ(), "KUBECONFIG="+k.kubeconfig)
}

// run returns what kubectl printed; an error holds what it complained about.
func (k kubectl) run(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, k.program, args...)
	cmd.Env = k.env()
	return output(cmd, "kubectl "+strings.Join(args, " "))
}

// stream runs kubectl and lets it print.
func (k kubectl) stream(ctx context.Context, w io.Writer, args ...string) error {
	cmd := exec.CommandContext(ctx, k.program, args...)
	cmd.Env = k.env()
	cmd.Stdout, cmd.Stderr = w, w
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("kubectl %s: %w", strings.Join(args, " "), err)
	}
	return nil
}

func output(cmd *exec.Cmd, what string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s: %w: %s", what, err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// build compiles the programs into dir/operator, dir/worker and dir/publisher: static ones for images, else with the
// flags that built this program, so that little has to be compiled twice.
func build(ctx context.Context, root, dir string, static bool) error {
	args := []string{"build", "-o", dir + "/"}
	if static {
		args = append(args, "-trimpath") // as `make build` does, with whose compilation it then shares
	}
	cmd := exec.CommandContext(ctx, "go", append(args, "./cmd/operator", "./examples/orders/worker", "./examples/orders/publisher")...)
	cmd.Dir = root
	if static {
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	}
	_, err := output(cmd, "go build")
	return err
}
