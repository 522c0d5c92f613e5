package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/term"
)

// demo is one run.
type demo struct {
	root, dir string
	length    time.Duration
	progress  *progress
	ended     <-chan struct{}
	external  bool // CLUSTER=1: on the cluster of the user's kubeconfig

	broker string // which kind

	backend backend
	cluster *cluster
	objects *objects
	closers []func() error
}

// start brings the system up to where the example is applied.
func (d *demo) start(ctx context.Context) error {
	step := func(what string, do func() error) func() error {
		return func() error {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return d.progress.step(what, do)
		}
	}
	cluster := "starting the API server"
	if d.external {
		cluster = "loading images into the cluster"
	}
	for _, s := range []func() error{
		step("building operator, worker and publisher", func() error { return build(ctx, d.root, filepath.Join(d.dir, "bin"), d.external) }),
		step(cluster, func() error { return d.startCluster(ctx) }),
		step("kubectl apply -k config (CRDs, RBAC, operator)", func() error { return d.applyOperator(ctx) }),
		step("starting the broker", func() error { return d.startBackend(ctx) }),
		step("waiting for the operator", func() error {
			_, err := d.cluster.kubectl.run(ctx, "-n", operatorNamespace, "rollout", "status", "deployment/shove-operator", "--timeout=90s")
			return err
		}),
		step("kubectl apply -k examples/orders", func() error { return d.applyOrders(ctx) }),
		step("connecting to the broker", func() error { return d.backend.connect(ctx) }),
	} {
		if err := s(); err != nil {
			return err
		}
	}
	if d.cluster.mine() {
		fmt.Fprintf(d.progress.out, "\nLook around in another terminal:\n  export KUBECONFIG=%s\n  kubectl -n %s get shove\nLogs of the pods: %s\n\n",
			d.cluster.kubectl.kubeconfig, namespace, filepath.Join(d.dir, "pods"))
	}
	return nil
}

func (d *demo) startCluster(ctx context.Context) (err error) {
	if d.external {
		d.cluster, err = useKubeconfig(ctx, d.dir)
	} else {
		d.cluster, err = startControlPlane(ctx, d.dir)
	}
	if d.cluster != nil {
		d.closers = append(d.closers, d.cluster.stop)
	}
	if err != nil {
		return err
	}
	d.objects, err = newObjects(d.cluster.rest, namespace)
	return err
}

func (d *demo) applyOperator(ctx context.Context) error {
	overlay := filepath.Join(d.dir, "apply", "operator")
	if err := writeOperatorOverlay(d.root, overlay, overlayData{Namespace: namespace, OperatorImage: d.cluster.operatorImage}); err != nil {
		return err
	}
	if _, err := d.cluster.kubectl.run(ctx, "apply", "--server-side", "-k", overlay); err != nil {
		return err
	}
	_, err := d.cluster.kubectl.run(ctx, "wait", "--for=condition=Established", "--timeout=30s",
		"crd/brokers.shove.dev", "crd/topologies.shove.dev", "crd/consumergroups.shove.dev")
	return err
}

func (d *demo) applyOrders(ctx context.Context) error {
	overlay := filepath.Join(d.dir, "apply", "orders")
	data := overlayData{Namespace: namespace, Images: map[string]string{workerName: d.cluster.workerImage, publisherName: d.cluster.publisherImage}}
	d.backend.overlay(&data)
	if err := writeOrdersOverlay(d.root, overlay, data); err != nil {
		return err
	}
	_, err := d.cluster.kubectl.run(ctx, "apply", "-k", overlay)
	return err
}

// close takes everything down, the last thing that was started first.
func (d *demo) close() error {
	var errs []error
	for i := len(d.closers) - 1; i >= 0; i-- {
		errs = append(errs, d.closers[i]())
	}
	d.closers = nil
	return errors.Join(errs...)
}

// Bounds of what the demo waits for.
const (
	readyWithin = 90 * time.Second // the three objects, after they were applied
	emptyWithin = 60 * time.Second // the queues, after the publisher has ended
)

// watch shows the system until it is over, winds it down, and says what was seen.
func (d *demo) watch(ctx context.Context) error {
	w := &watcher{backend: d.backend, objects: d.objects, publish: d.startPublisher}
	w.state.title = d.backend.title()
	w.state.begun, w.state.length = time.Now(), d.length
	looking, stopLooking := context.WithCancel(ctx)
	defer stopLooking()
	go w.run(looking)
	v := &screen{out: os.Stdout, terminal: d.progress.terminal}
	if err := d.live(ctx, w, v); err != nil {
		return err
	}
	left, err := d.windDown(ctx, w, v)
	if err != nil {
		return err
	}
	return d.summary(ctx, w, left)
}

// startPublisher lets the publisher begin, whose Deployment was applied without a replica: the books are open now, and
// nothing happens that they do not know.
func (d *demo) startPublisher(ctx context.Context) error {
	_, err := d.cluster.kubectl.run(ctx, "-n", namespace, "scale", "deployment/"+publisherName, "--replicas=1")
	return err
}

// live shows the view until the time is over or the demo is told to end.
func (d *demo) live(ctx context.Context, w *watcher, v *screen) error {
	w.setPhase("waiting for the objects to become Ready")
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		d.draw(w, v)
		s := w.now()
		switch {
		case s.ready.IsZero() && time.Since(s.begun) > readyWithin:
			return fmt.Errorf("the objects were not Ready within %s: %s", readyWithin, notReady(s))
		case !s.ready.IsZero() && d.length > 0 && time.Since(s.ready) >= d.length:
			return nil
		case !s.ready.IsZero():
			w.setPhase("running")
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-d.ended:
			return nil
		case <-tick.C:
		}
	}
}

