package testenv

import (
	"context"
	"crypto/rand"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/shove-dev/shove/internal/testenv/redisserver"
)

// RedisURLVar names a running Redis server that tests may use: redis://[user:password@]host:port.
const RedisURLVar = "SHOVE_TEST_REDIS_URL"

// RedisServer is a running server, shared with other tests unless it came from [StartRedis]. Use key names of your own.
type RedisServer struct {
	URL string
}

var sharedRedis = sync.OnceValues(func() (RedisServer, error) {
	if url := os.Getenv(RedisURLVar); url != "" {
		return RedisServer{URL: url}, nil
	}
	server, err := redisserver.Start(context.Background(), redisserver.Options{})
	if err != nil {
		return RedisServer{}, err
	}
	AtExit(server.Close)
	return RedisServer{URL: server.URL()}, nil
})

// Redis returns a server that all tests share: the one that the URL variable names, or one that is started once for
// this test binary. It calls [Skip] where there is none.
func Redis(tb testing.TB) RedisServer {
	tb.Helper()
	server, err := sharedRedis()
	redisFailed(tb, err)
	return server
}

// StartRedis starts a server for this test alone, which may be killed, stopped and started again. It takes about 50 ms.
// It calls [Skip] where no server can be started, even if the URL variable names one.
func StartRedis(tb testing.TB, opts redisserver.Options) *redisserver.Server {
	tb.Helper()
	server, err := redisserver.Start(context.Background(), opts)
	redisFailed(tb, err)
	tb.Cleanup(func() {
		if err := server.Close(); err != nil {
			tb.Errorf("closing a private Redis: %v", err)
		}
	})
	return server
}

func redisFailed(tb testing.TB, err error) {
	tb.Helper()
	switch {
	case errors.Is(err, redisserver.ErrNotAvailable):
		Skip(tb, err.Error())
	case err != nil:
		tb.Fatal(err)
	}
}

// Queue is a queue name that no other test uses.
func (s RedisServer) Queue(prefix string) string {
	return prefix + "." + strings.ToLower(rand.Text()[:8])
}

// Addr is the server's host:port.
func (s RedisServer) Addr(tb testing.TB) string {
	tb.Helper()
	return mustParse(tb, s.URL).Host
}
