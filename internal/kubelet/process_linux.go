package kubelet

import (
	"os"
	"os/exec"
	"syscall"
)

// isolate gives a process a group of its own, so that a Ctrl-C in the terminal reaches it through the stand-in only,
// and ends it when the stand-in is killed.
func isolate(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

func terminateProcess(p *os.Process) error { return p.Signal(syscall.SIGTERM) }
