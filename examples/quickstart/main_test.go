package main

import (
	"bytes"
	"strings"
	"testing"
	"testing/synctest"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		if err := run(t.Context(), &out); err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{
			"0.00s  ann      call 1  ack:    delivered",
			"0.00s  early    call 1  defer:  too early; held, and no retry is spent",
			"0.20s  early    call 2  ack:    delivered",
			"0.80s  busy     call 3  ack:    delivered",
			"dead:   rejected (no such mailbox)",
			"dead:   max_retries_exceeded (mailbox busy)",
			"every mail found its end",
		} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("without %q:\n%s", want, out.String())
			}
		}
	})
}
