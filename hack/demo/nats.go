package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/nats"
	"github.com/shove-dev/shove/embedded"
	"github.com/shove-dev/shove/hack/demo/ledger"
)

// natsBackend is the embedded broker: in this process, or in the user's cluster as the operator runs it.
type natsBackend struct {
	cluster  *cluster
	server   *embedded.Server // in this process; nil: in the cluster
	forward  *forward         // to the one in the cluster
	operator user
	workload user

	url   string
	conn  *natsgo.Conn
	js    jetstream.JetStream
	admin broker.Admin
	tap   *natsTap
}

// startEmbedded starts a server in this process, unless the operator is to run one in the user's cluster.
func startEmbedded(ctx context.Context, c *cluster, dir string) (backend, error) {
	b := &natsBackend{cluster: c, operator: user{"operator", rand.Text()}, workload: user{"orders", rand.Text()}}
	if !c.mine() {
		return b, nil
	}
	s, err := embedded.Start(ctx, embedded.Options{Dir: filepath.Join(dir, "broker"), MaxBytes: 1 << 30, Users: []embedded.User{
		{Name: b.operator.Name, Password: b.operator.Password}, {Name: b.workload.Name, Password: b.workload.Password, Workload: true},
	}})
	if err != nil {
		return nil, err
	}
	b.server, b.url = s, s.URL()
	return b, nil
}

func (b *natsBackend) title() string {
	if b.conn == nil {
		return "embedded broker"
	}
	where := "in this process"
	if b.server == nil {
		where = "in the cluster"
	}
	return "embedded broker (NATS " + b.conn.ConnectedServerVersion() + ", " + where + ")"
}

func (b *natsBackend) overlay(o *overlayData) {
	o.Broker = "embedded"
	if b.server != nil {
		o.Broker, o.BrokerURL, o.Operator, o.Workload = "nats", b.url, b.operator, b.workload
	}
}

// connect connects the demo's own looking: as the operator's user.
func (b *natsBackend) connect(ctx context.Context) error {
	if b.server == nil {
		if err := b.intoCluster(ctx); err != nil {
			return err
		}
	}
	var err error
	b.conn, err = natsgo.Connect(b.url, natsgo.UserInfo(b.operator.Name, b.operator.Password), natsgo.Name("shove demo"), natsgo.MaxReconnects(-1))
	if err != nil {
		return fmt.Errorf("connect to the broker: %w", err)
	}
	if b.js, err = jetstream.New(b.conn); err != nil {
		return err
	}
	endpoint, err := json.Marshal(map[string][]string{"servers": {b.url}})
	if err != nil {
		return err
	}
	b.admin, err = nats.Driver.OpenAdmin(ctx, broker.Config{Endpoint: endpoint, Name: "shove demo", Credentials: func(context.Context) (broker.Credentials, error) {
		return broker.Credentials{Username: b.operator.Name, Password: b.operator.Password}, nil
	}})
	if err != nil {
		return err
	}
	b.tap, err = openNATSTap(b.conn)
	return err
}

// intoCluster waits for the server that the operator runs, and leads a port of this machine to it.
func (b *natsBackend) intoCluster(ctx context.Context) error {
	const set = "statefulset/shove-broker-" + brokerName
	k := b.cluster.kubectl
	if err := retry(ctx, time.Minute, func() error {
		_, err := k.run(ctx, "-n", namespace, "get", set)
		return err
	}); err != nil {
		return err
	}
	// Its pods are not rolled out by the cluster (OnDelete), so that "rollout status" has nothing to say.
	if _, err := k.run(ctx, "-n", namespace, "wait", "--for=jsonpath={.status.readyReplicas}=1", set, "--timeout=180s"); err != nil {
		return err
	}
	text, err := k.run(ctx, "-n", namespace, "get", "secret", "shove-broker-"+brokerName, "-o", "json")
	if err != nil {
		return err
	}
	var secret struct{ Data map[string][]byte }
	if err := json.Unmarshal([]byte(text), &secret); err != nil {
		return errors.New("the Secret of the embedded broker does not parse") // its text holds a password
	}
	b.operator = user{string(secret.Data["username"]), string(secret.Data["password"])}
	const port = "4222"
	if b.forward, err = startForward(k, "", set, port); err != nil {
		return err
	}
	b.url = "nats://" + b.forward.local[port]
	return nil
}

