package controllers

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/controllers/render"
)

// PodReport is what a pod says about its configuration.
type PodReport struct {
	// Generation is that of the configuration in use.
	Generation string `json:"generation"`
	// ReloadError says why a newer one was refused.
	ReloadError string `json:"reloadError"`
}

// podReporter asks a pod which configuration it runs. It must end within a few seconds.
type podReporter func(context.Context, *corev1.Pod) (PodReport, error)

const (
	reportTimeout = 2 * time.Second
	reportLimit   = 64 << 10
	// reportParallel bounds the pods that are asked at once, reportPods those that are asked at all in one pass.
	reportParallel = 16
	reportPods     = 200
	// firstReport doubles up to lastReport while not every pod reports what it should.
	firstReport, lastReport = 2 * time.Second, time.Minute
)

var reportClient = &http.Client{
	Timeout:       reportTimeout,
	Transport:     &http.Transport{DisableKeepAlives: true, Proxy: nil},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

// httpReport asks a pod's own /status. It is an observation and nothing depends on it but what is shown and when a
// retired queue may go: a pod that cannot be asked is unknown.
func httpReport(ctx context.Context, p *corev1.Pod) (PodReport, error) {
	url := "http://" + net.JoinHostPort(p.Status.PodIP, strconv.Itoa(render.StatusPort)) + "/status"
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return PodReport{}, err
	}
	resp, err := reportClient.Do(req)
	if err != nil {
		return PodReport{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return PodReport{}, fmt.Errorf("status %d", resp.StatusCode)
	}
	var out PodReport
	err = json.NewDecoder(io.LimitReader(resp.Body, reportLimit)).Decode(&out)
	return out, err
}

// bringToPods has kubelet look at the files at once, finds out who runs what, and who has to be restarted.
func (r *injectReconciler) bringToPods(ctx context.Context, s *injectScope) error {
	b := r.outcomes.broughtTo(s.target)
	if b.token != s.token {
		b = brought{}
	}
	if b.token == s.token && b.delivered == s.config.Generation && !s.restart.any() {
		s.out.delivered(metaTrue, v1alpha1.ReasonDelivered, "every running pod reports the rendered configuration")
		return nil
	}
	pods, err := r.podsOf(ctx, s)
	if err != nil {
		return err
	}
	s.out.restarts = s.restart.stale(pods, s.container())
	if err := r.pokePods(ctx, s, pods); err != nil {
		return err
	}
	b.token = s.token
	if b.delivered != s.config.Generation {
		s.out.delivery = r.askPods(ctx, s, pods)
		b.attempts++
		if s.out.delivery.status == metaTrue {
			b.delivered, b.attempts = s.config.Generation, 0
		} else {
			s.within(jitter(min(lastReport, firstReport<<min(b.attempts-1, 8))))
		}
	} else {
		s.out.delivered(metaTrue, v1alpha1.ReasonDelivered, "every running pod reports the rendered configuration")
	}
	r.outcomes.setBrought(s.target, b)
	return nil
}

// container is the one that holds the runtime.
func (s *injectScope) container() string {
	if s.plan.Sidecar != nil {
		return render.AgentContainer
	}
	return s.plan.Container
}

// podsOf are the workload's running pods that carry the injection.
func (r *injectReconciler) podsOf(ctx context.Context, s *injectScope) ([]*corev1.Pod, error) {
	selector, err := metav1.LabelSelectorAsSelector(s.workload.selector())
	if err != nil || selector.Empty() {
		return nil, nil //nolint:nilerr // the API server has refused such a workload
	}
	var list corev1.PodList
	if err := r.live.List(ctx, &list, client.InNamespace(s.target.Namespace), client.MatchingLabelsSelector{Selector: selector}); err != nil {
		return nil, fmt.Errorf("list pods of %s: %w", s.target, err)
	}
	var out []*corev1.Pod
	for i := range list.Items {
		p := &list.Items[i]
		mounted := slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == render.VolumeName })
		if mounted && p.DeletionTimestamp.IsZero() && p.Status.Phase == corev1.PodRunning {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b *corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// pokePods changes an annotation of the pods that are older than the newest files, so that kubelet syncs their volumes
// at once.
func (r *injectReconciler) pokePods(ctx context.Context, s *injectScope, pods []*corev1.Pod) error {
	for _, p := range pods {
		have, told := p.Annotations[v1alpha1.AnnotationConfigGeneration]
		if have == s.token || !told && p.CreationTimestamp.After(s.changed) {
			continue
		}
		body, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": p.UID,
			"annotations": map[string]string{v1alpha1.AnnotationConfigGeneration: s.token}}})
		if err != nil {
			return fmt.Errorf("encode patch of pod: %w", err)
		}
		if err := ignoreGone(r.client.Patch(ctx, p, client.RawPatch("application/merge-patch+json", body))); err != nil {
			return fmt.Errorf("annotate pod %q: %w", p.Name, err)
		}
	}
	return nil
}

