package rabbitserver

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// serverScript is where Debian's package keeps the script itself; the one in /usr/sbin changes the user first and
// writes to fixed places.
const serverScript = "/usr/lib/rabbitmq/bin/rabbitmq-server"

// chooseLauncher finds a way to run a server, and the folder for its files.
func chooseLauncher() (launcher, string, error) {
	root := os.Getenv(RootVar)
	if isExecutable(filepath.Join(root, serverScript)) {
		tmp := os.TempDir()
		if root != "" {
			tmp = filepath.Join(root, "tmp")
		}
		dir, err := os.MkdirTemp(tmp, "shove-rabbitmq-")
		if err != nil {
			return nil, "", fmt.Errorf("making the server's folder: %w", err)
		}
		return &process{root: root}, dir, nil
	}
	if root != "" {
		return nil, "", fmt.Errorf("%s=%q: no RabbitMQ there", RootVar, root)
	}
	if !dockerAnswers() {
		return nil, "", ErrNotAvailable
	}
	dir, err := os.MkdirTemp("", "shove-rabbitmq-")
	if err != nil {
		return nil, "", fmt.Errorf("making the server's folder: %w", err)
	}
	return &container{}, dir, nil
}

// process runs the server as a process of this machine.
type process struct {
	root    string // chroot folder, or empty
	cmd     *exec.Cmd
	tether  *os.File // held open while the server may live
	pidFile string
}

// supervise runs epmd and the server in one process group. When its standard input ends, which happens when the
// process that holds the other end does, however it dies, it kills them and removes their files. No goroutine has to
// watch for that.
const supervise = `
epmd -address 127.0.0.1 -port "$ERL_EPMD_PORT" </dev/null >/dev/null 2>&1 &
epmd=$!
"$@" </dev/null >"$HOME/out.log" 2>&1 &
server=$!
read -r _
kill -9 $epmd $server $(cat "$RABBITMQ_PID_FILE" 2>/dev/null) 2>/dev/null
case $HOME in */shove-rabbitmq-*) rm -rf "$HOME" ;; esac
kill -9 0
`

func (p *process) start(s *Server) error {
	inside := strings.TrimPrefix(s.dir, p.root)
	if err := writeConfig(s, inside, p.root); err != nil {
		return err
	}
	p.pidFile = filepath.Join(s.dir, "pid")
	if err := os.Remove(p.pidFile); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	args := []string{"/bin/sh", "-c", supervise, "sh", serverScript}
	if p.root != "" {
		args = append([]string{"chroot", p.root}, args...)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin = r
	cmd.Env = serverEnv(s, inside)
	cmd.Dir = s.dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return errors.Join(err, w.Close())
	}
	p.cmd, p.tether = cmd, w
	return nil
}

// signal ends the Erlang VM and then the process group around it.
func (p *process) signal(kill bool) error {
	if p.cmd == nil {
		return nil
	}
	pid := p.vmPID()
	if !kill && pid > 0 {
		if err := syscall.Kill(pid, syscall.SIGTERM); err == nil {
			for end := time.Now().Add(30 * time.Second); processExists(pid) && time.Now().Before(end); {
				time.Sleep(20 * time.Millisecond)
			}
		}
	}
	if pid > 0 {
		// ESRCH means that it is gone already, which is what is wanted.
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	err := p.tether.Close()
	_ = p.cmd.Wait() // killed: the exit state says nothing new
	for end := time.Now().Add(10 * time.Second); pid > 0 && processExists(pid); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			return fmt.Errorf("ending RabbitMQ: process %d outlives SIGKILL", pid)
		}
	}
	p.cmd, p.tether = nil, nil
	return err
}

func (p *process) alive() bool {
	if p.cmd == nil {
		return false
	}
	if pid := p.vmPID(); pid > 0 {
		return processExists(pid)
	}
	return processExists(p.cmd.Process.Pid)
}

// vmPID is the Erlang VM's process id, 0 while it has not told.
func (p *process) vmPID() int {
	b, err := os.ReadFile(p.pidFile)
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0
	}
	return pid
}

func (p *process) remove(dir string) error { return os.RemoveAll(dir) }

