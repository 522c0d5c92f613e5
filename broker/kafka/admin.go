package kafka

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/shove-dev/shove/broker"
)

// admin declares and observes.
type admin struct {
	dialer *dialer
	client *kgo.Client
	adm    *kadm.Client

	mu sync.Mutex
	// readers says who reads a topic, by the name that Depths is asked for; learned from declarations.
	readers map[string]reader
}

var _ broker.Admin = (*admin)(nil)

const (
	// adminTimeout bounds what the controller of the cluster takes for one request.
	adminTimeout = 15 * time.Second
	// settleTimeout bounds the wait for brokers to know what the controller has carried out.
	settleTimeout = 10 * time.Second
)

func openAdmin(ctx context.Context, cfg broker.Config, m mode) (*admin, error) {
	d, err := newDialer(cfg, m)
	if err != nil {
		return nil, err
	}
	// Everything is asked for anew, not answered from what was heard a while ago.
	c, err := d.open("admin", kgo.MetadataMinAge(10*time.Millisecond))
	if err != nil {
		return nil, err
	}
	if err := d.ping(ctx, c); err != nil {
		c.Close()
		return nil, err
	}
	a := &admin{dialer: d, client: c, adm: kadm.NewClient(c), readers: map[string]reader{}}
	a.adm.SetTimeoutMillis(int32(adminTimeout.Milliseconds()))
	return a, nil
}

// Server identifies the cluster by the id that it was formatted with.
func (a *admin) Server(ctx context.Context) (broker.Server, error) {
	m, err := a.adm.BrokerMetadata(ctx)
	if err != nil {
		return broker.Server{}, fmt.Errorf("ask who the cluster is: %w", mapError(err))
	}
	out := broker.Server{ID: m.Cluster, Version: serverVersion(ctx, a.adm)}
	if out.ID == "" {
		out.ID = a.dialer.endpoint.address()
	}
	return out, nil
}

// Declare creates what is missing, and repairs settings and numbers of partitions that are too low.
func (a *admin) Declare(ctx context.Context, d broker.Declaration) error {
	p, err := newPlan(d)
	if err != nil {
		return err
	}
	a.learn(p)
	seen, err := a.look(ctx, p.names(), p.keys())
	if err != nil {
		return err
	}
	if p.verify != "" {
		if err := a.exists(p, seen[p.verify]); err != nil {
			return err
		}
	}
	for _, t := range p.topics {
		if have := seen[t.name]; have.err != nil {
			return fmt.Errorf("declare topic %q: %w", t.name, have.err)
		}
		for _, diff := range t.diff(seen[t.name]) {
			if !diff.Repairable {
				return &broker.ConflictError{Object: fmt.Sprintf("topic %q", t.name), Diff: diff}
			}
		}
	}
	if err := a.create(ctx, p.missing(seen)); err != nil {
		return err
	}
	for _, t := range p.topics {
		if have := seen[t.name]; !have.missing {
			if err := a.repair(ctx, t, have); err != nil {
				return fmt.Errorf("repair topic %q: %w", t.name, err)
			}
		}
	}
	return a.await(ctx, p)
}

// exists checks a topic of somebody else.
func (a *admin) exists(p plan, have topicState) error {
	what := "source"
	if p.topology.External {
		what = "external"
	}
	switch {
	case have.err != nil:
		return fmt.Errorf("%s topic %q: %w", what, p.verify, have.err)
	case have.missing:
		return fmt.Errorf("%s topic %q: %w on the cluster", what, p.verify, broker.ErrNotFound)
	}
	return nil
}

// missing are the topics to create. Hold topics get as many partitions as a main topic that is there already, so that
// as many consumers can work on them.
func (p *plan) missing(seen map[string]topicState) []topicSpec {
	var out []topicSpec
	for _, t := range p.topics {
		if !seen[t.name].missing {
			continue
		}
		if t.role != roleDead {
			t.partitions = max(t.partitions, seen[p.source].partitions)
		}
		out = append(out, t)
	}
	return out
}

// create makes topics in one request. One that somebody else made in the meantime is adopted.
func (a *admin) create(ctx context.Context, topics []topicSpec) error {
	if len(topics) == 0 {
		return nil
	}
	req := kmsg.NewPtrCreateTopicsRequest()
	req.TimeoutMillis = int32(adminTimeout.Milliseconds())
	for _, t := range topics {
		rt := kmsg.NewCreateTopicsRequestTopic()
		rt.Topic, rt.NumPartitions, rt.ReplicationFactor = t.name, t.partitions, t.replication
		if t.replication == 0 {
			rt.ReplicationFactor = -1
		}
		for _, s := range t.settings {
			c := kmsg.NewCreateTopicsRequestTopicConfig()
			c.Name, c.Value = s.key, &s.value
			rt.Configs = append(rt.Configs, c)
		}
		req.Topics = append(req.Topics, rt)
	}
	resp, err := req.RequestWith(ctx, a.client)
	if err != nil {
		return fmt.Errorf("create topics: %w", mapError(err))
	}
	for _, t := range resp.Topics {
		err := answer(t.ErrorCode, t.ErrorMessage)
		if errors.Is(err, kerr.TopicAlreadyExists) {
			continue
		}
		if err != nil {
			return fmt.Errorf("create topic %q: %w", t.Topic, right{"Create", "topic", t.Topic}.on(err))
		}
	}
	return nil
}

