// Command demo runs the whole of shove on this machine and shows what happens: an API server, the operator, a broker,
// and the orders example, applied with kubectl, whose worker and publisher are processes of their own that get their
// configuration only from what the operator rendered. What is counted is counted on the broker (see natstap.go, tap.go).
//
//	make demo                  until Ctrl-C
//	make demo DURATION=60s     ends by itself; the exit code is 0 only if every outcome was seen
//	make demo BROKER=rabbitmq  with RabbitMQ in the place of the embedded broker
//	make demo CLUSTER=1        on the cluster of your kubeconfig (docs/getting-started.md says what it needs)
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/term"
	ctrl "sigs.k8s.io/controller-runtime"
)

// Where the example lives, and where the operator does.
const (
	namespace         = "shop"
	operatorNamespace = "shove-system"
)

func main() {
	ctrl.SetLogger(logr.Discard())
	// The first Ctrl-C ends the demo in order, the second one at once; both clean up.
	ending, ended := make(chan os.Signal, 2), make(chan struct{})
	signal.Notify(ending, os.Interrupt, syscall.SIGTERM)
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		<-ending
		close(ended)
		<-ending
		cancel()
	}()
	err := run(ctx, ended)
	cancel()
	if err != nil {
		fmt.Fprintln(os.Stderr, "\ndemo:", err)
		os.Exit(1)
	}
}

var errInterrupted = errors.New("interrupted before the system was up")

// run is the demo. ended is closed when it should come to its end.
func run(ctx context.Context, ended <-chan struct{}) (err error) {
	length, err := duration(os.Getenv("DURATION"))
	if err != nil {
		return err
	}
	kind := os.Getenv("BROKER")
	if kind == "" {
		kind = "embedded"
	}
	if kind != "embedded" && kind != "rabbitmq" {
		return unknownBroker(kind)
	}
	root, err := repositoryRoot()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "shove-demo-")
	if err != nil {
		return fmt.Errorf("make a folder: %w", err)
	}
	p := &progress{out: os.Stdout, terminal: term.IsTerminal(int(os.Stdout.Fd()))}
	d := &demo{root: root, dir: dir, length: length, progress: p, ended: ended, external: os.Getenv("CLUSTER") != "", broker: kind}
	// Until the system is up, being told to end means to give up.
	starting, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	up := make(chan struct{})
	go func() {
		select {
		case <-ended:
			giveUp(errInterrupted)
		case <-up:
		}
	}()
	defer func() {
		if err != nil && !errors.Is(err, errInterrupted) {
			showLogs(p.out, dir)
		}
		err = errors.Join(err, p.step("stopping everything", d.close))
		if err == nil {
			_ = os.RemoveAll(dir) // it is in the temporary folder anyhow
		} else {
			fmt.Fprintf(os.Stdout, "Logs and manifests are in %s\n", dir)
		}
	}()
	if err := d.start(starting); err != nil {
		close(up)
		if cause := context.Cause(starting); cause != nil {
			return cause
		}
		return err
	}
	close(up)
	return d.watch(ctx)
}

// showLogs prints the end of what every pod wrote.
func showLogs(out io.Writer, dir string) {
	const lines, most = 15, 8 << 10
	files, err := filepath.Glob(filepath.Join(dir, "pods", "*", "*.log"))
	if err != nil {
		return // only a malformed pattern
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			fmt.Fprintf(out, "%s: %v\n", f, err)
			continue
		}
		b = b[max(0, len(b)-most):]
		end := strings.Split(strings.TrimSpace(string(b)), "\n")
		fmt.Fprintf(out, "\n%s ends with:\n%s\n", f, strings.Join(end[max(0, len(end)-lines):], "\n"))
	}
}

func duration(text string) (time.Duration, error) {
	if text == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < time.Second {
		return 0, fmt.Errorf("DURATION: %q: write it like 60s or 5m", text)
	}
	return d, nil
}

func repositoryRoot() (string, error) {
	dir, err := os.Getwd()
	for ; err == nil; dir = filepath.Dir(dir) {
		if _, statErr := os.Stat(filepath.Join(dir, "examples", "orders", "manifests")); statErr == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			err = errors.New("run it inside the repository")
		}
	}
	return "", fmt.Errorf("find the repository: %w", err)
}

// progress says what is going on before there is something to watch.
type progress struct {
	out      io.Writer
	terminal bool
}

// step says what it does, and again every ten seconds while it takes.
func (p *progress) step(what string, do func() error) error {
	begun := time.Now()
	done := make(chan error, 1)
	go func() { done <- do() }()
	fmt.Fprintf(p.out, "%-52s", what+" …")
	if !p.terminal {
		fmt.Fprintln(p.out)
	}
	tick := time.NewTicker(10 * time.Second)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			result := "done"
			if err != nil {
				result = "failed"
			}
			if p.terminal {
				fmt.Fprintf(p.out, " %s in %.1f s\n", result, time.Since(begun).Seconds())
			} else {
				fmt.Fprintf(p.out, "  %s: %s in %.1f s\n", what, result, time.Since(begun).Seconds())
			}
			return err
		case <-tick.C:
			if p.terminal {
				fmt.Fprint(p.out, ".")
			} else {
				fmt.Fprintf(p.out, "  %s: %.0f s so far\n", what, time.Since(begun).Seconds())
			}
		}
	}
}
