package nats

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"sync"

	"github.com/shove-dev/shove/broker"
)

// admin declares and observes over one connection.
type admin struct {
	dialer *dialer
	link   *link

	mu sync.Mutex
	// sources remembers which stream a queue reads that is not its own, by the queue's physical name: the name alone
	// does not tell.
	sources map[string]string
}

var _ broker.Admin = (*admin)(nil)

// parallel is how many requests are on their way at once.
const parallel = 8

func openAdmin(ctx context.Context, cfg broker.Config, m mode) (*admin, error) {
	d, err := newDialer(cfg, m)
	if err != nil {
		return nil, err
	}
	a := &admin{dialer: d, link: newLink(d, "admin"), sources: map[string]string{}}
	c, err := a.link.get(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := c.jetStream(ctx); err != nil {
		_ = a.link.close(ctx)
		return nil, fmt.Errorf("connect to %s: %w", d.endpoint.name(), err)
	}
	return a, nil
}

// Server identifies the server by its cluster, or where it is alone by its name or address, and the account.
func (a *admin) Server(ctx context.Context) (broker.Server, error) {
	c, err := a.link.get(ctx)
	if err != nil {
		return broker.Server{}, err
	}
	where := c.ConnectedClusterName()
	if where == "" && c.ConnectedServerName() != c.ConnectedServerId() { // else the name is another one after a restart
		where = c.ConnectedServerName()
	}
	if where == "" {
		where = a.dialer.endpoint.servers[0]
	}
	account, err := c.account(ctx)
	if err != nil {
		return broker.Server{}, err
	}
	out := broker.Server{ID: url.PathEscape(where) + "/" + url.PathEscape(account), Version: c.ConnectedServerVersion()}
	switch {
	case !c.version.supported():
		out.Warnings = append(out.Warnings, fmt.Sprintf("NATS %s is older than 2.10, which this needs: upgrade the server", out.Version))
	case !a.schedules(c):
		out.Warnings = append(out.Warnings, fmt.Sprintf("NATS %s has no scheduled messages: held messages are moved by the consumers of their queue, and stay where they are while none runs; upgrade the server to 2.12 or later", out.Version))
	}
	return out, nil
}

// jetStream proves that the account has JetStream, and names its domain.
func (c *conn) jetStream(ctx context.Context) (domain string, err error) {
	var js struct {
		Domain string `json:"domain"`
	}
	err = c.api(ctx, "$JS.API.INFO", nil, &js)
	return js.Domain, err
}

// account names the account of the connection, with its JetStream domain where there is one.
func (c *conn) account(ctx context.Context) (string, error) {
	domain, err := c.jetStream(ctx)
	if err != nil {
		return "", err
	}
	var user struct {
		Data struct {
			Account string `json:"account"`
		} `json:"data"`
	}
	// Not every account may ask this, and then the domain has to do.
	if err := c.api(ctx, "$SYS.REQ.USER.INFO", nil, &user); err != nil && !errors.Is(err, broker.ErrUnauthorized) && !errors.Is(err, broker.ErrUnavailable) {
		return "", err
	}
	return strings.TrimSpace(domain + " " + user.Data.Account), nil
}

// schedules says whether held messages can be scheduled on the server.
func (a *admin) schedules(c *conn) bool { return c.version.schedules() && !a.dialer.mode.park }

// learn remembers what a declaration reads.
func (a *admin) learn(p plan) {
	main := physical(p.topology, p.topology.Queue)
	a.mu.Lock()
	defer a.mu.Unlock()
	if p.verify != "" && p.verify != main {
		a.sources[main] = p.verify
	} else {
		delete(a.sources, main)
	}
}

func (a *admin) sourceOf(name string) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.sources[name]
}

