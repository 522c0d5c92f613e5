package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shove-dev/shove/hack/demo/ledger"
)

// screen shows the state: redrawn in place on a terminal, a line now and then elsewhere.
type screen struct {
	out      io.Writer
	terminal bool
	width    int
	height   int
	drawn    bool
	lastLine time.Time
}

// linePause is the time between lines where there is no terminal.
const linePause = 5 * time.Second

const (
	clearScreen = "\x1b[H\x1b[2J"
	home        = "\x1b[H"
	toLineEnd   = "\x1b[K"
	toScreenEnd = "\x1b[J"
	bold        = "\x1b[1m"
	dim         = "\x1b[2m"
	green       = "\x1b[32m"
	yellow      = "\x1b[33m"
	plain       = "\x1b[0m"
)

// show draws a state.
func (v *screen) show(s state) {
	if !v.terminal {
		if time.Since(v.lastLine) >= linePause {
			v.lastLine = time.Now()
			fmt.Fprintln(v.out, line(s))
		}
		return
	}
	var b strings.Builder
	b.WriteString(home)
	if !v.drawn {
		v.drawn = true
		b.Reset()
		b.WriteString(clearScreen)
	}
	lines := page(s)
	if v.height > 1 && len(lines) >= v.height { // more would scroll the picture away
		lines = lines[:v.height-1]
	}
	for _, l := range lines {
		b.WriteString(clip(l, v.width))
		b.WriteString(plain + toLineEnd + "\r\n")
	}
	b.WriteString(toScreenEnd)
	fmt.Fprint(v.out, b.String())
}

// clip cuts a line to a number of visible characters; escape sequences take none.
func clip(l string, width int) string {
	if width <= 0 {
		return l
	}
	visible, escape := 0, false
	for i, r := range l {
		switch {
		case r == '\x1b':
			escape = true
		case escape:
			escape = r != 'm'
		default:
			if visible++; visible > width {
				return l[:i]
			}
		}
	}
	return l
}

// page is the whole picture, line by line.
func page(s state) []string {
	elapsed := s.elapsed().String()
	if s.length > 0 {
		elapsed += " of " + s.length.String()
	}
	out := []string{bold + "shove demo" + plain + "  " + s.title + "  " + dim + elapsed + plain + "  " + yellow + s.phase, ""}
	out = append(out, dim+fmt.Sprintf("%-28s %-6s %s", "OBJECT", "READY", "BECAUSE"))
	for _, o := range s.objects {
		ready := yellow + "no    "
		if o.Ready {
			ready = green + "yes   "
		}
		out = append(out, fmt.Sprintf("%-28s ", o.Name)+ready+plain+" "+dim+o.Text)
	}
	out = append(out, "", dim+fmt.Sprintf("%-28s %8s %8s %10s %10s %10s", "QUEUE (on the broker)", "ready", "unacked", "published", "delivered", "acked"))
	for _, name := range s.all() {
		q := s.queues[name]
		out = append(out, fmt.Sprintf("%-28s %8s %8s %10d %10d %10d", name, number(q.Ready), number(q.Unacked), q.Stats.Publish, q.Stats.Deliver, q.Stats.Ack))
	}
	out = append(out, "", dim+"OUTCOME (seen by the broker)")
	for _, o := range outcomes(s) {
		out = append(out, fmt.Sprintf("%-28s %8s  ", o.name, o.total)+dim+o.parts)
	}
	out = append(out, "", dim+"LATELY")
	for _, n := range s.notes {
		out = append(out, dim+n.At.Format("15:04:05 ")+plain+n.Text)
	}
	if s.problem != "" {
		out = append(out, "", yellow+"cannot look: "+s.problem)
	}
	return append(out, "", dim+"Ctrl-C ends it.")
}

func number(n *int) string {
	if n == nil {
		return "–" // the server has not said yet: unknown is not zero
	}
	return strconv.Itoa(*n)
}

// outcome is a line of the table of outcomes.
type outcome struct{ name, total, parts string }

func outcomes(s state) []outcome {
	c := s.counts
	acked := "–"
	if n, ok := s.acked(); ok {
		acked = strconv.Itoa(n)
	}
	var tiers, causes, reasons []string
	for i, n := range c.Retried {
		tiers = append(tiers, fmt.Sprintf("%s %d", strings.TrimPrefix(s.names.Holds[i], s.names.Main+"-"), n))
	}
	for _, k := range []ledger.Cause{ledger.CauseError, ledger.CauseTimeout, ledger.CausePanic} {
		causes = append(causes, fmt.Sprintf("%s %d", k, c.RetriedBy[k]))
	}
	for _, k := range slices.Sorted(maps.Keys(c.Dead)) {
		reasons = append(reasons, fmt.Sprintf("%s %d", k, c.Dead[k]))
	}
	return []outcome{
		{"published", strconv.Itoa(c.Published), ""},
		{"acked", acked, "acks on the main queue, less copies to the others"},
		{"retried", strconv.Itoa(c.RetriedTotal()), strings.Join(tiers, ", ") + "; " + strings.Join(causes, ", ")},
		{"deferred", strconv.Itoa(c.Deferred), fmt.Sprintf("and %d further rounds before their time", c.Waited)},
		{"back from a tier", strconv.Itoa(c.Returned), ""},
		{"dead-lettered", strconv.Itoa(c.DeadTotal()), strings.Join(reasons, ", ")},
		{"drained from the dead letters", strconv.Itoa(c.Drained), ""},
	}
}

// line is the picture in one line.
func line(s state) string {
	ready := 0
	for _, o := range s.objects {
		if o.Ready {
			ready++
		}
	}
	var parts []string
	for _, o := range outcomes(s) {
		parts = append(parts, o.name+" "+o.total)
	}
	var waiting []string
	for _, name := range s.all() {
		q := s.queues[name]
		waiting = append(waiting, fmt.Sprintf("%s %s+%s", name, number(q.Ready), number(q.Unacked)))
	}
	l := fmt.Sprintf("%6s  %d of %d objects ready | %s | ready+unacked: %s", s.elapsed(), ready, len(objectNames),
		strings.Join(parts, ", "), strings.Join(waiting, ", "))
	for _, o := range s.objects {
		if !o.Ready {
			l += " | " + o.Name + ": " + o.Text
		}
	}
	if s.problem != "" {
		l += " | cannot look: " + s.problem
	}
	return l
}
