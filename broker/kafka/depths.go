package kafka

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// reader says who reads what Depths is asked for.
type reader struct {
	// topics that count as one: the main topic, and its source where that is another one.
	topics []string
	group  string
	delay  time.Duration // of a hold topic
	held   bool
	// guessed: the name is all that is known.
	guessed bool
}

// learn remembers who reads the topics of a declaration.
func (a *admin) learn(p plan) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, h := range p.holds {
		a.readers[h.name] = reader{topics: []string{h.name}, group: p.group, delay: h.delay, held: true}
	}
	a.readers[p.main] = reader{topics: slices.Compact([]string{p.main, p.source}), group: p.group}
	if p.dead != "" {
		a.readers[p.dead] = reader{topics: []string{p.dead}, group: p.deadGroup}
	}
}

// reader of a name. One that was not declared over this connection is taken for what it looks like.
func (a *admin) reader(name string) reader {
	a.mu.Lock()
	defer a.mu.Unlock()
	if r, ok := a.readers[name]; ok {
		return r
	}
	if queue, delay, ok := topology.ParseHoldName(name); ok {
		return reader{topics: []string{name}, group: queue, delay: delay, held: true, guessed: true}
	}
	return reader{topics: []string{name}, group: name, guessed: true}
}

// ends are a partition's first and last offsets, and of a hold topic the first one that is not due.
type ends struct{ start, end, due int64 }

// counted is everything that depths are computed from.
type counted struct {
	topics    map[string]map[int32]ends
	missing   map[string]bool
	committed map[string]kadm.OffsetResponses // by group
	members   map[string]broker.Count         // by group
}

// Depths computes what is left from the positions of groups and the ends of topics. Positions are read first: what comes
// in or is handled meanwhile makes a count too high rather than too low. A partition in which nothing was committed counts from
// its first record on (keda#7936), and only up to the first open transaction, which nobody can read past.
func (a *admin) Depths(ctx context.Context, names []string) ([]broker.Depth, error) {
	readers := make([]reader, len(names))
	for i, n := range names {
		readers[i] = a.reader(n)
	}
	c, err := a.count(ctx, readers)
	if err != nil {
		return nil, fmt.Errorf("count messages: %w", mapError(err))
	}
	out := make([]broker.Depth, len(names))
	for i, n := range names {
		out[i] = c.depth(n, readers[i])
	}
	return out, nil
}

func (a *admin) count(ctx context.Context, readers []reader) (counted, error) {
	c := counted{topics: map[string]map[int32]ends{}, missing: map[string]bool{}, committed: map[string]kadm.OffsetResponses{}, members: map[string]broker.Count{}}
	groups, topics, delays := map[string]bool{}, map[string]bool{}, map[time.Duration]map[string]bool{}
	for _, r := range readers {
		groups[r.group] = true
		for _, t := range r.topics {
			topics[t] = true
		}
		if r.held {
			if delays[r.delay] == nil {
				delays[r.delay] = map[string]bool{}
			}
			delays[r.delay][r.topics[0]] = true
		}
	}
	if len(topics) == 0 {
		return c, nil
	}
	names := slices.Sorted(maps.Keys(groups))
	for group, resp := range a.adm.FetchManyOffsets(ctx, names...) {
		switch err := resp.Err; {
		case err == nil, errors.Is(err, kerr.GroupIDNotFound):
			c.committed[group] = resp.Fetched
		case errors.Is(err, kerr.GroupAuthorizationFailed):
			a.dialer.logger.Warn("counting messages of one group", "group", group, "error", right{"Describe", "group", group}.on(err))
		default:
			return c, err
		}
	}
	if err := a.countMembers(ctx, names, c.members); err != nil {
		return c, err
	}
	now := time.Now()
	return c, a.readEnds(ctx, slices.Sorted(maps.Keys(topics)), delays, now, c)
}

// countMembers says how many consumers a group has. One that may not be seen is unknown.
func (a *admin) countMembers(ctx context.Context, groups []string, into map[string]broker.Count) error {
	req := kmsg.NewPtrDescribeGroupsRequest()
	req.Groups = groups
	var failed error
	for _, shard := range a.client.RequestSharded(ctx, req) {
		resp, ok := shard.Resp.(*kmsg.DescribeGroupsResponse)
		if shard.Err != nil || !ok {
			failed = shard.Err // of the coordinator of some groups; those of others are known
			continue
		}
		for _, g := range resp.Groups {
			switch err := kerr.ErrorForCode(g.ErrorCode); {
			case err == nil:
				into[g.Group] = broker.Known(int64(len(g.Members)))
			case errors.Is(err, kerr.GroupIDNotFound): // there is none, or it is one of another protocol
				into[g.Group] = broker.Known(0)
				if n, err := a.adm.DescribeConsumerGroups(ctx, g.Group); err == nil && n[g.Group].Err == nil {
					into[g.Group] = broker.Known(int64(len(n[g.Group].Members)))
				}
			}
		}
	}
	if errors.Is(failed, kerr.GroupAuthorizationFailed) {
		return nil
	}
	return failed
}

