package kubelet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// runner runs the containers of one pod.
type runner struct {
	pod     *corev1.Pod // as it was when it was first seen
	dir     string
	ip      string
	output  func(namespace, pod, container string) io.Writer
	changed func()

	stop     chan struct{} // closed when the pod is to end
	kill     context.Context
	killAll  context.CancelFunc
	stopOnce sync.Once
	done     chan struct{} // closed when nothing runs any more

	mu      sync.Mutex
	started bool
	runs    map[string]*containerRun
	since   metav1.Time
}

// containerRun is one container.
type containerRun struct {
	spec    *corev1.Container
	init    bool
	program []string
	env     []string
	paths   mounts

	// guarded by the runner's mu
	state    corev1.ContainerState
	last     corev1.ContainerState
	ready    bool
	restarts int32
	process  *os.Process
}

// sidecar says whether it is an init container that goes on running.
func (c *containerRun) sidecar() bool {
	return c.init && c.spec.RestartPolicy != nil && *c.spec.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

func newRunner(p *corev1.Pod, dir, ip string, output func(namespace, pod, container string) io.Writer) *runner {
	r := &runner{pod: p.DeepCopy(), dir: dir, ip: ip, output: output, stop: make(chan struct{}), done: make(chan struct{}), runs: map[string]*containerRun{}}
	r.kill, r.killAll = context.WithCancel(context.Background())
	for i := range r.pod.Spec.InitContainers {
		r.runs[r.pod.Spec.InitContainers[i].Name] = &containerRun{spec: &r.pod.Spec.InitContainers[i], init: true}
	}
	for i := range r.pod.Spec.Containers {
		r.runs[r.pod.Spec.Containers[i].Name] = &containerRun{spec: &r.pod.Spec.Containers[i]}
	}
	for _, c := range r.runs {
		c.state = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}}
	}
	return r
}

func (r *runner) volumes() string              { return filepath.Join(r.dir, "volumes") }
func (r *runner) volumeDir(name string) string { return filepath.Join(r.volumes(), name) }

// containers are all containers of the pod in their order, init containers first.
func (r *runner) containers() []*corev1.Container {
	var out []*corev1.Container
	for i := range r.pod.Spec.InitContainers {
		out = append(out, &r.pod.Spec.InitContainers[i])
	}
	for i := range r.pod.Spec.Containers {
		out = append(out, &r.pod.Spec.Containers[i])
	}
	return out
}

func (r *runner) begun() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.started
}

// prepare says what a container runs. It is called before begin.
func (r *runner) prepare(c *corev1.Container, program, env []string) {
	run := r.runs[c.Name]
	run.paths = mountsOf(r, c)
	vars := map[string]string{}
	for _, e := range env {
		name, value, _ := strings.Cut(e, "=")
		vars[name] = value
	}
	argv := program
	if len(c.Command) > 0 { // the command names a program inside the image, which program stands for
		argv = append(program[:1:1], expandAll(c.Command[1:], vars)...)
	}
	run.program = append(argv[:1:1], run.localArgs(append(argv[1:len(argv):len(argv)], expandAll(c.Args, vars)...))...)
	run.env = env
}

func (c *containerRun) localArgs(args []string) []string {
	out := make([]string, len(args))
	for i, a := range args {
		out[i] = c.paths.replace(a)
	}
	return out
}

// begin starts the pod. A runner that was told to end before does not start.
func (r *runner) begin() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.started {
		return
	}
	r.started, r.since = true, now()
	go r.run()
}

// terminate ends the pod: SIGTERM to its containers, later to its sidecars, SIGKILL when the grace is over. done is
// closed in the end. It may be called again.
func (r *runner) terminate(grace time.Duration) {
	r.stopOnce.Do(func() {
		close(r.stop)
		r.mu.Lock()
		started := r.started
		r.started = true // begin does nothing any more
		r.mu.Unlock()
		if !started {
			close(r.done)
			return
		}
		time.AfterFunc(grace, r.killAll)
	})
}

func (r *runner) stopping() bool {
	select {
	case <-r.stop:
		return true
	default:
		return false
	}
}

