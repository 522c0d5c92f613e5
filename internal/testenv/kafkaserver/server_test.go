package kafkaserver_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/kafkaserver"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// available ends the test where a broker cannot be had.
func available(t *testing.T, err error) {
	t.Helper()
	switch {
	case err == nil:
	case errors.Is(err, kafkaserver.ErrNotAvailable):
		testenv.Skip(t, err.Error())
	default:
		t.Fatal(err)
	}
}

// TestJars also writes jars.sha256 anew, with UPDATE=1.
func TestJars(t *testing.T) {
	if os.Getenv("UPDATE") == "1" {
		dir := t.TempDir()
		if err := kafkaserver.Download(t.Context(), dir); err != nil {
			t.Fatal(err)
		}
		found, err := kafkaserver.Checksums(dir)
		if err != nil {
			t.Fatal(err)
		}
		var text []string
		for name, sum := range found {
			text = append(text, fmt.Sprintf("%s  %s\n", sum, name))
		}
		slices.SortFunc(text, func(a, b string) int { return strings.Compare(a[66:], b[66:]) })
		if err := os.WriteFile("jars.sha256", []byte(strings.Join(text, "")), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	dir, err := kafkaserver.Jars(t.Context())
	available(t, err)
	if os.Getenv(kafkaserver.JarsVar) != "" {
		return // they are somebody's own
	}
	if err := kafkaserver.Verify(dir); err != nil {
		t.Fatal(err)
	}
}

func TestJavaVersion(t *testing.T) {
	for text, want := range map[string]int{
		`openjdk version "17.0.15" 2025-04-15`: 17, `java version "1.8.0_402"`: 8, `openjdk version "21" 2023-09-19`: 21, "nothing": 0,
	} {
		if got := kafkaserver.JavaVersion(text); got != want {
			t.Errorf("javaVersion(%q) = %d, want %d", text, got, want)
		}
	}
}

// TestLifecycle starts a broker with all its listeners, and ends it in every way.
func TestLifecycle(t *testing.T) {
	started := time.Now()
	s, err := kafkaserver.Start(t.Context(), kafkaserver.Options{Secure: true})
	available(t, err)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Logf("started in %v", time.Since(started).Round(10*time.Millisecond))
	for _, l := range []string{kafkaserver.Plain, kafkaserver.SASL, kafkaserver.TLS, kafkaserver.MTLS, kafkaserver.SASLTLS} {
		c, err := net.DialTimeout("tcp", s.Addr(l), time.Second)
		if err != nil {
			t.Fatalf("listener %s: %v\n%s", l, err, s.Log())
		}
		_ = c.Close()
	}
	ends := func(name string, end func() error) {
		t.Helper()
		if err := end(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if c, err := net.DialTimeout("tcp", s.Addr(kafkaserver.Plain), time.Second); err == nil {
			_ = c.Close()
			t.Fatalf("%s: it still listens", name)
		}
	}
	ends("kill", s.Kill)
	if err := s.Restart(t.Context()); err != nil {
		t.Fatalf("restart: %v", err)
	}
	ends("stop", s.Stop)
	if strings.Contains(s.Log(), "ERROR") {
		t.Errorf("the broker complains:%s", s.Log())
	}
	dir := s.Dir()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the broker's folder is left: %v", err)
	}
}
