package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// Observe compares declarations with the server, with one pipeline for each.
func (a *admin) Observe(ctx context.Context, ds []broker.Declaration) ([]broker.Observation, error) {
	out := make([]broker.Observation, len(ds))
	for i, d := range ds {
		p, err := newPlan(d)
		if err == nil {
			out[i], err = a.observe(ctx, d, &p)
		}
		if err != nil {
			return nil, fmt.Errorf("observe %q: %w", d.Topology.Queue, mapError(err))
		}
	}
	return out, nil
}

func (a *admin) observe(ctx context.Context, d broker.Declaration, p *plan) (broker.Observation, error) {
	o := broker.Observation{DriftKnown: true}
	registered, err := a.registry(ctx, p.registry)
	if err != nil {
		return o, err
	}
	add := func(obj broker.Object, missing bool, diffs ...broker.Diff) {
		o.Objects = append(o.Objects, broker.ObservedObject{Object: obj, Missing: missing, Diffs: diffs})
	}
	if p.verify != "" {
		if err := a.observeSource(ctx, p, &o); err != nil {
			return o, err
		}
	}
	for _, s := range p.streams {
		missing, diffs, err := a.look(ctx, s)
		if err != nil {
			return o, err
		}
		add(s.object(), missing, diffs...)
		if !missing && p.verify == "" || s.role == topology.RoleDeadLetter {
			o.Warnings = append(o.Warnings, a.warnings(ctx, s.key, s.group)...)
		}
	}
	for _, h := range p.holds {
		have, err := a.typeOf(ctx, h.key)
		if err != nil {
			return o, err
		}
		var diffs []broker.Diff
		if have != "none" && have != "zset" {
			diffs = append(diffs, broker.Diff{Property: "type", Want: "sorted set", Have: have})
		}
		_, known := registered[h.key]
		add(h.object(), !known && have != "zset" && len(diffs) == 0, diffs...)
	}
	for _, r := range d.Retired {
		key := physical(d.Topology, r.Name)
		have, err := a.typeOf(ctx, key)
		if err != nil {
			return o, err
		}
		if _, known := registered[key]; known || have == "zset" {
			add(broker.Object{Kind: "sorted set", Name: key, Role: topology.RoleRetired}, false)
		}
	}
	return o, nil
}

// observeSource looks at a stream that somebody else owns, and at our group there.
func (a *admin) observeSource(ctx context.Context, p *plan, o *broker.Observation) error {
	obj := p.verifyObject()
	source, err := a.nodes.resolve(ctx, p.verify)
	found := false
	if err == nil {
		obj.Name = source
		_, found, err = a.group(ctx, source, p.topology.Queue)
	}
	if err != nil && !errors.Is(err, broker.ErrNotFound) {
		return err
	}
	o.Objects = append(o.Objects, broker.ObservedObject{Object: obj, Missing: !found})
	if found {
		o.Warnings = append(o.Warnings, a.warnings(ctx, source, p.topology.Queue)...)
	}
	return nil
}

// look says how a stream of ours stands: without its group it is not there either.
func (a *admin) look(ctx context.Context, s stream) (missing bool, diffs []broker.Diff, err error) {
	have, err := a.typeOf(ctx, s.key)
	switch {
	case err != nil:
		return false, nil, err
	case have == "none":
		return true, nil, nil
	case have != "stream":
		return false, []broker.Diff{{Property: "type", Want: "stream", Have: have}}, nil
	}
	_, found, err := a.group(ctx, s.key, s.group)
	return !found, nil, err
}

// registry is what is declared beside streams.
func (a *admin) registry(ctx context.Context, key string) (map[string]string, error) {
	return a.hash(ctx, key)
}

func (a *admin) hash(ctx context.Context, key string) (map[string]string, error) {
	cmd := goredis.NewCmd(ctx, "HGETALL", key)
	if err := a.nodes.exec(ctx, key, cmd); err != nil {
		return nil, err
	}
	fields, err := cmd.Slice()
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for i := 0; i+1 < len(fields); i += 2 {
		k, _ := fields[i].(string)
		out[k], _ = fields[i+1].(string)
	}
	return out, nil
}

// groupInfo is what XINFO GROUPS says of a group.
type groupInfo struct {
	pending, consumers int64
	last               string
	lag                broker.Count
	others             int // further groups of the stream
}

