package runtime

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/broker/memory"
	"github.com/shove-dev/shove/runtime/config"
)

// endpointFixture serves the endpoints of a runtime on a free port.
func endpointFixture(t *testing.T, opts ...Option) (r *Runtime, base string) {
	t.Helper()
	cfg := &config.RuntimeConfig{
		APIVersion: config.APIVersion, Kind: config.Kind, Generation: "g1",
		Brokers:    []config.Broker{{Name: "mem", Kind: "memory"}},
		Topologies: []config.Topology{{Name: "orders", Broker: "mem", Queue: "orders"}},
		Consumers:  []config.Consumer{{Group: "workers", Topology: "orders"}},
	}
	all := append([]Option{Drivers(memory.Driver(memory.New(memory.Options{}))), Config(cfg), HTTPAddr("127.0.0.1:0"), Registerer(prometheus.NewRegistry()),
		Logger(slog.New(slog.NewTextHandler(t.Output(), nil))),
		Handle("orders", HandlerFunc[[]byte](func(context.Context, []byte, *Metadata) Outcome { return Ack }))}, opts...)
	r, err := New(all...)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	addr, err := r.serveHTTP(ctx, &wg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cancel(); wg.Wait(); http.DefaultClient.CloseIdleConnections() })
	return r, "http://" + addr
}

func get(t *testing.T, method, url string) (code int, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func TestEndpoints(t *testing.T) {
	r, base := endpointFixture(t)
	r.metrics.Generation("g1")

	t.Run("healthz", func(t *testing.T) {
		if code, body := get(t, http.MethodGet, base+"/healthz"); code != http.StatusOK || body != "ok\n" {
			t.Errorf("got %d %q", code, body)
		}
	})
	t.Run("readyz before and after", func(t *testing.T) {
		code, body := get(t, http.MethodGet, base+"/readyz")
		if code != http.StatusServiceUnavailable || body != "consumer \"workers\" of topology \"orders\" is connecting\n" {
			t.Errorf("before: got %d %q", code, body)
		}
		r.consumers[0].state.set(StateConsuming, nil)
		if code, body := get(t, http.MethodGet, base+"/readyz"); code != http.StatusOK {
			t.Errorf("after: got %d %q", code, body)
		}
		r.consumers[0].state.set(StateDraining, nil)
		if code, _ := get(t, http.MethodGet, base+"/readyz"); code != http.StatusServiceUnavailable {
			t.Errorf("while draining: got %d", code)
		}
	})
	t.Run("status", func(t *testing.T) {
		r.consumers[0].state.set(StateReconnecting, errors.New("broker unavailable"))
		code, body := get(t, http.MethodGet, base+"/status")
		if code != http.StatusOK {
			t.Fatalf("got %d", code)
		}
		var s Status
		if err := json.Unmarshal([]byte(body), &s); err != nil {
			t.Fatal(err)
		}
		if s.Generation != "g1" || s.Version == "" || len(s.Consumers) != 1 {
			t.Fatalf("got %s", body)
		}
		c := s.Consumers[0]
		if c.Topology != "orders" || c.Group != "workers" || c.State != StateReconnecting || c.Reconnects != 1 || c.LastError != "broker unavailable" || c.Since.IsZero() {
			t.Errorf("got %s", body)
		}
	})
	t.Run("metrics", func(t *testing.T) {
		code, body := get(t, http.MethodGet, base+"/metrics")
		for _, want := range []string{`shove_config_info{generation="g1"} 1`, `shove_messages_consumed_total{consumer_group="workers",outcome="ack",topic="orders"} 0`} {
			if code != http.StatusOK || !strings.Contains(body, want) {
				t.Errorf("got %d, without %s", code, want)
			}
		}
	})
	t.Run("only reading", func(t *testing.T) {
		for _, path := range []string{"/healthz", "/readyz", "/status", "/metrics"} {
			if code, _ := get(t, http.MethodPost, base+path); code != http.StatusMethodNotAllowed {
				t.Errorf("POST %s: got %d", path, code)
			}
		}
		if code, _ := get(t, http.MethodGet, base+"/debug/pprof/"); code != http.StatusNotFound {
			t.Errorf("an endpoint that is not there answers %d", code)
		}
	})
}

func TestReadyNeedsAConsumerForEveryHandler(t *testing.T) {
	r, base := endpointFixture(t, Handle("nobody", HandlerFunc[[]byte](func(context.Context, []byte, *Metadata) Outcome { return Ack })))
	r.consumers[0].state.set(StateConsuming, nil)
	code, body := get(t, http.MethodGet, base+"/readyz")
	if want := "topology \"nobody\" has a handler, but the configuration has no consumer for it\n"; code != http.StatusServiceUnavailable || body != want {
		t.Errorf("got %d %q, want %q", code, body, want)
	}
}

func TestEndpointsOff(t *testing.T) {
	r := &Runtime{}
	addr, err := r.serveHTTP(t.Context(), new(sync.WaitGroup))
	if addr != noEndpoints || err != nil {
		t.Errorf("got %q, %v", addr, err)
	}
}

func TestEndpointsAddressInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	r := &Runtime{httpAddr: l.Addr().String()}
	if _, err := r.serveHTTP(t.Context(), new(sync.WaitGroup)); err == nil || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("got %v, want an error that names the address", err)
	}
}
