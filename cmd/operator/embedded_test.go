package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	natsgo "github.com/nats-io/nats.go"

	"github.com/shove-dev/shove/internal/testenv"
)

// The built program as a Broker's pod runs it: users from files, which it follows, probes, the lock, an end in order.
func TestEmbedded_Runs(t *testing.T) {
	bin, dir := build(t), t.TempDir()
	users := filepath.Join(dir, "users")
	put := func(key, text string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(users, 0o755), os.WriteFile(filepath.Join(users, key), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	port, health := freePort(t), freePort(t)
	args := []string{"embedded", "--store=" + filepath.Join(dir, "store"), "--users=" + users, "--host=127.0.0.1", "--port=" + port, "--health-port=" + health, "--max-bytes=1000000"}
	if out, err := exec.Command(bin, args...).CombinedOutput(); err == nil || !strings.Contains(string(out), "username") {
		t.Errorf("without users: %v, %s", err, out)
	}
	put("username", "admin\n")
	put("password", "one")
	var log bytes.Buffer
	p := exec.CommandContext(context.WithoutCancel(t.Context()), bin, args...)
	p.Stdout, p.Stderr = &log, &log
	p.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- p.Wait() }()
	t.Cleanup(func() { _ = p.Process.Kill() })
	ready := func() error {
		res, err := http.Get("http://127.0.0.1:" + health + "/readyz") //nolint:noctx // of a test
		if err != nil {
			return err
		}
		res.Body.Close()
		if res.StatusCode != http.StatusOK {
			return fmt.Errorf("/readyz: %s", res.Status)
		}
		return nil
	}
	testenv.Eventually(t, 20*time.Second, ready)
	login := func(user, password string) error {
		c, err := natsgo.Connect("nats://127.0.0.1:"+port, natsgo.UserInfo(user, password), natsgo.NoReconnect())
		if err == nil {
			c.Close()
		}
		return err
	}
	if err := login("admin", "one"); err != nil {
		t.Error(err)
	}
	second := append(append([]string(nil), args...), "--port="+freePort(t), "--health-port=")
	if out, err := exec.Command(bin, second...).CombinedOutput(); err == nil || !strings.Contains(string(out), fmt.Sprintf("in use by another process (process %d", p.Process.Pid)) {
		t.Errorf("a second one on the store: %v, %s", err, out)
	}
	put("password", "two")
	put("workload-username", "app")
	put("workload-password", "three")
	testenv.Eventually(t, 20*time.Second, func() error { return errors.Join(login("admin", "two"), login("app", "three")) })
	if err := login("admin", "one"); err == nil {
		t.Error("the old password is accepted")
	}
	if err := p.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("it ended with %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Error("it does not end on SIGTERM")
	}
	if strings.Contains(log.String(), "three") || strings.Contains(log.String(), `"two"`) {
		t.Error("a password is in the log")
	}
	http.DefaultClient.CloseIdleConnections()
}

func TestEmbedded_RefusesArguments(t *testing.T) {
	for _, args := range [][]string{{"extra"}, {"--no-such-flag"}, {"--users=/nowhere"}} {
		var out bytes.Buffer
		if err := runEmbedded(args, &out); err == nil {
			t.Errorf("%q is accepted", args)
		}
	}
	var out bytes.Buffer
	if err := runEmbedded([]string{"--help"}, &out); err != nil || !strings.Contains(out.String(), "-max-bytes") {
		t.Errorf("--help: %v, %s", err, out.String())
	}
}
