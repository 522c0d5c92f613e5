package rabbitserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// ImageVar overrides the image that a container is started from.
const ImageVar = "SHOVE_TEST_RABBITMQ_IMAGE"

const defaultImage = "rabbitmq:4.3-management"

// container runs the server as a container in the host's network, so that ports are as everywhere else.
type container struct {
	name   string
	reaper *exec.Cmd
	tether *os.File
}

func dockerAnswers() bool {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return exec.CommandContext(ctx, "docker", "version", "--format", "{{.Server.Version}}").Run() == nil
}

func docker(args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, "docker", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("docker %s: %w: %s", args[0], err, strings.TrimSpace(string(out)))
	}
	return nil
}

func (c *container) start(s *Server) error {
	if c.name != "" {
		return docker("start", c.name)
	}
	if err := writeConfig(s, s.dir, ""); err != nil {
		return err
	}
	image := os.Getenv(ImageVar)
	if image == "" {
		image = defaultImage
	}
	name := "shove-rabbitmq-" + strconv.Itoa(s.ports.amqp)
	if err := c.tie(name); err != nil {
		return err
	}
	args := []string{"run", "-d", "--name", name, "--network", "host", "-v", s.dir + ":" + s.dir}
	for _, kv := range serverEnv(s, s.dir) {
		key, _, _ := strings.Cut(kv, "=")
		switch key {
		case "PATH", "HOME", "RABBITMQ_MNESIA_BASE", "RABBITMQ_LOG_BASE", "RABBITMQ_LOGS", "RABBITMQ_PID_FILE", "RABBITMQ_SCHEMA_DIR", "RABBITMQ_GENERATED_CONFIG_DIR":
			continue // the image's own
		}
		args = append(args, "-e", kv)
	}
	if err := os.Chmod(s.dir, 0o755); err != nil { // the image's user reads the configuration
		return err
	}
	if err := docker(append(args, image)...); err != nil {
		return err
	}
	c.name = name
	return nil
}

// tie removes the container when this process ends without having done so.
func (c *container) tie(name string) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	cmd := exec.Command("/bin/sh", "-c", `read -r _; docker rm -f "$1" >/dev/null 2>&1`, "sh", name)
	cmd.Stdin = r
	if err := cmd.Start(); err != nil {
		return errors.Join(err, w.Close())
	}
	c.reaper, c.tether = cmd, w
	return nil
}

func (c *container) signal(kill bool) error {
	if !c.alive() {
		return nil
	}
	if kill {
		return docker("kill", c.name)
	}
	return docker("stop", "-t", "30", c.name)
}

func (c *container) alive() bool {
	if c.name == "" {
		return false
	}
	out, err := exec.Command("docker", "inspect", "-f", "{{.State.Running}}", c.name).Output()
	return err == nil && strings.TrimSpace(string(out)) == "true"
}

func (c *container) remove(dir string) error {
	if c.tether == nil {
		return os.RemoveAll(dir)
	}
	err := c.tether.Close() // the reaper removes the container
	_ = c.reaper.Wait()     // its exit state says nothing: a container that is gone is what is wanted
	c.tether, c.name = nil, ""
	return errors.Join(err, os.RemoveAll(dir))
}

func (c *container) logs(dir string) string {
	out, _ := exec.Command("docker", "logs", "--tail", "40", c.name).CombinedOutput() // an empty text is fine
	return filepath.Base(dir) + ":\n" + string(out)
}
