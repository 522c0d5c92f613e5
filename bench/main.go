// Command bench compares shove with hand-written loops on the same broker, in one run and in turn, and prints ratios.
// Machines are noisy: read the medians and the spread (tenth and ninetieth percentile), not single figures.
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
)

func main() {
	couples := flag.Int("pairs", 15, "measured couples per comparison")
	only := flag.String("only", "", "run only comparisons whose name contains this")
	flag.Parse()
	failed := false
	for _, l := range comparisons() {
		if !strings.Contains(l.name, *only) {
			continue
		}
		p, err := l.make(l.name)
		if err != nil {
			fmt.Fprintln(os.Stderr, "bench:", l.name+":", err)
			os.Exit(1)
		}
		r, err := measure(os.Stderr, p, *couples)
		if err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			os.Exit(1)
		}
		r.print(os.Stdout)
		failed = failed || !r.ok()
	}
	if failed {
		fmt.Println("some goals were missed")
	}
}

func comparisons() []lazyPair {
	return append([]lazyPair{{"loop on memory, no-op handler", loopOnMemory}}, rabbitPairs()...)
}
