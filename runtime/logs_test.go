package runtime_test

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/broker/memory"
	"github.com/shove-dev/shove/runtime"
	"github.com/shove-dev/shove/runtime/config"
)

// logBuffer is a log that tests read while it is written.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

// levels maps each message that was logged to its level.
func (b *logBuffer) levels(t *testing.T) map[string]string {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	all := map[string]string{}
	for line := range strings.Lines(b.buf.String()) {
		var entry struct{ Level, Msg string }
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			t.Fatal(err)
		}
		all[entry.Msg] = entry.Level
	}
	return all
}

// TestP_Logs runs a message into every end that is logged, with a payload that must not be.
func TestP_Logs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const secret = "s3cr3t"
		f := newFixture(t, func(c *config.RuntimeConfig) {
			c.Consumers[0].Options = config.Options{MaxRetries: new(uint32(1)), MaxMessageSize: new(int64(100)), HandlerTimeout: new(config.Duration(time.Second))}
		})
		log := &logBuffer{}
		h := runtime.HandlerFunc[map[string]string](func(ctx context.Context, m map[string]string, _ *runtime.Metadata) runtime.Outcome {
			switch m["do"] {
			case "time out":
				<-ctx.Done()
			case "panic":
				panic("a bug")
			case "reject":
				return runtime.Reject.Because("no")
			case "retry":
				return runtime.Retry.Because("not now")
			}
			return runtime.Ack
		})
		stop := f.run(runtime.Handle("orders", h), runtime.DrainDead("orders"),
			runtime.Logger(slog.New(slog.NewJSONHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))))
		for _, do := range []string{"ack", "time out", "panic", "reject", "retry"} {
			f.put(memory.Raw{Body: []byte(`{"do":"` + do + `","card":"` + secret + `"}`), Headers: header.Map{"authorization": secret}})
		}
		f.put(memory.Raw{Body: []byte(`{"card":"` + secret)}, memory.Raw{Body: []byte(strings.Repeat(secret, 100))}, memory.Raw{Body: []byte(`{"card":7}`), Headers: header.Map{header.RetryCount: secret}})
		time.Sleep(settleTime)
		drains(t, stop)

		log.mu.Lock()
		text := log.buf.String()
		log.mu.Unlock()
		for line := range strings.Lines(text) {
			if strings.Contains(line, secret) {
				t.Errorf("a payload or a header is in the log: %s", line)
			}
		}
		levels := log.levels(t)
		for msg, want := range map[string]string{
			"running": "INFO", "consuming": "INFO", "drained": "INFO", "decided": "DEBUG",
			"handler ran into its deadline": "WARN", "handler panicked": "ERROR", "message dead-lettered": "WARN", "dead letter": "WARN",
		} {
			if levels[msg] != want {
				t.Errorf("%q is logged at level %q, want %s", msg, levels[msg], want)
			}
		}
	})
}