func (a *admin) readEnds(ctx context.Context, topics []string, delays map[time.Duration]map[string]bool, now time.Time, c counted) error {
	all, err := a.topics(ctx, topics)
	if err != nil {
		return err
	}
	var there []string
	for _, t := range topics {
		switch err := kerr.ErrorForCode(all[t].ErrorCode); {
		case errors.Is(err, kerr.UnknownTopicOrPartition):
			c.missing[t] = true
		case err != nil:
			a.dialer.logger.Warn("counting messages of one topic", "topic", t, "error", right{"Describe", "topic", t}.on(err))
		default:
			there = append(there, t)
		}
	}
	if len(there) == 0 {
		return nil
	}
	starts, err := a.adm.ListStartOffsets(ctx, there...)
	if err != nil && len(starts) == 0 {
		return err
	}
	last, err := a.adm.ListCommittedOffsets(ctx, there...)
	if err != nil && len(last) == 0 {
		return err
	}
	due := map[string]map[int32]kadm.ListedOffset{}
	for delay, held := range delays {
		held := slices.DeleteFunc(slices.Sorted(maps.Keys(held)), func(t string) bool { return !slices.Contains(there, t) })
		if len(held) == 0 {
			continue
		}
		// A broker finds the first record that is not older: all before it are due.
		listed, err := a.adm.ListOffsetsAfterMilli(ctx, now.Add(-delay).UnixMilli(), held...)
		if err != nil && len(listed) == 0 {
			return err
		}
		for t, ps := range listed {
			due[t] = ps
		}
	}
	for _, t := range there {
		if ps, ok := partitions(all[t].Partitions, starts[t], last[t], due[t]); ok {
			c.topics[t] = ps
		}
	}
	return nil
}

// partitions puts together what was listed of a topic; false: something of it is not known.
func partitions(all []kmsg.MetadataResponseTopicPartition, start, end, due map[int32]kadm.ListedOffset) (map[int32]ends, bool) {
	out := make(map[int32]ends, len(all))
	for _, detail := range all {
		p := detail.Partition
		s, ok1 := start[p]
		e, ok2 := end[p]
		if !ok1 || !ok2 || s.Err != nil || e.Err != nil || s.Offset < 0 || e.Offset < 0 {
			return nil, false
		}
		x := ends{start: s.Offset, end: e.Offset, due: -1}
		if due != nil {
			d, ok := due[p]
			if !ok || d.Err != nil {
				return nil, false
			}
			x.due = d.Offset
			if x.due < 0 || x.due > x.end { // nothing is younger
				x.due = x.end
			}
		}
		out[p] = x
	}
	return out, true
}

// depth is how full one of the topics is. What is not known of any partition is not known of the whole.
func (c counted) depth(name string, r reader) broker.Depth {
	d := broker.Depth{Queue: name, Consumers: c.members[r.group], Stuck: broker.Known(0)}
	var all left
	there := slices.DeleteFunc(slices.Clone(r.topics), func(t string) bool { return c.missing[t] })
	if len(there) == 0 {
		return broker.Depth{Queue: name, Missing: true}
	}
	for _, t := range there {
		l, ok := c.left(t, r)
		if !ok {
			return d
		}
		all.ready, all.inFlight, all.due = all.ready+l.ready, all.inFlight+l.inFlight, all.due+l.due
	}
	d.Ready, d.InFlight = broker.Known(all.ready), broker.Known(all.inFlight)
	if r.held {
		d.Due = broker.Known(all.due)
	}
	return d
}

// left is what is not handled of a topic.
type left struct{ ready, inFlight, due int64 }

// left counts one topic; false: something of it is not known.
func (c counted) left(topic string, r reader) (left, bool) {
	var out left
	parts, ok := c.topics[topic]
	commits, asked := c.committed[r.group]
	if !ok || !asked {
		return out, false
	}
	found := commits[topic]
	if r.guessed && !committedAny(found) {
		// Another group may read it: only that there is nothing can be known.
		for _, e := range parts {
			if e.end > e.start {
				return out, false
			}
		}
	}
	for p, e := range parts {
		pos := position{next: e.start, seen: e.start}
		if at, ok := found[p]; ok {
			if at.Err != nil {
				return out, false
			}
			if at.At >= 0 {
				pos = parsePosition(at.At, at.Metadata)
			}
		}
		if c.members[r.group] == broker.Known(0) {
			pos.inFlight = 0 // whoever had them is gone
		}
		ready, inFlight := pos.backlog(e.start, e.end)
		out.ready, out.inFlight = out.ready+ready, out.inFlight+inFlight
		if e.due >= 0 {
			ready, _ := pos.backlog(e.start, e.due)
			out.due += ready
		}
	}
	return out, true
}

func committedAny(ps map[int32]kadm.OffsetResponse) bool {
	for _, p := range ps {
		if p.Err == nil && p.At >= 0 {
			return true
		}
	}
	return false
}
