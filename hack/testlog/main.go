// Command testlog reads the output of `go test -json` on standard input, keeps it in a file, and prints it for a
// person: one line for each package, the whole output of what failed, what was skipped and why, and a closing line
// with the counts. It exits 1 when something failed.
//
//	go test -json ./... | testlog -o test.json
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"sort"
	"strings"
)

func main() {
	out := flag.String("o", "", "file that keeps the JSON (default: none)")
	flag.Parse()
	failed, err := run(os.Stdin, os.Stdout, *out)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testlog:", err)
	}
	if failed || err != nil {
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer, file string) (failed bool, err error) {
	if file != "" {
		f, err := os.Create(file)
		if err != nil {
			return true, fmt.Errorf("keeping the JSON: %w", err)
		}
		defer f.Close()
		in = io.TeeReader(in, f)
	}
	p := printer{out: out, lines: map[string][]string{}, failedIn: map[string]bool{}}
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 1<<20), 64<<20)
	for lines.Scan() {
		p.line(lines.Bytes())
	}
	if err := lines.Err(); err != nil {
		return true, fmt.Errorf("reading the tests' output: %w", err)
	}
	p.close()
	return p.failed > 0, nil
}

// event is a line of `go test -json`, see `go doc test2json`.
type event struct {
	Action     string
	Package    string
	ImportPath string
	Test       string
	Output     string
}

type printer struct {
	out     io.Writer
	lines   map[string][]string // output of tests that run, by package and test
	skipped []string

	passed, failed int             // tests, and packages that failed without one that did
	failedIn       map[string]bool // packages with a failed test
}

func (p *printer) line(text []byte) {
	var e event
	if json.Unmarshal(text, &e) != nil { // not JSON: a message of the go command itself
		fmt.Fprintf(p.out, "%s\n", text)
		return
	}
	key := e.Package + " " + e.Test
	switch {
	case e.Action == "build-output":
		fmt.Fprint(p.out, e.Output)
	case e.Test == "":
		p.pkg(e)
	case e.Action == "output":
		p.lines[key] = append(p.lines[key], e.Output)
	case e.Action == "pass":
		p.passed++
		delete(p.lines, key)
	case e.Action == "fail":
		p.failed++
		p.failedIn[e.Package] = true
		p.print(p.lines[key])
		delete(p.lines, key)
	case e.Action == "skip":
		p.skipped = append(p.skipped, e.Package+"."+e.Test+reason(p.lines[key]))
		delete(p.lines, key)
	}
}

// pkg handles what concerns a whole package: its closing line, and what it printed outside of tests.
func (p *printer) pkg(e event) {
	switch {
	case e.Action == "fail":
		if !p.failedIn[e.Package] { // it did not build, leaked a goroutine, or took too long
			p.failed++
		}
		// What ran when the package was ended, by a panic or the time limit, has no result of its own.
		var left []string
		for key := range p.lines {
			if strings.HasPrefix(key, e.Package+" ") {
				left = append(left, key)
			}
		}
		sort.Strings(left)
		for _, key := range left {
			p.print(p.lines[key])
			delete(p.lines, key)
		}
	case e.Action == "output" && e.Output != "PASS\n" && !strings.HasPrefix(e.Output, "coverage:"):
		fmt.Fprint(p.out, e.Output)
	}
}

func (p *printer) print(lines []string) {
	for _, l := range lines {
		if !strings.HasPrefix(l, "=== ") {
			fmt.Fprint(p.out, l)
		}
	}
}

// reason is the text that a skipped test gave.
func reason(lines []string) string {
	for _, l := range lines {
		if l = strings.TrimSpace(l); l != "" && !strings.HasPrefix(l, "===") && !strings.HasPrefix(l, "---") {
			return ": " + l
		}
	}
	return ""
}

func (p *printer) close() {
	for _, s := range p.skipped {
		fmt.Fprintln(p.out, "SKIP", s)
	}
	fmt.Fprintf(p.out, "%d passed, %d failed, %d skipped\n", p.passed, p.failed, len(p.skipped))
}