// Declare creates what is missing and mends what differs. Nothing is sent to the server where nothing differs: even an
// update without a change has lost messages that wait (nats-server#5526).
func (a *admin) Declare(ctx context.Context, d broker.Declaration) error {
	p, err := newPlan(d)
	if err != nil {
		return err
	}
	c, err := a.link.get(ctx)
	if err != nil {
		return err
	}
	if !c.version.supported() {
		return fmt.Errorf("declare %q: NATS %s is older than 2.10: %w", p.topology.Queue, c.ConnectedServerVersion(), broker.ErrUnsupported)
	}
	a.learn(p)
	if p.verify != "" {
		if _, err := c.stream(ctx, p.verify); err != nil {
			if errors.Is(err, broker.ErrNotFound) {
				return fmt.Errorf("stream %q, which the topology reads and does not own: %w: declare it where it belongs, or remove external or source", p.verify, err)
			}
			return fmt.Errorf("stream %q: %w", p.verify, err)
		}
	}
	scheduling := false
	for _, s := range p.streams {
		has, err := a.declareStream(ctx, c, s)
		if err != nil {
			return fmt.Errorf("declare stream %q: %w", s.name, err)
		}
		scheduling = scheduling || has
	}
	for _, k := range p.consumers {
		if err := declareConsumer(ctx, c, k); err != nil {
			return fmt.Errorf("declare consumer %q of stream %q: %w", k.name, k.stream, err)
		}
	}
	if len(p.holds) > 0 && !scheduling {
		if err := declareParking(ctx, c, p); err != nil {
			return fmt.Errorf("declare the consumer of parked messages of %q: %w", p.topology.Queue, err)
		}
	}
	return nil
}

// declareStream says whether the stream keeps scheduled messages. Only the configuration that the server returns tells:
// older ones accept the wish and ignore it.
func (a *admin) declareStream(ctx context.Context, c *conn, s stream) (scheduling bool, err error) {
	have, err := c.stream(ctx, s.name)
	if errors.Is(err, broker.ErrNotFound) {
		var made streamInfo
		err = c.api(ctx, apiStreamCreate+s.name, s.create(a.schedules(c)), &made)
		if err == nil {
			return made.Config.flag("allow_msg_schedules"), nil
		}
		if !hasCode(err, codeStreamInUse) { // somebody else was faster
			return false, s.overlap(ctx, c, err)
		}
		have, err = c.stream(ctx, s.name)
	}
	if err != nil {
		return false, err
	}
	for _, d := range s.diffs(have.Config, a.schedules(c)) {
		if !d.Repairable {
			return false, &broker.ConflictError{Object: fmt.Sprintf("stream %q", s.name), Diff: d}
		}
	}
	change := s.changes(have.Config, a.schedules(c))
	if len(change) == 0 {
		return have.Config.flag("allow_msg_schedules"), nil
	}
	cfg, err := have.Config.with(change)
	if err != nil {
		return false, err
	}
	var made streamInfo
	if err := c.api(ctx, apiStreamUpdate+s.name, cfg, &made); err != nil {
		return false, s.overlap(ctx, c, err)
	}
	return made.Config.flag("allow_msg_schedules"), nil
}

// overlap names the stream that has a subject already.
func (s stream) overlap(ctx context.Context, c *conn, err error) error {
	if !hasCode(err, codeSubjectsOverlap) {
		return err
	}
	for _, subject := range s.subjects {
		other, findErr := c.streamOf(ctx, subject)
		if findErr == nil && other != "" && other != s.name {
			return &broker.ConflictError{Object: fmt.Sprintf("subject %q", subject), Diff: broker.Diff{Property: "stream", Want: s.name, Have: other}}
		}
	}
	return fmt.Errorf("%w: %w", broker.ErrConflict, err)
}

func declareConsumer(ctx context.Context, c *conn, k consumer) error {
	have, err := c.consumer(ctx, k.stream, k.name)
	if errors.Is(err, broker.ErrNotFound) {
		cfg, err := k.create()
		if err != nil {
			return err
		}
		return c.setConsumer(ctx, k.stream, cfg)
	}
	if err != nil {
		return err
	}
	change := map[string]any{}
	for _, d := range k.diffs(have.Config) {
		if !d.Repairable {
			return &broker.ConflictError{Object: fmt.Sprintf("consumer %q of stream %q", k.name, k.stream), Diff: d}
		}
		change[d.Property] = k.mutable()[d.Property]
	}
	if len(change) == 0 {
		return nil
	}
	cfg, err := have.Config.with(change)
	if err != nil {
		return err
	}
	return c.setConsumer(ctx, k.stream, cfg)
}

