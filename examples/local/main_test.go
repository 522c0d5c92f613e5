package main

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"
)

func TestLocal(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	dir := t.TempDir()
	for range 2 { // the second time on the same store
		var out bytes.Buffer
		if err := run(ctx, &out, dir); err != nil {
			t.Fatal(err)
		}
		for _, line := range []string{"job 3 fails, and is held", "job 3 is done, call 2", "job 10 is done, call 1"} {
			if !strings.Contains(out.String(), line) {
				t.Errorf("no line %q in\n%s", line, out.String())
			}
		}
	}
}
