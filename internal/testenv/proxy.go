package testenv

import (
	"bytes"
	"context"
	"encoding/json"
	"testing"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/rs/zerolog"

	"github.com/shove-dev/shove/internal/testenv/freeport"
)

// FaultProxy stands between a client and a server on loopback and breaks the connection on demand. Its methods may
// be called from any goroutine, one at a time.
type FaultProxy struct {
	tb    testing.TB
	proxy *toxiproxy.Proxy
	addr  string
}

// Proxy starts a proxy to upstream (host:port) on a free loopback port. It ends with the test.
func Proxy(tb testing.TB, upstream string) *FaultProxy {
	tb.Helper()
	quiet := zerolog.Nop()
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), quiet)
	p := toxiproxy.NewProxy(server, tb.Name(), "127.0.0.1:0", upstream)
	if err := p.Start(); err != nil {
		tb.Fatalf("starting a fault proxy to %q: %v", upstream, err)
	}
	tb.Cleanup(p.Stop)
	return &FaultProxy{tb: tb, proxy: p, addr: p.Listen}
}

// Addr is the address (host:port) that clients connect to. It stays the same over [FaultProxy.Cut].
func (p *FaultProxy) Addr() string { return p.addr }

// URL replaces host and port of rawURL by the proxy's.
func (p *FaultProxy) URL(rawURL string) string {
	p.tb.Helper()
	return withHost(p.tb, rawURL, p.addr)
}

// Cut closes every open connection and refuses new ones until [FaultProxy.Restore].
func (p *FaultProxy) Cut() { p.proxy.Stop() }

// Restore accepts connections again after [FaultProxy.Cut], and takes away latency and freeze.
func (p *FaultProxy) Restore() {
	p.tb.Helper()
	p.proxy.Toxics.ResetToxics(context.Background())
	if p.proxy.Enabled {
		return
	}
	// The port was free a moment ago, but the kernel may hold it for a little longer.
	if err := Poll(5*time.Second, p.proxy.Start); err != nil {
		p.tb.Errorf("restoring the fault proxy on %q: %v", p.addr, err)
	}
}

// Flap cuts every open connection once; new ones are accepted at once.
func (p *FaultProxy) Flap() {
	p.tb.Helper()
	p.Cut()
	p.Restore()
}

// Latency delays what the server sends by d from now on, until [FaultProxy.Restore].
func (p *FaultProxy) Latency(d time.Duration) {
	p.tb.Helper()
	p.toxic("latency", "downstream", map[string]any{"latency": d.Milliseconds()})
}

// Freeze lets no byte through in either direction while the connections stay open, as a broken network does that
// drops packets silently. It lasts until [FaultProxy.Restore].
func (p *FaultProxy) Freeze() {
	p.tb.Helper()
	p.toxic("timeout", "downstream", map[string]any{"timeout": 0})
	p.toxic("timeout", "upstream", map[string]any{"timeout": 0})
}

// LimitData closes a connection after the server has sent n more bytes on it, until [FaultProxy.Restore].
func (p *FaultProxy) LimitData(n int64) {
	p.tb.Helper()
	p.toxic("limit_data", "downstream", map[string]any{"bytes": n})
}

func (p *FaultProxy) toxic(kind, stream string, attributes map[string]any) {
	p.tb.Helper()
	spec, err := json.Marshal(map[string]any{"type": kind, "stream": stream, "attributes": attributes})
	if err != nil {
		p.tb.Fatalf("describing the fault %q: %v", kind, err)
	}
	if _, err := p.proxy.Toxics.AddToxicJson(bytes.NewReader(spec)); err != nil {
		p.tb.Fatalf("adding the fault %q: %v", kind, err)
	}
}

// FreePort returns a loopback TCP port that was free a moment ago.
func FreePort(tb testing.TB) int {
	tb.Helper()
	ports, err := freeport.Pick(1)
	if err != nil {
		tb.Fatal(err)
	}
	return ports[0]
}
