package rabbitmq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// Observe compares declarations with the server. With the management API one list of queues and one of bindings
// answers for all of them. Without it, or while it does not answer, each queue is looked for, and one that exists is
// declared again with the arguments it should have, which changes nothing and names the first one that differs.
func (a *admin) Observe(ctx context.Context, ds []broker.Declaration) ([]broker.Observation, error) {
	plans := make([]plan, len(ds))
	for i, d := range ds {
		p, err := newPlan(d)
		if err != nil {
			return nil, fmt.Errorf("observe %q: %w", d.Topology.Queue, err)
		}
		plans[i] = p
	}
	var degraded string
	if a.management != nil {
		out, err := a.observeListed(ctx, ds, plans)
		if err == nil {
			return out, nil
		}
		if ctx.Err() != nil {
			return nil, mapError(err)
		}
		degraded = "arguments, bindings and policies are unknown: " + err.Error()
		a.dialer.logger.Warn("observing without the management API", "error", err)
	}
	out := make([]broker.Observation, len(ds))
	for i := range ds {
		o, err := a.probe(ctx, ds[i], plans[i])
		switch {
		case errors.Is(err, broker.ErrUnavailable), errors.Is(err, broker.ErrClosed):
			return nil, fmt.Errorf("observe %q: %w", ds[i].Topology.Queue, err)
		case err != nil:
			// It is one declaration's trouble, such as a queue that the user may not touch. Declaring it will fail
			// with this error, and so tell whom it concerns; the others have their answer.
			if o, err = unseen(ds[i], err); err != nil {
				return nil, err
			}
		}
		if degraded != "" {
			o.Warnings = append(o.Warnings, degraded)
		}
		out[i] = o
	}
	return out, nil
}

func (a *admin) observeListed(ctx context.Context, ds []broker.Declaration, plans []plan) ([]broker.Observation, error) {
	var names, bound []string
	for i, p := range plans {
		if p.verify != "" {
			names = append(names, p.verify)
		}
		for _, q := range p.queues {
			names = append(names, q.name)
		}
		for _, r := range ds[i].Retired {
			names = append(names, physical(ds[i].Topology, r.Name))
		}
		if len(p.bindings)+len(p.unbind) > 0 {
			bound = append(bound, p.main)
		}
	}
	listed, err := a.management.queues(ctx, names)
	if err != nil {
		return nil, err
	}
	bindings := map[bindingOf]bool{}
	if len(bound) > 0 {
		if bindings, err = a.management.bindings(ctx, bound); err != nil {
			return nil, err
		}
	}
	out := make([]broker.Observation, len(ds))
	for i := range ds {
		out[i] = compare(ds[i], plans[i], listed, bindings)
	}
	return out, nil
}

// compare is what the lists say about one declaration.
func compare(d broker.Declaration, p plan, listed map[string]*listedQueue, bindings map[bindingOf]bool) broker.Observation {
	o := broker.Observation{DriftKnown: true}
	add := func(obj broker.Object, have *listedQueue, diffs []broker.Diff) {
		o.Objects = append(o.Objects, broker.ObservedObject{Object: obj, Missing: have == nil, Diffs: diffs})
		if have != nil && have.unreachable() {
			o.Warnings = append(o.Warnings, fmt.Sprintf("queue %q is %s: it has no leader, and takes and delivers nothing until its nodes are back", have.Name, have.State))
		}
	}
	if p.verify != "" {
		add(broker.Object{Kind: "queue", Name: p.verify, Role: topology.RoleMain}, listed[p.verify], nil)
	}
	for _, q := range p.queues {
		have := listed[q.name]
		add(q.object(), have, q.diff(have))
		o.Warnings = append(o.Warnings, q.policyWarnings(have)...)
	}
	for _, b := range p.bindings {
		o.Objects = append(o.Objects, broker.ObservedObject{Object: b.object(p.main), Missing: !bindings[bindingOf{b, p.main}]})
	}
	for _, b := range p.unbind {
		if bindings[bindingOf{b, p.main}] {
			gone := broker.Diff{Property: "existence", Want: "none", Have: "bound", Repairable: true}
			o.Objects = append(o.Objects, broker.ObservedObject{Object: b.object(p.main), Diffs: []broker.Diff{gone}})
		}
	}
	for _, r := range d.Retired {
		name := physical(d.Topology, r.Name)
		if have := listed[name]; have != nil { // one that is gone is done with
			add(broker.Object{Kind: "queue", Name: name, Role: topology.RoleRetired}, have, nil)
		}
	}
	return o
}

// checkedArguments are those that the server compares at a declaration. One that we leave out and that a queue has
// would refuse ours, and most of them lose messages: it is a difference. Others, which somebody added, are not.
var checkedArguments = []string{
	argTTL, argExchange, argRoutingKey, argStrategy, argOverflow, argLimit,
	"x-expires", "x-max-length", "x-max-length-bytes", "x-max-priority", "x-single-active-consumer",
}

// diff compares what we set with what a queue has. Nothing of it can be changed on an existing queue.
func (q queue) diff(have *listedQueue) []broker.Diff {
	if have == nil {
		return nil
	}
	var out []broker.Diff
	differs := func(property string, want, have any) {
		if w, h := argText(want), argText(have); w != h {
			out = append(out, broker.Diff{Property: property, Want: w, Have: h})
		}
	}
	differs("durable", true, have.Durable)
	differs("auto_delete", false, have.AutoDelete)
	differs("exclusive", false, have.Exclusive)
	kind := any(have.Type)
	if have.Type == "" {
		kind = have.Arguments[argType]
	}
	differs(argType, q.args[argType], kind)
	for _, name := range checkedArguments {
		differs(name, q.args[name], have.Arguments[name])
	}
	return out
}