// group finds a group of a stream; false: the stream or the group does not exist.
func (a *admin) group(ctx context.Context, key, name string) (groupInfo, bool, error) {
	cmd := goredis.NewCmd(ctx, "XINFO", "GROUPS", key)
	if err := a.nodes.exec(ctx, key, cmd); err != nil {
		if groupGone(err) {
			return groupInfo{}, false, nil
		}
		return groupInfo{}, false, err
	}
	rows, err := cmd.Slice()
	if err != nil {
		return groupInfo{}, false, err
	}
	var out groupInfo
	found := false
	for _, row := range rows {
		fields, _ := row.([]any)
		m := map[string]any{}
		for i := 0; i+1 < len(fields); i += 2 {
			k, _ := fields[i].(string)
			m[k] = fields[i+1]
		}
		if m["name"] != name {
			continue
		}
		found = true
		out.pending, out.consumers = toInt(m["pending"]), toInt(m["consumers"])
		out.last, _ = m["last-delivered-id"].(string)
		if n, ok := m["lag"].(int64); ok { // nil: the server does not know
			out.lag = broker.Known(n)
		}
	}
	out.others = len(rows) - 1
	return out, found, nil
}

// lostFor is how long lost messages are reported.
const lostFor = 24 * time.Hour

// warnings are findings about the consumers of a group (H10). An unreadable hash warns of nothing.
func (a *admin) warnings(ctx context.Context, key, group string) []string {
	consumers, err := a.hash(ctx, consumersKey(key, group))
	if err != nil {
		return nil
	}
	now, err := a.now(ctx, key)
	if err != nil {
		return nil
	}
	var out []string
	if w := deadlinesDiffer(consumers, now, key); w != "" {
		out = append(out, w)
	}
	if ms, err := strconv.ParseInt(consumers["#lost"], 10, 64); err == nil && now.Sub(time.UnixMilli(ms)) < lostFor {
		out = append(out, fmt.Sprintf("entries of stream %q were deleted or trimmed away within the last day before they were acknowledged: those messages are lost; look who runs XDEL or XTRIM, or adds with MAXLEN", key))
	}
	return out
}

func (a *admin) now(ctx context.Context, key string) (time.Time, error) {
	c, err := a.nodes.of(ctx, key)
	if err != nil {
		return time.Time{}, err
	}
	return c.Time(ctx).Result()
}

// consumer is what a consumer shows of itself.
type consumer struct {
	name    string
	timeout time.Duration
	seen    time.Time
}

// live are the consumers that were seen lately, with the shortest handler timeout first; none at all comes last.
func live(fields map[string]string, now time.Time) []consumer {
	var out []consumer
	for name, v := range fields {
		var timeout, idle, seen int64
		if strings.HasPrefix(name, "#") {
			continue
		}
		if _, err := fmt.Sscanf(v, "%d %d %d", &timeout, &idle, &seen); err != nil {
			continue
		}
		c := consumer{name: name, timeout: time.Duration(timeout) * time.Millisecond, seen: time.UnixMilli(seen)}
		if now.Sub(c.seen) <= silence {
			out = append(out, c)
		}
	}
	slices.SortFunc(out, func(a, b consumer) int {
		switch {
		case (a.timeout == 0) != (b.timeout == 0):
			if a.timeout == 0 {
				return 1
			}
			return -1
		case a.timeout != b.timeout:
			return int(a.timeout - b.timeout)
		}
		return strings.Compare(a.name, b.name)
	})
	return out
}

// deadlinesDiffer warns where handler timeouts of one group differ by more than a factor of two (H10). Consumers of
// ours look at each other's deadline before they take anything away; others go by their own.
func deadlinesDiffer(fields map[string]string, now time.Time, key string) string {
	cs := live(fields, now)
	if len(cs) < 2 {
		return ""
	}
	least, most := cs[0], cs[len(cs)-1]
	if most.timeout > 0 && most.timeout <= 2*least.timeout || most.timeout == least.timeout {
		return ""
	}
	longest := most.timeout.String()
	if most.timeout == 0 {
		longest = "none"
	}
	return fmt.Sprintf("handler timeouts of the consumers of stream %q differ by more than a factor of two (%s and %s): bring them closer, so that none takes away what another is still working on",
		key, least.timeout, longest)
}

// Depths counts messages. Ready are new entries and returned ones.
func (a *admin) Depths(ctx context.Context, names []string) ([]broker.Depth, error) {
	out := make([]broker.Depth, len(names))
	for i, name := range names {
		d, err := a.depth(ctx, name)
		if err != nil {
			return nil, fmt.Errorf("depth of %q: %w", name, mapError(err))
		}
		out[i] = d
	}
	return out, nil
}

