package kubelet

import (
	"context"
	"net"
	"net/http"
	"os/exec"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// status is the pod's status now. problem is why it has not started.
func (r *runner) status(p *corev1.Pod, problem error) corev1.PodStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := corev1.PodStatus{Phase: corev1.PodPending, PodIP: r.ip, PodIPs: []corev1.PodIP{{IP: r.ip}}, HostIP: "127.0.0.1",
		HostIPs: []corev1.HostIP{{IP: "127.0.0.1"}}, QOSClass: p.Status.QOSClass}
	if !r.since.IsZero() {
		s.StartTime = &r.since
	}
	ready, initialised, running := true, true, false
	for i := range r.pod.Spec.InitContainers {
		c := r.runs[r.pod.Spec.InitContainers[i].Name]
		s.InitContainerStatuses = append(s.InitContainerStatuses, c.status(problem))
		if c.sidecar() {
			ready = ready && c.ready
		} else if t := c.state.Terminated; t == nil || t.ExitCode != 0 {
			initialised = false
		}
	}
	for i := range r.pod.Spec.Containers {
		c := r.runs[r.pod.Spec.Containers[i].Name]
		s.ContainerStatuses = append(s.ContainerStatuses, c.status(problem))
		ready = ready && c.ready
		running = running || c.state.Running != nil || c.restarts > 0
	}
	if running {
		s.Phase = corev1.PodRunning
	}
	ready = ready && p.DeletionTimestamp.IsZero()
	for _, c := range []struct {
		kind corev1.PodConditionType
		ok   bool
	}{{corev1.PodScheduled, true}, {corev1.PodInitialized, initialised}, {corev1.ContainersReady, ready}, {corev1.PodReady, ready}} {
		s.Conditions = append(s.Conditions, condition(p, c.kind, c.ok))
	}
	return s
}

// now is the time as the API server keeps it.
func now() metav1.Time { return metav1.NewTime(time.Now().Truncate(time.Second)) }

// condition keeps the time of the last change.
func condition(p *corev1.Pod, kind corev1.PodConditionType, ok bool) corev1.PodCondition {
	n := corev1.PodCondition{Type: kind, Status: truth(ok), LastTransitionTime: now()}
	for _, old := range p.Status.Conditions {
		if old.Type == kind && old.Status == n.Status {
			n.LastTransitionTime = old.LastTransitionTime
		}
	}
	return n
}

func (c *containerRun) status(problem error) corev1.ContainerStatus {
	started := c.state.Running != nil
	s := corev1.ContainerStatus{Name: c.spec.Name, Image: c.spec.Image, ImageID: c.spec.Image, State: *c.state.DeepCopy(), LastTerminationState: *c.last.DeepCopy(),
		Ready: c.ready, RestartCount: c.restarts, Started: &started}
	if s.State.Waiting != nil && problem != nil {
		s.State.Waiting.Message = problem.Error()
	}
	return s
}

// probe asks a container's readiness probe until the process ends.
func (r *runner) probe(c *containerRun, ended <-chan struct{}) {
	p := c.spec.ReadinessProbe
	if p == nil {
		return
	}
	period := time.Duration(max(1, p.PeriodSeconds)) * time.Second
	pause := time.Duration(p.InitialDelaySeconds)*time.Second + 100*time.Millisecond
	failures := int32(0)
	for {
		if !r.pause(pause, ended) {
			return
		}
		ok := r.ask(c, p)
		if ok {
			failures, pause = 0, period
		} else {
			failures++
			pause = min(period, 500*time.Millisecond) // soon ready, soon seen
		}
		r.mu.Lock()
		before := c.ready
		c.ready = ok || before && failures < max(1, p.FailureThreshold)
		moved := c.ready != before
		r.mu.Unlock()
		if moved {
			r.changed()
		}
	}
}

func (r *runner) ask(c *containerRun, p *corev1.Probe) bool {
	timeout := time.Duration(max(1, p.TimeoutSeconds)) * time.Second
	ctx, cancel := context.WithTimeout(r.kill, timeout)
	defer cancel()
	switch {
	case p.HTTPGet != nil:
		return r.get(ctx, c, p.HTTPGet)
	case p.TCPSocket != nil:
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(r.ip, port(c.spec, p.TCPSocket.Port)))
		if err != nil {
			return false
		}
		return conn.Close() == nil
	case p.Exec != nil:
		return r.execIn(ctx, c, p.Exec.Command) == nil
	default:
		return true
	}
}

func (r *runner) get(ctx context.Context, c *containerRun, g *corev1.HTTPGetAction) bool {
	host := g.Host
	if host == "" {
		host = r.ip
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(host, port(c.spec, g.Port))+g.Path, nil)
	if err != nil {
		return false
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode >= 200 && resp.StatusCode < 400
}

// execIn runs a command of a container's image beside its process.
func (r *runner) execIn(ctx context.Context, c *containerRun, command []string) error {
	if len(command) == 0 {
		return nil
	}
	cmd := exec.CommandContext(ctx, c.program[0], c.localArgs(command[1:])...) //nolint:gosec // a pod says what it runs
	cmd.Env, cmd.Dir = c.env, r.dir
	isolate(cmd)
	return cmd.Run()
}

// preStop runs a container's hook, within what is left of the grace period.
func (r *runner) preStop(c *containerRun) {
	if c.spec.Lifecycle == nil || c.spec.Lifecycle.PreStop == nil {
		return
	}
	switch h := c.spec.Lifecycle.PreStop; {
	case h.Exec != nil:
		_ = r.execIn(r.kill, c, h.Exec.Command)
	case h.HTTPGet != nil:
		_ = r.get(r.kill, c, h.HTTPGet)
	case h.Sleep != nil:
		r.pause(time.Duration(h.Sleep.Seconds)*time.Second, r.kill.Done())
	}
}

// port is a number, or the number of the container's port of that name.
func port(c *corev1.Container, p intstr.IntOrString) string {
	if p.Type == intstr.String {
		for _, cp := range c.Ports {
			if cp.Name == p.StrVal {
				return strconv.Itoa(int(cp.ContainerPort))
			}
		}
	}
	return p.String()
}