// run is the life of the pod.
func (r *runner) run() {
	defer r.changed()
	defer close(r.done)
	defer r.killAll()
	var apps, sidecars sync.WaitGroup
	sidecarStop := make(chan struct{})
	ok := true
	for i := range r.pod.Spec.InitContainers {
		c := r.runs[r.pod.Spec.InitContainers[i].Name]
		if c.sidecar() {
			sidecars.Go(func() { r.supervise(c, sidecarStop) })
			continue
		}
		if ok = r.runToCompletion(c); !ok {
			break
		}
	}
	if ok {
		for i := range r.pod.Spec.Containers {
			c := r.runs[r.pod.Spec.Containers[i].Name]
			apps.Go(func() { r.supervise(c, r.stop) })
		}
		for i := range r.pod.Spec.InitContainers { // preStop hooks of sidecars begin with the others'
			if c := r.runs[r.pod.Spec.InitContainers[i].Name]; c.sidecar() {
				sidecars.Go(func() { <-r.stop; r.preStop(c) })
			}
		}
	}
	<-r.stop
	apps.Wait()
	close(sidecarStop)
	sidecars.Wait()
}

// runToCompletion runs an init container until it succeeds; false: the pod ends first.
func (r *runner) runToCompletion(c *containerRun) bool {
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		code := r.once(c, r.stop)
		if r.stopping() {
			return false
		}
		if code == 0 {
			return true
		}
		if !r.pause(pause, r.stop) {
			return false
		}
	}
}

// The pauses before a container that ended is started again; shorter than kubelet's, because people watch.
const (
	firstPause = time.Second
	lastPause  = 10 * time.Second
	// healthy is how long a container runs before its pauses begin anew.
	healthy = 30 * time.Second
)

// supervise keeps a container running until stop is closed.
func (r *runner) supervise(c *containerRun, stop <-chan struct{}) {
	pause := firstPause
	for {
		begun := time.Now()
		r.once(c, stop)
		select {
		case <-stop:
			return
		default:
		}
		if time.Since(begun) > healthy {
			pause = firstPause
		}
		r.mu.Lock()
		c.last, c.restarts = c.state, c.restarts+1
		c.state = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: "the container ended"}}
		r.mu.Unlock()
		r.changed()
		if !r.pause(pause, stop) {
			return
		}
		pause = min(2*pause, lastPause)
	}
}

func (r *runner) pause(d time.Duration, stop <-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-stop:
		return false
	case <-t.C:
		return true
	}
}

// once runs a container's process to its end and returns its exit code.
func (r *runner) once(c *containerRun, stop <-chan struct{}) int {
	cmd := exec.CommandContext(r.kill, c.program[0], c.program[1:]...)
	cmd.Env, cmd.Dir, cmd.WaitDelay = c.env, r.dir, time.Second
	if w := c.spec.WorkingDir; w != "" {
		if local := c.paths.replace(w); local != w {
			cmd.Dir = local
		}
	}
	isolate(cmd)
	log, err := r.logFile(c)
	if err != nil {
		return r.failed(c, err)
	}
	defer func() { _ = log.Close() }()
	cmd.Stdout = log
	if r.output != nil {
		if w := r.output(r.pod.Namespace, r.pod.Name, c.spec.Name); w != nil {
			cmd.Stdout = io.MultiWriter(log, w)
		}
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		return r.failed(c, err)
	}
	began := now()
	r.mu.Lock()
	c.state = corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: began}}
	c.process, c.ready = cmd.Process, c.spec.ReadinessProbe == nil
	r.mu.Unlock()
	r.changed()

	ended, probing := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(probing)
		r.probe(c, ended)
	}()
	go func() {
		select {
		case <-stop:
			if !c.sidecar() { // a sidecar's hook began when the pod was told to end
				r.preStop(c)
			}
			_ = terminateProcess(cmd.Process)
		case <-ended:
		}
	}()
	err = cmd.Wait()
	close(ended)
	<-probing
	code := exitCode(cmd, err)
	r.mu.Lock()
	c.process, c.ready = nil, false
	c.state = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: int32(code), StartedAt: began, FinishedAt: now(), Reason: reason(code)}}
	r.mu.Unlock()
	r.changed()
	return code
}

func (r *runner) failed(c *containerRun, err error) int {
	r.mu.Lock()
	at := now()
	c.state = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 128, Reason: "StartError", Message: err.Error(), StartedAt: at, FinishedAt: at}}
	r.mu.Unlock()
	r.changed()
	return 128
}

func (r *runner) logFile(c *containerRun) (*os.File, error) {
	if err := os.MkdirAll(r.dir, 0o755); err != nil {
		return nil, fmt.Errorf("folder of the pod: %w", err)
	}
	return os.OpenFile(filepath.Join(r.dir, c.spec.Name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
}

func exitCode(cmd *exec.Cmd, err error) int {
	if cmd.ProcessState != nil {
		if code := cmd.ProcessState.ExitCode(); code >= 0 {
			return code
		}
		return 137
	}
	if err != nil && !errors.Is(err, context.Canceled) {
		return 128
	}
	return 137
}

func reason(code int) string {
	if code == 0 {
		return "Completed"
	}
	return "Error"
}
