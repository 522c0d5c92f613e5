// Command rules reads the output of `go test -json` and prints which rule of the delivery semantics is proven in
// which scope, and on which broker. A test proves the rules that its name holds, see ids. It exits 1 on a gap: a rule
// in play that no passing test proves where it must be.
//
//	rules .cache/test.json
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"sort"
	"strings"
)

func main() {
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: rules FILE (the output of go test -json)")
		os.Exit(2)
	}
	f, err := os.Open(flag.Arg(0))
	if err != nil {
		fmt.Fprintln(os.Stderr, "rules:", err)
		os.Exit(2)
	}
	defer f.Close()
	tests, err := collect(f)
	if err != nil {
		fmt.Fprintln(os.Stderr, "rules:", err)
		os.Exit(2)
	}
	if report(os.Stdout, rules, tests) > 0 {
		os.Exit(1)
	}
}

// cell is one place of the table.
type cell struct {
	text string // what the table shows
	gap  string // set: why the rule is not proven here
	note string // set: the reason of an exemption
}

var (
	notHere  = cell{text: "·"}
	comesOne = cell{text: "later"}
)

// report prints the table and what it stands on, and returns the number of gaps.
func report(out io.Writer, rules []rule, tests []result) int {
	head := []string{string(pure), string(loop), string(controllers)}
	for _, b := range backends {
		head = append(head, b.name)
	}
	var gaps, exempt, later []string
	fmt.Fprintf(out, "%-5s%-52s", "rule", "")
	for _, h := range head {
		fmt.Fprintf(out, "%-12s", h)
	}
	fmt.Fprintln(out)
	for _, r := range rules {
		fmt.Fprintf(out, "%-5s%-52s", r.id, r.title)
		for i, c := range row(r, tests) {
			fmt.Fprintf(out, "%-12s", c.text)
			if c.gap != "" {
				gaps = append(gaps, fmt.Sprintf("%s in %s: %s", r.id, head[i], c.gap))
			}
			if c.note != "" {
				exempt = append(exempt, fmt.Sprintf("%s on %s: %s", r.id, head[i], c.note))
			}
		}
		fmt.Fprintln(out)
		if reason := r.later + r.rest; reason != "" {
			later = append(later, r.id+": "+reason)
		}
	}
	list(out, "Excused by a capability:", exempt)
	list(out, "Later, in whole or on other brokers:", later)
	list(out, "Gaps:", gaps)
	if unknown := unknownIDs(rules, tests); len(unknown) > 0 {
		list(out, "Names that look like a rule but are none:", unknown)
	}
	fmt.Fprintf(out, "\nrules: %d in play, %d gaps\n", inPlay(rules), len(gaps))
	return len(gaps)
}

func list(out io.Writer, title string, lines []string) {
	if len(lines) == 0 {
		return
	}
	fmt.Fprintf(out, "\n%s\n  %s\n", title, strings.Join(lines, "\n  "))
}

// row returns the cells of a rule: the scopes in the order of the head, then the backends.
func row(r rule, tests []result) []cell {
	var cells []cell
	for _, s := range []scope{pure, loop, controllers} {
		switch {
		case r.later != "":
			cells = append(cells, comesOne)
		case !slices.Contains(r.scopes, s):
			cells = append(cells, notHere)
		default:
			cells = append(cells, judge(named(r.id, tests, func(t result) bool { return covers(packages[s], t.pkg) })))
		}
	}
	for _, b := range backends {
		switch {
		case r.later != "", r.only != nil && !slices.Contains(r.only, b.name):
			cells = append(cells, comesOne)
		case r.own == b.name:
			cells = append(cells, judge(named(r.id, tests, func(t result) bool { return covers([]string{b.pkg}, t.pkg) })))
		case !slices.Contains(r.scopes, backend), slices.Contains(r.not, b.name):
			cells = append(cells, notHere)
		default:
			cells = append(cells, judgeBackend(r.id, tests, []string{b.pkg}))
		}
	}
	return cells
}

// named returns the tests that claim the rule and that keep accepts.
func named(id string, tests []result, keep func(result) bool) []result {
	var found []result
	for _, t := range tests {
		if slices.Contains(ids(t.name), id) && keep(t) {
			found = append(found, t)
		}
	}
	return found
}

// judge says what the tests that claim a rule in one place amount to.
func judge(tests []result) cell {
	passed, skipped := 0, 0
	for _, t := range tests {
		switch t.action {
		case "pass":
			passed++
		case "skip":
			skipped++
		default: // failed, or ended by a panic or the time limit
			return cell{text: "FAILED", gap: fmt.Sprintf("%s in %s did not pass", t.name, t.pkg)}
		}
	}
	switch {
	case passed > 0:
		return cell{text: fmt.Sprintf("ok %d", passed)}
	case skipped > 0:
		return cell{text: "SKIPPED", gap: fmt.Sprintf("%s was skipped", tests[0].name)}
	}
	return cell{text: "GAP", gap: "no test names it"}
}

// judgeBackend wants the rule proven, or excused, in every variant (queue type, say) that the package runs the suite
// with.
func judgeBackend(id string, tests []result, pkg []string) cell {
	variants := map[string][]result{}
	for _, t := range tests {
		if v, ok := variant(t.name); ok && covers(pkg, t.pkg) {
			variants[v] = append(variants[v], t)
		}
	}
	if len(variants) == 0 {
		return cell{text: "GAP", gap: "the conformance suite did not run"}
	}
	names := make([]string, 0, len(variants))
	for v := range variants {
		names = append(names, v)
	}
	sort.Strings(names)
	passed, notes := 0, []string{}
	for _, v := range names {
		of := named(id, variants[v], func(result) bool { return true })
		c := judge(of)
		if c.gap != "" {
			c.gap = strings.TrimPrefix(v+": ", ": ") + c.gap
			return c
		}
		if reason, ok := excuse(id, of); ok {
			notes = append(notes, strings.TrimPrefix(v+": ", ": ")+reason)
			continue
		}
		passed += len(of)
	}
	c := cell{text: fmt.Sprintf("ok %d", passed), note: strings.Join(notes, "; ")}
	if passed == 0 {
		c.text = "exempt"
	}
	return c
}

// excuse returns the reason when each of the tests logged an exemption.
func excuse(id string, tests []result) (string, bool) {
	reason := ""
	for _, t := range tests {
		r, ok := t.exempt[id]
		if !ok {
			return "", false
		}
		reason = r
	}
	return reason, reason != ""
}

func inPlay(rules []rule) int {
	n := 0
	for _, r := range rules {
		if r.later == "" {
			n++
		}
	}
	return n
}

func unknownIDs(rules []rule, tests []result) []string {
	known := map[string]bool{}
	for _, r := range rules {
		known[r.id] = true
	}
	var unknown []string
	for _, t := range tests {
		for _, id := range ids(t.name) {
			if len(id) > 1 && !known[id] { // a letter alone speaks of a whole chapter
				unknown = append(unknown, t.pkg+": "+t.name)
			}
		}
	}
	return unknown
}
