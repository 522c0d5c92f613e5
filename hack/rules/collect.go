package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"
)

const module = "github.com/shove-dev/shove/"

// result is what became of one test, with the exemptions that it logged.
type result struct {
	pkg    string // below the module
	name   string
	action string            // pass, fail, skip; empty: it never ended
	exempt map[string]string // rule to reason
}

// exemption is the line by which the conformance suite says that a capability excuses a backend from a rule.
var exemption = regexp.MustCompile(`brokertest: exempt ([A-Z][0-9]*): (.*)`)

// collect reads `go test -json` output and returns the tests that have no subtests: a parent passes as well when all
// its subtests were skipped, so it proves nothing by itself.
func collect(in io.Reader) ([]result, error) {
	var order []string
	tests := map[string]*result{}
	parents := map[string]bool{}
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 1<<20), 64<<20)
	for lines.Scan() {
		var e struct{ Action, Package, Test, Output string }
		if json.Unmarshal(lines.Bytes(), &e) != nil || e.Test == "" {
			continue
		}
		key := e.Package + " " + e.Test
		r := tests[key]
		if r == nil {
			r = &result{pkg: strings.TrimPrefix(e.Package, module), name: e.Test, exempt: map[string]string{}}
			tests[key] = r
			order = append(order, key)
			if i := strings.LastIndexByte(e.Test, '/'); i > 0 {
				parents[e.Package+" "+e.Test[:i]] = true
			}
		}
		switch e.Action {
		case "pass", "fail", "skip":
			r.action = e.Action
		case "output":
			if m := exemption.FindStringSubmatch(e.Output); m != nil {
				r.exempt[m[1]] = strings.TrimSpace(m[2])
			}
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("reading the tests' output: %w", err)
	}
	var leaves []result
	for _, key := range order {
		if r := tests[key]; !parents[key] || r.action == "fail" {
			leaves = append(leaves, *r)
		}
	}
	return leaves, nil
}

var ruleID = regexp.MustCompile(`^[A-Z][0-9]*$`)

// ids returns the rules that a test's name claims: each part between / and _ that is a rule id. P and T have no
// numbered parts in the specification; P1 and the like stand for them too.
func ids(name string) []string {
	var found []string
	for _, part := range strings.FieldsFunc(strings.TrimPrefix(name, "Test"), func(r rune) bool { return r == '/' || r == '_' }) {
		if !ruleID.MatchString(part) {
			continue
		}
		if part[0] == 'P' || part[0] == 'T' {
			part = part[:1]
		}
		found = append(found, part)
	}
	return found
}

// variant is the way of a conformance test before the rule: "quorum" of TestConformance/quorum/A4/late and of
// TestConformance/quorum/faults/C8. False for a test that is none or claims no rule.
func variant(name string) (string, bool) {
	rest, ok := strings.CutPrefix(name, "TestConformance/")
	if !ok {
		return "", false
	}
	var before []string
	for part := range strings.SplitSeq(rest, "/") {
		if len(ids(part)) > 0 {
			return strings.Join(before, "/"), true
		}
		if part != "seam" && part != "faults" { // groups of the suite, not variants of a backend
			before = append(before, part)
		}
	}
	return "", false
}

// covers reports whether pkg belongs to one of the folders, written as in [packages].
func covers(folders []string, pkg string) bool {
	for _, f := range folders {
		if base, below := strings.CutSuffix(f, "/"); pkg == base || below && strings.HasPrefix(pkg, f) {
			return true
		}
	}
	return false
}
