package redis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shove-dev/shove/broker"
)

// nodes finds the server that has a key: the only one, or in a cluster the primary of the key's slot. The client
// library's own cluster client is not used, because it sends a command again when a connection breaks, which would
// store a message twice.
type nodes struct {
	dialer *dialer

	mu      sync.Mutex
	clients map[string]*goredis.Client // by address
	slots   []slotRange                // of a cluster; nil: to be read
	closed  bool
}

type slotRange struct {
	first, last int
	address     string
}

func newNodes(d *dialer) *nodes { return &nodes{dialer: d, clients: map[string]*goredis.Client{}} }

var errNodesClosed = fmt.Errorf("redis connections: %w", broker.ErrClosed)

func (n *nodes) client(address string) (*goredis.Client, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil, errNodesClosed
	}
	c := n.clients[address]
	if c == nil {
		c = n.dialer.client(address)
		n.clients[address] = c
	}
	return c, nil
}

// of returns the server that has a key.
func (n *nodes) of(ctx context.Context, key string) (*goredis.Client, error) {
	switch n.dialer.endpoint.Mode {
	case standalone:
		return n.client(n.dialer.endpoint.Addresses[0])
	case sentinel:
		return n.client(n.dialer.endpoint.MasterName) // the dialer looks the address up
	}
	slot := slotOf(key)
	for range 2 {
		n.mu.Lock()
		slots := n.slots
		n.mu.Unlock()
		for _, r := range slots {
			if slot >= r.first && slot <= r.last {
				return n.client(r.address)
			}
		}
		if err := n.readSlots(ctx); err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("no node of the cluster has the slot %d of key %q: %w", slot, key, broker.ErrUnavailable)
}

// primaries returns every server that takes writes.
func (n *nodes) primaries(ctx context.Context) ([]*goredis.Client, error) {
	if n.dialer.endpoint.Mode != cluster {
		c, err := n.of(ctx, "")
		return []*goredis.Client{c}, err
	}
	if err := n.readSlots(ctx); err != nil {
		return nil, err
	}
	n.mu.Lock()
	slots := n.slots
	n.mu.Unlock()
	var out []*goredis.Client
	seen := map[string]bool{}
	for _, r := range slots {
		if seen[r.address] {
			continue
		}
		seen[r.address] = true
		c, err := n.client(r.address)
		if err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	return out, nil
}

// readSlots asks the nodes in turn, those of the endpoint first, which of them has which slots.
func (n *nodes) readSlots(ctx context.Context) error {
	n.mu.Lock()
	asked := append([]string(nil), n.dialer.endpoint.Addresses...)
	for _, r := range n.slots {
		asked = append(asked, r.address)
	}
	n.mu.Unlock()
	var errs []error
	seen := map[string]bool{}
	for _, a := range asked {
		if seen[a] || ctx.Err() != nil {
			continue
		}
		seen[a] = true
		c, err := n.client(a)
		if err != nil {
			return err
		}
		ranges, err := c.ClusterSlots(ctx).Result() //nolint:staticcheck // of the same use as CLUSTER SHARDS, and users of existing installations have the right to it
		if err != nil {
			errs = append(errs, fmt.Errorf("slots of the cluster, from %s: %w", a, err))
			if begins(err, "ERR This instance has cluster support disabled") {
				return fmt.Errorf("%s is not a node of a cluster: set mode to Standalone: %w", a, broker.ErrUnsupported)
			}
			continue
		}
		n.mu.Lock()
		n.slots = slotRanges(ranges, a)
		n.mu.Unlock()
		return nil
	}
	return errors.Join(append(errs, ctx.Err())...)
}

func slotRanges(in []goredis.ClusterSlot, asked string) []slotRange {
	out := make([]slotRange, 0, len(in))
	for _, r := range in {
		if len(r.Nodes) > 0 { // the first is the primary
			out = append(out, slotRange{first: r.Start, last: r.End, address: withHost(r.Nodes[0].Addr, asked)})
		}
	}
	return out
}

// withHost puts the host of the node that was asked where a node does not know its own.
func withHost(address, asked string) string {
	host, port, err := net.SplitHostPort(address)
	if err != nil || host != "" && host != "?" {
		return address
	}
	known, _, err := net.SplitHostPort(asked)
	if err != nil {
		return address
	}
	return net.JoinHostPort(known, port)
}

// maxRedirects is how often commands follow a slot that has moved.
const maxRedirects = 5

// exec sends commands for the key's server in one go. Each command has its own error; the error returned is that of
// the first that failed. In a cluster those that were not carried out because the slot is elsewhere are sent there.
func (n *nodes) exec(ctx context.Context, key string, cmds ...goredis.Cmder) error {
	c, err := n.of(ctx, key)
	if err != nil {
		for _, cmd := range cmds {
			cmd.SetErr(err)
		}
		return err
	}
	asking := false
	pending := cmds
	for range maxRedirects {
		send(ctx, c, asking, pending)
		if n.dialer.endpoint.Mode != cluster {
			break
		}
		var moved []goredis.Cmder
		var to string
		for _, cmd := range pending {
			if address, ask, ok := redirect(cmd.Err()); ok {
				moved = append(moved, cmd)
				to, asking = address, ask
			}
		}
		if len(moved) == 0 {
			break
		}
		if !asking {
			n.forget()
		}
		if c, err = n.client(withHost(to, n.dialer.endpoint.Addresses[0])); err != nil {
			break
		}
		pending = moved
	}
	for _, cmd := range cmds {
		if err := cmd.Err(); err != nil && !errors.Is(err, goredis.Nil) {
			n.suspect(err)
			return err
		}
	}
	return nil
}

// suspect has the slots read anew after an error that a node gives which is gone, or is no primary any more.
func (n *nodes) suspect(err error) {
	if n.dialer.endpoint.Mode != cluster || err == nil {
		return
	}
	if _, replied := reply(err); !replied || begins(err, "CLUSTERDOWN", "READONLY", "MASTERDOWN") {
		n.forget()
	}
}

// send runs commands on one connection.
func send(ctx context.Context, c *goredis.Client, asking bool, cmds []goredis.Cmder) {
	if len(cmds) == 1 && !asking {
		_ = c.Process(ctx, cmds[0])
	} else {
		p := c.Pipeline()
		for _, cmd := range cmds {
			if asking { // it counts for the next command only
				_ = p.Process(ctx, goredis.NewCmd(ctx, "ASKING"))
			}
			_ = p.Process(ctx, cmd)
		}
		_, _ = p.Exec(ctx)
	}
	for _, cmd := range cmds {
		if raw, ok := cmd.(*goredis.RawCmd); ok && raw.Err() == nil {
			raw.SetErr(rawError(raw.Val()))
		}
	}
}

// rawError is the error that an answer is, which the library does not read.
func rawError(answer []byte) error {
	if len(answer) == 0 || answer[0] != '-' {
		return nil
	}
	return replyError(strings.TrimSpace(string(answer[1:])))
}

// redirect reads a MOVED or an ASK.
func redirect(err error) (address string, ask, ok bool) {
	text, isReply := reply(err)
	if !isReply {
		return "", false, false
	}
	words := strings.Fields(text)
	if len(words) < 3 || words[0] != "MOVED" && words[0] != "ASK" {
		return "", false, false
	}
	return words[2], words[0] == "ASK", true
}

// forget has the slots read anew, because some have moved.
func (n *nodes) forget() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.slots = nil
}

func (n *nodes) close() error {
	n.mu.Lock()
	clients := n.clients
	n.clients, n.closed = nil, true
	n.mu.Unlock()
	var errs []error
	for _, c := range clients {
		if err := c.Close(); err != nil && !errors.Is(err, goredis.ErrClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// slotOf is the hash slot of a key (https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec): the
// CRC16 of what is within the first braces, or of the whole key.
func slotOf(key string) int {
	if i := strings.IndexByte(key, '{'); i >= 0 {
		if j := strings.IndexByte(key[i+1:], '}'); j > 0 {
			key = key[i+1 : i+1+j]
		}
	}
	var crc uint16
	for i := range len(key) {
		crc ^= uint16(key[i]) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return int(crc) % 16384
}

// toInt reads an integer as commands (int64) and scripts that pass on texts give it.
func toInt(v any) int64 {
	switch v := v.(type) {
	case int64:
		return v
	case string:
		n, _ := strconv.ParseInt(v, 10, 64)
		return n
	}
	return 0
}
