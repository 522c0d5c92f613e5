package runtime

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Bounds of the endpoints: they serve a kubelet and a scraper, and nobody may tie them up.
const (
	httpHeaderTimeout = 5 * time.Second
	httpReadTimeout   = 10 * time.Second
	httpWriteTimeout  = 30 * time.Second
	httpIdleTimeout   = 60 * time.Second
	httpCloseTimeout  = 5 * time.Second
	httpMaxHeader     = 16 << 10
)

// noEndpoints is what serveHTTP returns where nothing is served.
const noEndpoints = "none"

// serveHTTP serves the endpoints until the context ends and returns their address.
func (r *Runtime) serveHTTP(ctx context.Context, wg *sync.WaitGroup) (string, error) {
	if r.httpAddr == "" {
		return noEndpoints, nil
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", r.httpAddr)
	if err != nil {
		return "", fmt.Errorf("serve the endpoints: %q: %w", r.httpAddr, err)
	}
	server := &http.Server{
		Handler: r.endpoints(), ReadHeaderTimeout: httpHeaderTimeout, ReadTimeout: httpReadTimeout, WriteTimeout: httpWriteTimeout,
		IdleTimeout: httpIdleTimeout, MaxHeaderBytes: httpMaxHeader, ErrorLog: slog.NewLogLogger(r.log.Handler(), slog.LevelDebug),
	}
	r.spawn(wg, func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			r.log.Error("the endpoints are not served any more", "error", err)
		}
	})
	r.spawn(wg, func() {
		<-ctx.Done()
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), httpCloseTimeout)
		defer cancel()
		if server.Shutdown(stop) != nil {
			_ = server.Close() // what is left hangs; nothing can be done with an error
		}
	})
	return listener.Addr().String(), nil
}

// endpoints are /metrics, /healthz, /readyz and /status.
func (r *Runtime) endpoints() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(r.gatherer(), promhttp.HandlerOpts{
		ErrorLog: slog.NewLogLogger(r.log.Handler(), slog.LevelWarn), MaxRequestsInFlight: 4, Timeout: httpWriteTimeout - time.Second,
	}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, "ok\n") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if reason := r.notReady(); reason != "" {
			answer(w, http.StatusServiceUnavailable, reason)
			return
		}
		answer(w, http.StatusOK, "ok\n")
	})
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		body, err := json.MarshalIndent(r.Status(), "", "  ")
		if err != nil {
			answer(w, http.StatusInternalServerError, "the status has no JSON form\n")
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		_, _ = w.Write(append(body, '\n')) // the client may be gone
	})
	return mux
}

// gatherer is where the runtime's metrics are read: its registerer, where that can be read.
func (r *Runtime) gatherer() prometheus.Gatherer {
	if g, ok := r.registerer.(prometheus.Gatherer); ok {
		return g
	}
	return prometheus.DefaultGatherer
}

// notReady says why the process is not ready; empty: it is.
func (r *Runtime) notReady() string {
	if r.Ready() {
		return ""
	}
	reason := ""
	for _, b := range r.unbound() {
		reason += fmt.Sprintf("topology %q has a handler, but the configuration has no consumer for it\n", b)
	}
	for _, c := range r.Status().Consumers {
		if !c.State.ready() {
			reason += fmt.Sprintf("consumer %q of topology %q is %s\n", c.Group, c.Topology, c.State)
		}
	}
	if reason == "" { // it changed between the two looks
		reason = "not ready\n"
	}
	return reason
}

// unbound lists the topologies that a handler is bound to and that no consumer of the configuration names.
func (r *Runtime) unbound() []string {
	cfg := r.currentConfig()
	var names []string
	for _, b := range r.bindings {
		if _, ok := r.groupOf(cfg, b.topology); !ok {
			names = append(names, b.topology)
		}
	}
	return names
}

func answer(w http.ResponseWriter, code int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(code)
	_, _ = io.WriteString(w, text) // the client may be gone
}
