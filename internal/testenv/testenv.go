// Package testenv gives tests the real things they run against: a RabbitMQ server, a Kubernetes API server, and a
// proxy that cuts or slows a connection. It is imported by tests and by the programs under hack only.
//
// What a test needs is resolved in one order everywhere: an environment variable that names a running one, then
// what is installed on the machine, then a container. Where none is there the test calls [Skip], which fails
// instead when REQUIRE_ALL=1 is set, as it is in CI.
package testenv

import (
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// RequireAllVar is the environment variable that turns every skip into a failure when it is "1".
const RequireAllVar = "REQUIRE_ALL"

// RequireAll reports whether a missing dependency is a failure rather than a skip.
func RequireAll() bool { return os.Getenv(RequireAllVar) == "1" }

// Skip ends the test because something it needs is missing; why says what, and how to get it. It fails the test
// instead when REQUIRE_ALL=1. It must be called from the goroutine that runs the test.
func Skip(tb testing.TB, why string) {
	tb.Helper()
	if RequireAll() {
		tb.Fatalf("%s=1 and a dependency is missing: %s", RequireAllVar, why)
	}
	tb.Skip(why)
}

// Eventually calls check every 10 ms to 100 ms until it returns nil, and fails the test with its last error when
// that has not happened within timeout. It must be called from the goroutine that runs the test.
func Eventually(tb testing.TB, timeout time.Duration, check func() error) {
	tb.Helper()
	if err := Poll(timeout, check); err != nil {
		tb.Fatal(err)
	}
}

// Consistently calls check every 20 ms for the whole of d and fails the test at its first error. It is for what
// must not happen; keep d as short as the thing would need to show.
func Consistently(tb testing.TB, d time.Duration, check func() error) {
	tb.Helper()
	for start := time.Now(); time.Since(start) < d; time.Sleep(20 * time.Millisecond) {
		if err := check(); err != nil {
			tb.Fatalf("did not hold for %v: failed after %v: %v", d, time.Since(start).Round(time.Millisecond), err)
		}
	}
}

// Poll is [Eventually] for code that has no test at hand: it returns the last error of check, or nil.
func Poll(timeout time.Duration, check func() error) error {
	const first, most = 10 * time.Millisecond, 100 * time.Millisecond
	pause := first
	for start := time.Now(); ; {
		err := check()
		if err == nil {
			return nil
		}
		if time.Since(start) >= timeout {
			return fmt.Errorf("not so within %v: %w", timeout, err)
		}
		time.Sleep(pause)
		pause = min(pause*3/2, most)
	}
}

// shared holds what was started once for the whole test binary, and how to end it.
var shared struct {
	mu   sync.Mutex
	stop []func() error
}

// AtExit registers what [Main] ends after the tests, last registered first.
func AtExit(stop func() error) {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	shared.stop = append(shared.stop, stop)
}

// leftByProxy are goroutines of toxiproxy 2.5: where a connection is cut while data waits to be passed on, what reads
// it and what pipes it stay blocked in sending to a link that nobody reads any more.
var leftByProxy = []goleak.Option{
	goleak.IgnoreAnyFunction("github.com/Shopify/toxiproxy/v2/toxics.(*ToxicStub).Run"),
	goleak.IgnoreAnyFunction("github.com/Shopify/toxiproxy/v2.(*ToxicLink).read"),
	goleak.IgnoreAnyFunction("github.com/Shopify/toxiproxy/v2.(*ToxicLink).write"),
}

// Main is the TestMain of a package that uses what this package shares between tests: it runs the tests, ends the
// shared servers, and then fails the run when a goroutine is left over. The options name the ones to ignore.
//
// A package that shares nothing can call goleak.VerifyTestMain itself. Servers end with the test binary even where
// neither is called, or when it is killed.
func Main(m *testing.M, ignore ...goleak.Option) {
	code := m.Run()
	shared.mu.Lock()
	stop := shared.stop
	shared.stop = nil
	shared.mu.Unlock()
	for i := len(stop) - 1; i >= 0; i-- {
		if err := stop[i](); err != nil {
			fmt.Fprintln(os.Stderr, "testenv: stopping a shared server:", err)
			code = max(code, 1)
		}
	}
	if code == 0 {
		if err := goleak.Find(append(ignore, leftByProxy...)...); err != nil {
			fmt.Fprintln(os.Stderr, "testenv: goroutines left over after the tests:", err)
			code = 1
		}
	}
	os.Exit(code)
}