// argText is an argument for comparing and for people. Integers come from JSON without their AMQP type.
func argText(v any) string {
	switch v := v.(type) {
	case nil:
		return "none"
	case string:
		return quoteEmpty(v)
	case json.Number:
		return v.String()
	case int64:
		return strconv.FormatInt(v, 10)
	default:
		return fmt.Sprint(v)
	}
}

// policyWarnings names what a policy does to a queue that endangers messages. A policy that is not known yet, which
// is so for some seconds after a queue was made, warns of nothing.
func (q queue) policyWarnings(have *listedQueue) []string {
	if have == nil || len(have.EffectivePolicy) == 0 {
		return nil
	}
	var out []string
	warn := func(key, why string) {
		out = append(out, fmt.Sprintf("policy %q sets %s to %s on queue %q: %s", policyName(have), key, argText(have.EffectivePolicy[key]), q.name, why))
	}
	number := func(key string) (int64, bool) {
		n, ok := have.EffectivePolicy[key].(json.Number)
		if !ok {
			return 0, false
		}
		i, err := n.Int64()
		return i, err == nil
	}
	if v, ok := have.EffectivePolicy["overflow"]; ok && v != rejectPublish && q.args[argStrategy] == atLeastOnce {
		warn("overflow", "it overrides the queue's reject-publish and thereby turns at-least-once off, so that messages are lost when their target is missing or full; take overflow out of the policy")
	}
	if ttl, ok := number("message-ttl"); ok {
		switch own, held := q.args[argTTL].(int64); {
		case held && ttl < own:
			warn("message-ttl", "the lower value wins, so that held messages come back before their delay is over; exclude the queue from the policy")
		case !held:
			warn("message-ttl", "messages that wait for longer leave the queue unprocessed; exclude the queue from the policy")
		}
	}
	for _, key := range []string{"max-length", "max-length-bytes"} {
		if _, ok := have.EffectivePolicy[key]; ok {
			warn(key, "a full queue refuses or drops messages; exclude the queue from the policy")
		}
	}
	if _, ok := have.EffectivePolicy["expires"]; ok {
		warn("expires", "a queue that is not used for that long is deleted with the messages in it; exclude the queue from the policy")
	}
	if n, ok := number("delivery-limit"); ok && n >= 0 && n < 100 && q.role != topology.RoleHold {
		warn("delivery-limit", "messages that come back more often, from restarts of consumers for example, leave the queue; exclude the queue from the policy")
	}
	return out
}

func policyName(q *listedQueue) string {
	names := slices.DeleteFunc([]string{q.Policy, q.OperatorPolicy}, func(s string) bool { return s == "" })
	if len(names) == 2 {
		return names[0] + " with operator policy " + names[1]
	}
	if len(names) == 1 {
		return names[0]
	}
	return "(unnamed)"
}

// unseen is an observation of a declaration that could not be looked at.
func unseen(d broker.Declaration, cause error) (broker.Observation, error) {
	objects, err := objects(d)
	if err != nil {
		return broker.Observation{}, err
	}
	o := broker.Observation{Warnings: []string{cause.Error()}}
	for _, obj := range objects {
		o.Objects = append(o.Objects, broker.ObservedObject{Object: obj, Missing: true})
	}
	return o, nil
}

// probe observes one declaration over AMQP alone.
func (a *admin) probe(ctx context.Context, d broker.Declaration, p plan) (broker.Observation, error) {
	var o broker.Observation
	exists := func(name string) (bool, error) {
		_, err := a.inspect(ctx, name)
		if errors.Is(err, broker.ErrNotFound) {
			return false, nil
		}
		return err == nil, err
	}
	if p.verify != "" {
		ok, err := exists(p.verify)
		if err != nil {
			return o, err
		}
		o.Objects = append(o.Objects, broker.ObservedObject{Object: broker.Object{Kind: "queue", Name: p.verify, Role: topology.RoleMain}, Missing: !ok})
	}
	for _, q := range p.queues {
		obj := broker.ObservedObject{Object: q.object()}
		ok, err := exists(q.name)
		if ok {
			err = a.declare(ctx, q)
		}
		var conflict *broker.ConflictError
		switch {
		case errors.As(err, &conflict):
			obj.Diffs = []broker.Diff{conflict.Diff}
		case err != nil:
			return o, fmt.Errorf("queue %q: %w", q.name, err)
		}
		obj.Missing = !ok && conflict == nil
		o.Objects = append(o.Objects, obj)
	}
	for _, b := range p.bindings { // cannot be read: declaring them again does no harm
		o.Objects = append(o.Objects, broker.ObservedObject{Object: b.object(p.main)})
	}
	for _, r := range d.Retired {
		name := physical(d.Topology, r.Name)
		ok, err := exists(name)
		if err != nil {
			return o, err
		}
		if ok {
			o.Objects = append(o.Objects, broker.ObservedObject{Object: broker.Object{Kind: "queue", Name: name, Role: topology.RoleRetired}})
		}
	}
	return o, nil
}
