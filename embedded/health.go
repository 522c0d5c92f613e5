package embedded

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// health serves probes.
type health struct {
	srv     *http.Server
	leaving atomic.Bool
	done    chan struct{}
}

// serveHealth answers /healthz with whether the server runs and JetStream with it, and /readyz with whether streams and
// consumers are recovered, too.
func serveHealth(addr string, n *server.Server) (*health, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen for probes: %w", err)
	}
	h := &health{done: make(chan struct{})}
	mux := http.NewServeMux()
	ask := func(query string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			r.URL.RawQuery = query
			n.HandleHealthz(w, r)
		}
	}
	mux.HandleFunc("GET /healthz", ask("js-server-only=true"))
	ready := ask("")
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		if h.leaving.Load() {
			http.Error(w, "the server ends", http.StatusServiceUnavailable)
			return
		}
		ready(w, r)
	})
	h.srv = &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go func() {
		defer close(h.done)
		_ = h.srv.Serve(l) // it ends with Close
	}()
	return h, nil
}

func (h *health) leave() { h.leaving.Store(true) }

func (h *health) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	err := h.srv.Shutdown(ctx)
	if err != nil {
		err = h.srv.Close()
	}
	<-h.done
	return err
}