// declareParking lets consumers move held messages that the server does not.
func declareParking(ctx context.Context, c *conn, p plan) error {
	main := physical(p.topology, p.topology.Queue)
	want, err := p.parking()
	if err != nil {
		return err
	}
	have, err := c.consumer(ctx, main, parkedConsumer)
	if errors.Is(err, broker.ErrNotFound) {
		return c.setConsumer(ctx, main, want)
	}
	if err != nil || !p.parkingDiffers(have.Config) {
		return err
	}
	all := have.Config.list("filter_subjects") // of tiers that left, too: they may hold messages
	for _, f := range want.list("filter_subjects") {
		if !slices.Contains(all, f) {
			all = append(all, f)
		}
	}
	cfg, err := have.Config.with(map[string]any{"filter_subjects": all, "filter_subject": ""})
	if err != nil {
		return err
	}
	return c.setConsumer(ctx, main, cfg)
}

func (p plan) parkingDiffers(have settings) bool {
	all := have.list("filter_subjects")
	if one := have.text("filter_subject"); one != "" {
		all = append(all, one)
	}
	for _, h := range p.holds {
		if !slices.Contains(all, parked(h.name)+"*") {
			return true
		}
	}
	return false
}

// Delete deletes streams with their consumers, the durable on another stream that a topology reads (source), and of a
// hold queue the messages and the subjects.
func (a *admin) Delete(ctx context.Context, names []string) ([]broker.Deleted, error) {
	c, err := a.link.get(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]broker.Deleted, 0, len(names))
	for _, name := range names {
		n, err := deleteOne(ctx, c, name)
		if err != nil {
			return out, fmt.Errorf("delete %q: %w", name, err)
		}
		out = append(out, broker.Deleted{Queue: name, Messages: broker.Known(n)})
	}
	return out, nil
}

func deleteOne(ctx context.Context, c *conn, name string) (int64, error) {
	if !isName(name) {
		return 0, nil
	}
	have, err := c.stream(ctx, name)
	if err == nil {
		if err := c.api(ctx, apiStreamDelete+name, nil, nil); err != nil && !errors.Is(err, broker.ErrNotFound) {
			return 0, err
		}
		return int64(have.State.Messages), leaveSource(ctx, c, have.Config, name)
	}
	if !errors.Is(err, broker.ErrNotFound) {
		return 0, err
	}
	return deleteHold(ctx, c, name)
}

// leaveSource deletes the durable of a stream that is gone on the stream that it read as well: it would keep messages
// there from being removed.
func leaveSource(ctx context.Context, c *conn, cfg settings, name string) error {
	var metadata map[string]string
	_ = json.Unmarshal(cfg["metadata"], &metadata) // absent on a stream without any
	source := metadata[sourceKey]
	if source == "" {
		return nil
	}
	if err := c.api(ctx, apiConsumerDelete+source+"."+name, nil, nil); err != nil {
		return ignoreMissing(fmt.Sprintf("delete consumer %q of stream %q", name, source), err)
	}
	return nil
}

// deleteHold takes the subjects away before the messages, so that none comes in between.
func deleteHold(ctx context.Context, c *conn, name string) (int64, error) {
	filter := holdFilter(name)
	owner, err := c.streamOf(ctx, filter)
	if err != nil || owner == "" {
		return 0, err
	}
	have, err := c.stream(ctx, owner)
	if err != nil {
		return 0, err
	}
	subjects := have.Config.list("subjects")
	i := slices.Index(subjects, filter)
	if i < 0 {
		return 0, nil // somebody else's stream that happens to match
	}
	cfg, err := have.Config.with(map[string]any{"subjects": slices.Delete(subjects, i, i+1)})
	if err != nil {
		return 0, err
	}
	if err := c.api(ctx, apiStreamUpdate+owner, cfg, nil); err != nil {
		return 0, err
	}
	var purged struct {
		Purged int64 `json:"purged"`
	}
	if err := c.api(ctx, apiStreamPurge+owner, map[string]any{"filter": filter}, &purged); err != nil {
		return 0, err
	}
	return purged.Purged, nil
}

// isName says whether a name can be one of a stream at all.
func isName(name string) bool { return name != "" && !strings.ContainsAny(name, ".*> \t\r\n/\\") }

func (a *admin) Close(ctx context.Context) error { return a.link.close(ctx) }
