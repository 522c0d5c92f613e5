package kafkaserver

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

// process is the broker's process with the shell that watches over it.
type process struct {
	cmd    *exec.Cmd
	tether *os.File // held open while the broker may live
	pid    int      // of the Java runtime
}

// supervise runs the broker. When its standard input ends, which happens when the process that holds the other end
// does, however it dies, it kills the broker and removes its files. No goroutine has to watch for that.
const supervise = `
dir=$1; shift
"$@" </dev/null >>"$dir/out.log" 2>&1 &
server=$!
echo $server
exec >/dev/null
read -r _
kill -9 $server 2>/dev/null
case $dir in */shove-kafka-*) rm -rf "$dir" ;; esac
`

// heap keeps the broker small; it serves tests, not a load.
const heap = "384m"

func (p *process) start(s *Server) error {
	args := []string{"-c", supervise, "sh", s.dir, s.java,
		"-Xms96m", "-Xmx" + heap, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.awt.headless=true", "-Djava.net.preferIPv4Stack=true",
		"-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.showDateTime=true",
		"-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
	}
	if s.classes != "" {
		args = append(args, "-Xshare:auto", "-Xlog:cds=off", "-Xlog:cds+dynamic=off", "-XX:SharedArchiveFile="+s.classes)
	}
	args = append(args, s.opts.JVM...)
	args = append(args, "-cp", s.classPath, "kafka.Kafka", filepath.Join(s.dir, "server.properties"))
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	out, said, err := os.Pipe()
	if err != nil {
		return errors.Join(err, w.Close())
	}
	defer out.Close()
	cmd := exec.Command("/bin/sh", args...)
	cmd.Stdin, cmd.Stdout = r, said
	cmd.Dir = s.dir
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", "HOME=" + s.dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = cmd.Start()
	_ = said.Close() // the child has its own
	if err != nil {
		return errors.Join(err, w.Close())
	}
	p.cmd, p.tether, p.pid = cmd, w, 0
	line := make([]byte, 32)
	n, err := out.Read(line)
	if err == nil {
		p.pid, err = strconv.Atoi(strings.TrimSpace(string(line[:n])))
	}
	if err != nil {
		return errors.Join(fmt.Errorf("learning the broker's process id: %w", err), p.kill())
	}
	return nil
}

// stop ends the broker in order, or kills it where that takes longer than 30 s.
func (p *process) stop() error {
	if p.pid > 0 && syscall.Kill(p.pid, syscall.SIGTERM) == nil {
		for end := time.Now().Add(30 * time.Second); processExists(p.pid) && time.Now().Before(end); {
			time.Sleep(20 * time.Millisecond)
		}
	}
	return p.kill()
}

func (p *process) kill() error {
	if p.cmd == nil {
		return nil
	}
	if p.pid > 0 {
		// ESRCH means that it is gone already, which is what is wanted.
		_ = syscall.Kill(p.pid, syscall.SIGKILL)
	}
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	err := p.tether.Close()
	_ = p.cmd.Wait() // killed: the exit state says nothing new
	for end := time.Now().Add(10 * time.Second); p.pid > 0 && processExists(p.pid); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			return fmt.Errorf("ending Kafka: process %d outlives SIGKILL", p.pid)
		}
	}
	p.cmd, p.tether, p.pid = nil, nil, 0
	return err
}

func (p *process) freeze(on bool) error {
	sig := syscall.SIGCONT
	if on {
		sig = syscall.SIGSTOP
	}
	if p.pid == 0 {
		return errors.New("pausing Kafka: it does not run")
	}
	return syscall.Kill(p.pid, sig)
}

func (p *process) alive() bool { return p.pid > 0 && processExists(p.pid) }

// processExists reports whether a process is there with at least one thread that is not over. The first thread of a
// killed process may be a zombie while others still hold its sockets open.
func processExists(pid int) bool {
	dir := "/proc/" + strconv.Itoa(pid) + "/task"
	threads, err := os.ReadDir(dir)
	if err != nil {
		return false
	}
	for _, t := range threads {
		b, err := os.ReadFile(filepath.Join(dir, t.Name(), "stat"))
		if err != nil {
			continue
		}
		// pid (name) state …; the name may hold any character, so look behind the last bracket.
		_, rest, ok := strings.Cut(string(b[strings.LastIndexByte(string(b), ')'):]), " ")
		if ok && !strings.HasPrefix(rest, "Z") && !strings.HasPrefix(rest, "X") {
			return true
		}
	}
	return false
}