func (p *process) logs(dir string) string {
	var b strings.Builder
	for _, f := range []string{"out.log", "rabbit.log"} {
		text, err := os.ReadFile(filepath.Join(dir, f))
		if err != nil {
			continue
		}
		if len(text) > 2000 {
			text = text[len(text)-2000:]
		}
		b.WriteString("\n" + f + ":\n" + string(text))
	}
	return b.String()
}

// processExists reports whether a process is there and not a zombie.
func processExists(pid int) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	// pid (name) state …; the name may hold any character, so look behind the last bracket.
	_, rest, ok := strings.Cut(string(b[strings.LastIndexByte(string(b), ')'):]), " ")
	return ok && !strings.HasPrefix(rest, "Z") && !strings.HasPrefix(rest, "X")
}

// serverEnv is the whole environment of the server: nothing of the caller's leaks in, and no file under /etc is read.
func serverEnv(s *Server, dir string) []string {
	in := func(name string) string { return dir + "/" + name }
	args := "-kernel inet_dist_use_interface {127,0,0,1}"
	if s.opts.ConsumerTimeout > 0 { // up to 4.2 it is looked at once a minute otherwise
		args += " -rabbit channel_tick_interval 500"
	}
	return []string{
		"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", "HOME=" + dir,
		"ERL_EPMD_PORT=" + strconv.Itoa(s.ports.epmd), "ERL_EPMD_ADDRESS=127.0.0.1",
		"RABBITMQ_NODENAME=shove" + strconv.Itoa(s.ports.amqp) + "@localhost",
		"RABBITMQ_CONF_ENV_FILE=" + in("env.conf"), "RABBITMQ_CONFIG_FILE=" + in("rabbitmq.conf"),
		"RABBITMQ_ADVANCED_CONFIG_FILE=" + in("advanced.config"), "RABBITMQ_ENABLED_PLUGINS_FILE=" + in("enabled_plugins"),
		"RABBITMQ_MNESIA_BASE=" + in("data"), "RABBITMQ_LOG_BASE=" + dir, "RABBITMQ_LOGS=" + in("rabbit.log"),
		"RABBITMQ_SCHEMA_DIR=" + in("schema"), "RABBITMQ_GENERATED_CONFIG_DIR=" + in("generated"),
		"RABBITMQ_PID_FILE=" + in("pid"), "RABBITMQ_DIST_PORT=" + strconv.Itoa(s.ports.dist),
		"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=" + args,
	}
}

// writeConfig writes the server's files; dir is the folder as the server sees it, below root.
func writeConfig(s *Server, dir, root string) error {
	lines := []string{
		"listeners.tcp.1 = " + loopback(s.ports.amqp),
		"log.console = false",
		"log.file.level = info",
	}
	plugins := "[rabbitmq_management,rabbitmq_consistent_hash_exchange].\n"
	if s.opts.WithoutPlugins {
		plugins = "[].\n"
	} else {
		lines = append(lines, "management.tcp.ip = 127.0.0.1", "management.tcp.port = "+strconv.Itoa(s.ports.management))
	}
	if s.opts.TLS {
		inside := func(file string) string { return strings.TrimPrefix(file, root) }
		lines = append(lines,
			"listeners.ssl.1 = "+loopback(s.ports.tls),
			"ssl_options.cacertfile = "+inside(s.Certificates.CA),
			"ssl_options.certfile = "+inside(s.Certificates.ServerCert),
			"ssl_options.keyfile = "+inside(s.Certificates.ServerKey),
			"ssl_options.verify = verify_peer",
			"ssl_options.fail_if_no_peer_cert = "+strconv.FormatBool(s.opts.RequireClient))
	}
	if s.opts.ConsumerTimeout > 0 {
		lines = append(lines, "consumer_timeout = "+strconv.FormatInt(s.opts.ConsumerTimeout.Milliseconds(), 10))
	}
	lines = append(lines, s.opts.Config...)
	for name, text := range map[string]string{
		"rabbitmq.conf": strings.Join(lines, "\n") + "\n", "enabled_plugins": plugins, "env.conf": "", "advanced.config": "[].\n",
	} {
		if err := os.WriteFile(filepath.Join(root, dir, name), []byte(text), 0o644); err != nil {
			return fmt.Errorf("writing the server's configuration: %w", err)
		}
	}
	return nil
}