func (a *admin) depth(ctx context.Context, name string) (broker.Depth, error) {
	d := broker.Depth{Queue: name, Stuck: broker.Known(0)}
	kind, err := a.typeOf(ctx, name)
	if err != nil {
		return d, err
	}
	registered, err := a.hash(ctx, tagOf(name)+queuesSuffix)
	if err != nil {
		return d, err
	}
	what, declared := registered[name]
	switch {
	case kind == "stream":
		err = a.streamDepth(ctx, name, queueOf(name), &d)
	case kind == "zset":
		card := goredis.NewCmd(ctx, "ZCARD", name)
		err = a.nodes.exec(ctx, name, card)
		n, _ := card.Int64()
		d.Ready, d.InFlight, d.Consumers = broker.Known(n), broker.Known(0), broker.Known(0)
	case kind == "none" && strings.HasPrefix(what, isHold):
		d.Ready, d.InFlight, d.Consumers = broker.Known(0), broker.Known(0), broker.Known(0)
	case kind == "none" && untagged(name) != "": // perhaps somebody else's, without a tag
		source, missing := a.nodes.resolve(ctx, name)
		if missing != nil {
			d.Missing = errors.Is(missing, broker.ErrNotFound)
			if !d.Missing {
				err = missing
			}
			break
		}
		err = a.streamDepth(ctx, source, queueOf(name), &d)
	default:
		d.Missing = true
	}
	if err == nil && declared && what == isReader && !d.Missing {
		err = a.addSource(ctx, name, &d)
	}
	return d, err
}

// addSource adds what a topology has still to read of the stream that it follows.
func (a *admin) addSource(ctx context.Context, name string, d *broker.Depth) error {
	source, err := a.nodes.resolve(ctx, tagOf(name))
	if err != nil {
		return err
	}
	var s broker.Depth
	if err := a.streamDepth(ctx, source, queueOf(name), &s); err != nil {
		return err
	}
	add := func(a, b broker.Count) broker.Count { return broker.Count{N: a.N + b.N, Known: a.Known && b.Known} }
	d.Ready, d.InFlight = add(d.Ready, s.Ready), add(d.InFlight, s.InFlight)
	return nil
}

func (a *admin) streamDepth(ctx context.Context, key, group string, d *broker.Depth) error {
	g, found, err := a.group(ctx, key, group)
	if err != nil {
		return err
	}
	length := goredis.NewCmd(ctx, "XLEN", key)
	back := goredis.NewCmd(ctx, "XINFO", "CONSUMERS", key, group)
	if !found { // nobody has read anything
		if err := a.nodes.exec(ctx, key, length); err != nil {
			return err
		}
		n, _ := length.Int64()
		d.Ready, d.InFlight, d.Consumers = broker.Known(n), broker.Known(0), broker.Known(0)
		return nil
	}
	if err := a.nodes.exec(ctx, key, length, back); err != nil {
		return err
	}
	waiting, readers := int64(0), int64(0)
	rows, _ := back.Slice()
	for _, row := range rows {
		fields, _ := row.([]any)
		m := map[string]any{}
		for i := 0; i+1 < len(fields); i += 2 {
			k, _ := fields[i].(string)
			m[k] = fields[i+1]
		}
		if m["name"] == returned {
			waiting = toInt(m["pending"])
		} else {
			readers++
		}
	}
	n, _ := length.Int64()
	unread, err := a.unread(ctx, key, g, n)
	if err != nil {
		return err
	}
	d.Ready = broker.Count{N: unread.N + waiting, Known: unread.Known}
	d.InFlight, d.Consumers = broker.Known(g.pending-waiting), broker.Known(readers)
	return nil
}

const (
	// countPage is how many entries one read counts, countPages how many reads there are at most.
	countPage  = 1000
	countPages = 20
)

// unread is how many entries a group has not read. The server's lag is nil when an unread entry was deleted or the group
// began in the middle of the stream, and 7.0 also counts deleted ones when the stream was empty in between; so a small
// one is counted, unless what is in the stream and not pending agrees with it. Without a lag, what is new is counted,
// else what is old; where both are many it is unknown, which is not zero.
func (a *admin) unread(ctx context.Context, key string, g groupInfo, length int64) (broker.Count, error) {
	switch {
	case length == 0:
		return broker.Known(0), nil
	case g.lag.Known && (g.lag.N == length-g.pending || g.lag.N >= countPage):
		return g.lag, nil
	}
	fresh, complete, err := a.countRange(ctx, key, "("+g.last, "+")
	if err != nil || complete {
		return broker.Count{N: fresh, Known: complete}, err
	}
	old, complete, err := a.countRange(ctx, key, "-", g.last)
	return broker.Count{N: max(fresh, length-old), Known: complete}, err
}

func (a *admin) countRange(ctx context.Context, key, from, to string) (n int64, complete bool, err error) {
	for range countPages {
		out, err := a.nodes.run(ctx, countScript, []string{key}, []any{from, to, countPage})
		if err != nil {
			return 0, false, err
		}
		page := toInt(out[0])
		n += page
		if page < countPage {
			return n, true, nil
		}
		last, _ := out[1].(string)
		from = "(" + last
	}
	return n, false, nil
}