// repair brings a topic in line with what is asked for.
func (a *admin) repair(ctx context.Context, t topicSpec, have topicState) error {
	if t.grows && have.partitions < t.partitions {
		resp, err := a.adm.UpdatePartitions(ctx, int(t.partitions), t.name)
		if err != nil {
			return fmt.Errorf("grow to %d partitions: %w", t.partitions, right{"Alter", "topic", t.name}.on(err))
		}
		if r, err := resp.On(t.name, nil); err != nil || r.Err != nil {
			err = reply(errors.Join(err, r.Err), r.ErrMessage)
			return fmt.Errorf("grow to %d partitions: %w", t.partitions, right{"Alter", "topic", t.name}.on(err))
		}
	}
	var changes []kadm.AlterConfig
	for _, s := range t.settings {
		if !have.known || s.met(have.config[s.key]) {
			continue
		}
		changes = append(changes, kadm.AlterConfig{Op: kadm.SetConfig, Name: s.key, Value: &s.value})
	}
	if len(changes) == 0 {
		return nil
	}
	resp, err := a.adm.AlterTopicConfigs(ctx, changes, t.name)
	if err != nil {
		return fmt.Errorf("set %s: %w", changes[0].Name, right{"AlterConfigs", "topic", t.name}.on(err))
	}
	if r, err := resp.On(t.name, nil); err != nil || r.Err != nil {
		err = reply(errors.Join(err, r.Err), r.ErrMessage)
		return fmt.Errorf("set %s: %w", changes[0].Name, right{"AlterConfigs", "topic", t.name}.on(err))
	}
	return nil
}

// reply adds what a broker said to its code.
func reply(err error, text string) error {
	if e, ok := errors.AsType[*kerr.Error](err); ok && text != "" {
		return &replyError{e, text}
	}
	return err
}

// await waits until brokers know what the controller has carried out, which it does not wait for: the topics, a leader of
// each partition, their settings. What does not come in time is not an error: who uses it waits too.
func (a *admin) await(ctx context.Context, p plan) error {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	return poll(ctx, func() bool {
		seen, err := a.look(ctx, p.names(), p.keys())
		return err == nil && !slices.ContainsFunc(p.topics, func(t topicSpec) bool {
			have := seen[t.name]
			return have.missing || have.err != nil || !have.led || len(t.diff(have)) > 0
		})
	})
}

// poll asks until the answer is yes. At the end of the time it returns nil; the caller's own end is an error.
func poll(ctx context.Context, done func() bool) error {
	for pause := 5 * time.Millisecond; !done(); pause = min(pause*2, 200*time.Millisecond) {
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return nil
			}
			return fmt.Errorf("wait for topics: %w: %w", broker.ErrUnavailable, ctx.Err())
		case <-time.After(pause):
		}
	}
	return nil
}

// Delete deletes topics with what is in them. The number of messages is what was not handled yet.
func (a *admin) Delete(ctx context.Context, names []string) ([]broker.Deleted, error) {
	if len(names) == 0 {
		return nil, nil
	}
	depths, err := a.Depths(ctx, names)
	if err != nil {
		return nil, err
	}
	resp, err := a.adm.DeleteTopics(ctx, slices.Compact(slices.Sorted(slices.Values(names)))...) // a name given twice is refused
	if err != nil && len(resp) == 0 {
		return nil, fmt.Errorf("delete topics: %w", right{"Delete", "topic", names[0]}.on(err))
	}
	var out []broker.Deleted
	var errs []error
	for i, name := range names {
		r := resp[name]
		switch {
		case errors.Is(r.Err, kerr.UnknownTopicOrPartition):
			out = append(out, broker.Deleted{Queue: name, Messages: broker.Known(0)})
		case r.Err != nil:
			errs = append(errs, fmt.Errorf("delete topic %q: %w", name, right{"Delete", "topic", name}.on(reply(r.Err, r.ErrMessage))))
		default:
			out = append(out, broker.Deleted{Queue: name, Messages: sum(depths[i].Ready, depths[i].InFlight)})
		}
	}
	if err := errors.Join(errs...); err != nil {
		return out, err
	}
	return out, a.awaitGone(ctx, names)
}

func (a *admin) awaitGone(ctx context.Context, names []string) error {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	return poll(ctx, func() bool {
		all, err := a.topics(ctx, names)
		return err == nil && !slices.ContainsFunc(names, func(n string) bool { return all[n].ErrorCode != kerr.UnknownTopicOrPartition.Code })
	})
}

func sum(a, b broker.Count) broker.Count {
	if !a.Known || !b.Known {
		return broker.Count{}
	}
	return broker.Known(a.N + b.N)
}

func (a *admin) Close(context.Context) error {
	a.client.Close()
	return nil
}