func retry(ctx context.Context, limit time.Duration, do func() error) error {
	deadline := time.Now().Add(limit)
	for {
		err := do()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(time.Second):
		}
	}
}

// book has the server publish the headers of everything that it stores to the tap, too.
func (b *natsBackend) book(ctx context.Context, l *ledger.Ledger) error {
	b.tap.open(l)
	for _, name := range []string{l.Queues().Main, l.Queues().DeadLetter} {
		s, err := b.js.Stream(ctx, name)
		if err != nil {
			return fmt.Errorf("stream %q: %w", name, err)
		}
		cfg := s.CachedInfo().Config
		cfg.RePublish = &jetstream.RePublish{Source: ">", Destination: tapPrefix + ">", HeadersOnly: true}
		if _, err := b.js.UpdateStream(ctx, cfg); err != nil {
			return fmt.Errorf("stream %q: have it tell what it stores: %w", name, err)
		}
	}
	return nil
}

// queues takes depths from the operator's seam, and the rest from the streams and their consumers.
func (b *natsBackend) queues(ctx context.Context, q ledger.Queues) (map[string]queueState, error) {
	if q.Main == "" {
		return nil, nil
	}
	seen := b.tap.stored() // first, so that a message that comes in between is one that is unseen
	names := append(append([]string{q.Main}, q.Holds...), q.DeadLetter)
	depths, err := b.admin.Depths(ctx, names)
	if err != nil {
		return nil, err
	}
	out := map[string]queueState{}
	for i, name := range names {
		s := queueState{Name: name, Ready: count(depths[i].Ready), Unacked: count(depths[i].InFlight), Consumers: new(int)}
		s.Stats.Publish = seen.queues[name]
		if name == q.Main || name == q.DeadLetter {
			if err := b.consumer(ctx, name, seen.last[name], &s); err != nil {
				return nil, err
			}
		}
		out[name] = s
	}
	return out, nil
}

// consumer adds what the server says about a stream and its consumer. A message that was stored and is not there any
// more was acknowledged: nothing else takes one from a work queue.
func (b *natsBackend) consumer(ctx context.Context, name string, seen uint64, s *queueState) error {
	stream, err := b.js.Stream(ctx, name)
	if err != nil {
		return fmt.Errorf("stream %q: %w", name, err)
	}
	c, err := stream.Consumer(ctx, name)
	if err != nil {
		return fmt.Errorf("consumer of stream %q: %w", name, err)
	}
	last := stream.CachedInfo().State.LastSeq
	if last > seen {
		s.Unseen = int(last - seen) //nolint:gosec // a demo's
	}
	info := c.CachedInfo()
	*s.Consumers = info.NumWaiting
	s.Stats.Deliver = int(info.Delivered.Consumer) //nolint:gosec // a demo's
	if s.Ready != nil && s.Unacked != nil {
		s.Stats.Ack = max(0, s.Stats.Publish-*s.Ready-*s.Unacked)
	}
	return nil
}

func count(c broker.Count) *int {
	if !c.Known {
		return nil
	}
	n := int(c.N)
	return &n
}

func (b *natsBackend) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var errs []error
	if b.admin != nil {
		errs = append(errs, b.admin.Close(ctx))
	}
	if b.conn != nil {
		b.conn.Close()
	}
	if b.tap != nil {
		b.tap.close()
	}
	if b.forward != nil {
		errs = append(errs, b.forward.close())
	}
	if b.server != nil {
		errs = append(errs, b.server.Stop(ctx))
	}
	return errors.Join(errs...)
}
