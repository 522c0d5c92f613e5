package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"syscall"
	"time"

	"github.com/shove-dev/shove/internal/testenv/rabbitserver"
)

// Ports of RabbitMQ in a cluster.
const (
	amqpPort       = "5672"
	managementPort = "15672"
)

// clusterImage is used in a cluster unless the variable of rabbitserver names another one.
const clusterImage = "docker.io/library/rabbitmq:4.3-management"

// forward leads from this machine to a server in the cluster.
type forward struct {
	host  string            // as pods know it
	local map[string]string // address on this machine by port
	cmd   *exec.Cmd
}

func (f *forward) close() error {
	err := f.cmd.Process.Kill()
	_ = f.cmd.Wait() // killed: its state says nothing
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// startRabbitInCluster runs a server as a pod in the example's namespace. admin is "user:password" of its
// administrator.
func startRabbitInCluster(ctx context.Context, c *cluster, dir string) (f *forward, admin string, err error) {
	image := os.Getenv(rabbitserver.ImageVar)
	if image == "" {
		image = clusterImage
	}
	u := user{"demo", rand.Text()}
	file := filepath.Join(dir, "apply", "rabbit.yaml")
	if err := fill("rabbit.yaml.tmpl", file, map[string]any{"Namespace": namespace, "Image": image, "User": u}); err != nil {
		return nil, "", err
	}
	if _, err := c.kubectl.run(ctx, "apply", "-f", file); err != nil {
		return nil, "", err
	}
	if _, err := c.kubectl.run(ctx, "-n", namespace, "rollout", "status", "deployment/rabbit", "--timeout=300s"); err != nil {
		return nil, "", err
	}
	f, err = startForward(c.kubectl, "rabbit."+namespace+".svc", "deployment/rabbit", amqpPort, managementPort)
	return f, u.Name + ":" + u.Password, err
}

var forwarding = regexp.MustCompile(`^Forwarding from (127\.0\.0\.1:\d+) -> (\d+)$`)

// startForward runs `kubectl port-forward` and returns when it has said where the ports are.
func startForward(k kubectl, host, target string, ports ...string) (*forward, error) {
	args := []string{"-n", namespace, "port-forward", "--address", "127.0.0.1", target}
	for _, p := range ports {
		args = append(args, ":"+p)
	}
	cmd := exec.Command(k.program, args...)
	cmd.Env = k.env()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a Ctrl-C at the terminal is not for it
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("kubectl port-forward: %w", err)
	}
	f := &forward{host: host, local: map[string]string{}, cmd: cmd}
	tooLate := time.AfterFunc(30*time.Second, func() { _ = cmd.Process.Kill() })
	defer tooLate.Stop()
	lines := bufio.NewScanner(out)
	for len(f.local) < len(ports) && lines.Scan() {
		if m := forwarding.FindStringSubmatch(lines.Text()); m != nil {
			f.local[m[2]] = m[1]
		}
	}
	if len(f.local) < len(ports) {
		return nil, errors.Join(fmt.Errorf("kubectl port-forward %s: it did not say where the ports are", target), f.close())
	}
	go func() { // it says something about every connection, and would wait for a reader
		for lines.Scan() {
		}
	}()
	return f, nil
}