func (d *demo) draw(w *watcher, v *screen) {
	if v.terminal {
		if width, height, err := term.GetSize(int(os.Stdout.Fd())); err == nil {
			v.width, v.height = width, height
		}
	}
	v.show(w.now())
}

func notReady(s state) string {
	var parts []string
	for _, o := range s.objects {
		if !o.Ready {
			parts = append(parts, o.Name+": "+o.Text)
		}
	}
	if s.problem != "" {
		parts = append(parts, s.problem)
	}
	return strings.Join(parts, "; ")
}

// windDown ends the publisher and waits until the broker has nothing left to hand out. What it returns says what is
// left after all; empty: nothing.
func (d *demo) windDown(ctx context.Context, w *watcher, v *screen) (left string, err error) {
	w.setPhase("publisher stopped; waiting for the queues to run empty")
	if _, err := d.cluster.kubectl.run(ctx, "-n", namespace, "scale", "deployment/"+publisherName, "--replicas=0"); err != nil {
		return "", err
	}
	if _, err := d.cluster.kubectl.run(ctx, "-n", namespace, "wait", "--for=delete", "pod", "-l", "app="+publisherName, "--timeout=60s"); err != nil {
		return "", err
	}
	v.lastLine = time.Time{}
	deadline := time.Now().Add(emptyWithin)
	for {
		d.draw(w, v)
		if left = remaining(w.now()); left == "" || time.Now().After(deadline) {
			return left, nil
		}
		select {
		case <-ctx.Done():
			return "", context.Cause(ctx)
		case <-time.After(250 * time.Millisecond):
		}
	}
}

// remaining says what the broker still has, or which of its counters are not up to date with the books; RabbitMQ's
// management API is some seconds behind.
func remaining(s state) string {
	var parts []string
	names := s.all()
	if len(names) == 0 {
		return "the queues are not known"
	}
	for _, name := range names {
		q, ok := s.queues[name]
		if !ok || q.Ready == nil || q.Unacked == nil {
			parts = append(parts, name+": unknown")
		} else if *q.Ready+*q.Unacked > 0 {
			parts = append(parts, fmt.Sprintf("%s: %d ready, %d unacknowledged", name, *q.Ready, *q.Unacked))
		}
		if q.Unseen > 0 {
			parts = append(parts, fmt.Sprintf("%s: %d stored that the books do not know", name, q.Unseen))
		}
	}
	if main := s.queues[s.names.Main]; main.Stats.Ack < s.counts.Delivered {
		parts = append(parts, fmt.Sprintf("%s: %d of %d deliveries acknowledged", s.names.Main, main.Stats.Ack, s.counts.Delivered))
	}
	if dlq := s.queues[s.names.DeadLetter]; dlq.Stats.Ack < s.counts.DeadTotal() {
		parts = append(parts, fmt.Sprintf("%s: %d of %d dead letters acknowledged", s.names.DeadLetter, dlq.Stats.Ack, s.counts.DeadTotal()))
	}
	return strings.Join(parts, "; ")
}

// errNotAllSeen makes the exit code.
var errNotAllSeen = errors.New("not everything was seen that had to be")

// summary shows the objects, stops the worker, and says what was seen.
func (d *demo) summary(ctx context.Context, w *watcher, left string) error {
	w.look(ctx)
	s, balance := w.now(), w.balance()
	out := d.progress.out
	for _, name := range objectNames {
		fmt.Fprintf(out, "\n$ kubectl -n %s describe %s\n", namespace, name)
		if err := d.cluster.kubectl.stream(ctx, out, "-n", namespace, "describe", name); err != nil {
			return err
		}
	}
	checks := verdict(s, balance, left)
	drained, err := d.drainWorker(ctx, w)
	if err != nil {
		return err
	}
	checks = append(checks, drained)
	fmt.Fprintf(out, "\nSeen on the broker in %s:\n", s.elapsed())
	for _, c := range checks {
		mark := "  ok    "
		if !c.ok {
			mark = "  MISSING "
		}
		fmt.Fprint(out, mark, c.what)
		if c.how != "" {
			fmt.Fprint(out, ": ", c.how)
		}
		fmt.Fprintln(out)
	}
	if !passed(checks) {
		return errNotAllSeen
	}
	fmt.Fprintln(out, "Everything was seen.")
	return nil
}

// drainWorker scales the worker down and looks that the broker has no consumer and nothing unacknowledged of it.
func (d *demo) drainWorker(ctx context.Context, w *watcher) (check, error) {
	c := check{what: "the worker drained on SIGTERM and left nothing unacknowledged"}
	k := d.cluster.kubectl
	if _, err := k.run(ctx, "-n", namespace, "scale", "deployment/"+workerName, "--replicas=0"); err != nil {
		return c, err
	}
	if _, err := k.run(ctx, "-n", namespace, "wait", "--for=delete", "pod", "-l", "app="+workerName, "--timeout=60s"); err != nil {
		return c, err
	}
	deadline := time.Now().Add(20 * time.Second)
	for {
		queues, err := d.backend.queues(ctx, w.now().names)
		if err != nil {
			return c, err
		}
		c.how = ""
		for _, q := range queues {
			if q.Unacked == nil || *q.Unacked != 0 || q.Consumers == nil || *q.Consumers != 0 {
				c.how = q.Name + " still has a consumer or something unacknowledged"
			}
		}
		if c.ok = c.how == ""; c.ok || time.Now().After(deadline) {
			return c, nil
		}
		select {
		case <-ctx.Done():
			return c, context.Cause(ctx)
		case <-time.After(250 * time.Millisecond):
		}
	}
}