// askPods asks every pod which configuration it runs.
func (r *injectReconciler) askPods(ctx context.Context, s *injectScope, pods []*corev1.Pod) finding {
	if len(pods) == 0 {
		if s.workload.wanted() == 0 {
			return finding{metaTrue, v1alpha1.ReasonDelivered, "no pod is running"}
		}
		return finding{metaFalse, v1alpha1.ReasonWaitingForPods, "no pod with the configuration is running yet"}
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	var behind, silent []string
	rejected := ""
	slots := make(chan struct{}, reportParallel)
	for i, p := range pods {
		if i >= reportPods {
			silent = append(silent, "more than "+strconv.Itoa(reportPods)+" pods: the rest is not asked")
			break
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			ctx, cancel := context.WithTimeout(ctx, reportTimeout)
			defer cancel()
			rep, err := r.report(ctx, p)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				silent = append(silent, p.Name)
			case rep.Generation == s.config.Generation:
			case rep.ReloadError != "":
				if text := fmt.Sprintf("pod %s keeps its last good configuration: %s", p.Name, plain(fmt.Errorf("%s", rep.ReloadError))); rejected == "" || text < rejected {
					rejected = text
				}
			default:
				behind = append(behind, p.Name)
			}
		})
	}
	wg.Wait()
	switch {
	case rejected != "":
		return finding{metaFalse, v1alpha1.ReasonConfigRejected, rejected}
	case len(behind) > 0:
		return finding{metaFalse, v1alpha1.ReasonWaitingForPods, "pods run an older configuration still: " + some(behind)}
	case len(silent) > 0:
		return finding{metaUnknown, v1alpha1.ReasonNotReported, fmt.Sprintf("pods do not answer on port %d: %s", render.StatusPort, some(silent))}
	default:
		return finding{metaTrue, v1alpha1.ReasonDelivered, "every running pod reports the rendered configuration"}
	}
}

// some names a few, in order.
func some(names []string) string {
	const shown = 5
	slices.Sort(names)
	if len(names) > shown {
		return strings.Join(names[:shown], ", ") + " and others"
	}
	return strings.Join(names, ", ")
}

// any says whether anything ever changed that needs a restart.
func (s restartState) any() bool {
	for _, f := range s {
		if !f.Since.IsZero() {
			return true
		}
	}
	return false
}

// stale names per Topology the pods whose container started before something changed that it cannot take over.
func (s restartState) stale(pods []*corev1.Pod, container string) map[string]string {
	out := map[string]string{}
	for topo, f := range s {
		if f.Since.IsZero() {
			continue
		}
		var names []string
		for _, p := range pods {
			if began := startOf(p, container); !began.IsZero() && began.Before(&f.Since) {
				names = append(names, p.Name)
			}
		}
		if len(names) > 0 {
			out[topo] = fmt.Sprintf("the configuration is now %s, which a running pod cannot take over: restart %s", f.Key, some(names))
		}
	}
	return out
}

func startOf(p *corev1.Pod, container string) *metav1.Time {
	for _, c := range slices.Concat(p.Status.ContainerStatuses, p.Status.InitContainerStatuses) {
		if c.Name == container && c.State.Running != nil {
			return &c.State.Running.StartedAt
		}
	}
	return &metav1.Time{}
}
