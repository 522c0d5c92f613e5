// Command bench compares shove with hand-written loops on the same broker, in one run and in turn, and prints ratios.
// Machines are noisy: read the medians and the spread (tenth and ninetieth percentile), not single figures.
package main

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
)

func main() {
	if dir := os.Getenv(serverVar); dir != "" {
		if err := serveNATS(dir); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			os.Exit(1)
		}
		return
	}
	couples := flag.Int("pairs", 15, "measured couples per comparison")
	only := flag.String("only", "", "run only comparisons whose name contains this")
	flag.Parse()
	err := compare(*couples, *only)
	if natsServer.stop != nil {
		natsServer.stop()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func compare(couples int, only string) error {
	failed := false
	for _, l := range comparisons() {
		if !strings.Contains(l.name, only) {
			continue
		}
		p, err := l.make(l.name)
		if err != nil {
			return fmt.Errorf("%s: %w", l.name, err)
		}
		r, err := measure(os.Stderr, p, couples)
		if err != nil {
			return err
		}
		r.print(os.Stdout)
		failed = failed || !r.ok()
	}
	for _, c := range kafkaParallel() {
		if !strings.Contains(c.name, only) {
			continue
		}
		ok, err := c.check(os.Stdout)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		failed = failed || !ok
	}
	for _, c := range []held{natsHeld(), redisHeld(), kafkaHeld()} {
		if !strings.Contains(c.name, only) {
			continue
		}
		ok, err := c.run(os.Stdout)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		failed = failed || !ok
	}
	if failed {
		fmt.Println("some goals were missed")
	}
	return nil
}

func comparisons() []lazyPair {
	return slices.Concat([]lazyPair{{"loop on memory, no-op handler", loopOnMemory}}, rabbitPairs(), natsPairs(), redisPairs(), kafkaPairs())
}
