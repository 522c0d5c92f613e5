package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func events(lines ...string) []result {
	var text strings.Builder
	for _, l := range lines {
		f := strings.SplitN(l, " ", 4)
		fmt.Fprintf(&text, `{"Action":%q,"Package":%q,"Test":%q,"Output":%q}`+"\n", f[0], module+f[1], f[2], strings.Join(f[3:], ""))
	}
	tests, err := collect(strings.NewReader(text.String()))
	if err != nil {
		panic(err)
	}
	return tests
}

func TestIDs(t *testing.T) {
	t.Parallel()
	for name, want := range map[string][]string{
		"TestC1_runs_eleven_times":                  {"C1"},
		"TestConformance/quorum/A4/clamps":          {"A4"},
		"TestDecide/A4_clamps_to_last_tier/C7":      {"A4", "C7"},
		"TestMetrics/P1_names":                      {"P"},
		"TestT_defaults":                            {"T"},
		"TestDecide/AMQP091":                        nil,
		"TestConfigV1alpha1/sha256":                 nil,
		"TestPrefetchOfH11IsNotHalfAName/something": nil,
	} {
		if diff := cmp.Diff(want, ids(name)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func TestCells(t *testing.T) {
	t.Parallel()
	r := rule{id: "A4", scopes: in(pure, backend)}
	for name, tc := range map[string]struct {
		events []string
		want   []string // pure, loop, controllers, memory, rabbitmq
	}{
		"nothing ran": {nil, []string{"GAP", "·", "·", "GAP", "GAP"}},
		"all proven": {
			[]string{"pass settle TestA4", "pass broker/memory TestConformance/A4", "pass broker/rabbitmq TestConformance/quorum/A4"},
			[]string{"ok 1", "·", "·", "ok 1", "ok 1"},
		},
		"a failure beats a proof": {
			[]string{"pass settle TestA4", "fail settle TestMore/A4"},
			[]string{"FAILED", "·", "·", "GAP", "GAP"},
		},
		"a test that never ended": {
			[]string{"run settle TestA4"},
			[]string{"FAILED", "·", "·", "GAP", "GAP"},
		},
		"a skip proves nothing, nor does its parent": {
			[]string{"run settle TestA4", "skip settle TestA4/x", "pass settle TestA4"},
			[]string{"SKIPPED", "·", "·", "GAP", "GAP"},
		},
		"every variant has to prove it": {
			[]string{"pass broker/rabbitmq TestConformance/quorum/A4", "pass broker/rabbitmq TestConformance/faults/A4", "pass broker/rabbitmq TestConformance/classic/A5"},
			[]string{"GAP", "·", "·", "GAP", "GAP"},
		},
		"a capability excuses": {
			[]string{
				"output broker/rabbitmq TestConformance/quorum/A4 x.go:1: brokertest: exempt A4: cannot", "pass broker/rabbitmq TestConformance/quorum/A4",
				"pass broker/memory TestConformance/A4",
			},
			[]string{"GAP", "·", "·", "ok 1", "exempt"},
		},
		"a test elsewhere proves nothing": {
			[]string{"pass cmd/operator TestA4"},
			[]string{"GAP", "·", "·", "GAP", "GAP"},
		},
	} {
		var got []string
		for _, c := range row(r, events(tc.events...))[:5] { // the columns of further brokers are like the last
			got = append(got, c.text)
		}
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func TestTableIsSound(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, r := range rules {
		if seen[r.id] {
			t.Errorf("%s is listed twice", r.id)
		}
		seen[r.id] = true
		if (r.later == "") == (len(r.scopes) == 0 && r.own == "") {
			t.Errorf("%s: a rule has scopes or a reason to come later", r.id)
		}
		if r.title == "" || len(r.title) > 51 {
			t.Errorf("%s: the title does not fit: %q", r.id, r.title)
		}
	}
}
