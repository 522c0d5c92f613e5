package main

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"syscall"
	"time"
)

// sample is what one run cost.
type sample struct {
	wall   time.Duration
	cpu    time.Duration // of this process, user and system
	allocs uint64
	n      int
	p50    time.Duration // latency, where it is measured
	p99    time.Duration
}

func (s sample) perSecond() float64 { return float64(s.n) / s.wall.Seconds() }
func (s sample) cpuEach() float64   { return float64(s.cpu.Nanoseconds()) / float64(s.n) }
func (s sample) allocsEach() float64 {
	return float64(s.allocs) / float64(s.n)
}

// watch measures what happens between its call and that of the function it returns.
func watch(n int) (stop func() sample) {
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	cpu, began := cpuTime(), time.Now()
	return func() sample {
		s := sample{wall: time.Since(began), cpu: cpuTime() - cpu, n: n}
		runtime.ReadMemStats(&after)
		s.allocs = after.Mallocs - before.Mallocs
		return s
	}
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err) // it has no way to fail on Linux
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// run does one measured run.
type run func() (sample, error)

// pair compares ours with a hand-written baseline.
type pair struct {
	name     string
	ours     run
	baseline run
	// goal is what the ratio of rates must reach; 0: none.
	goal float64
	// maxCPU and maxAllocs bound what ours may cost above the baseline, in ns and allocations a message; 0: no bound.
	maxCPU, maxAllocs float64
	// latency is what the ratios of the median and the 99th percentile may reach; 0: latency is not measured.
	latency float64
}

// lazyPair is set up when it is about to run.
type lazyPair struct {
	name string
	make func(name string) (pair, error)
}

// result is a pair measured.
type result struct {
	pair
	ratios         []float64
	our, base      []sample
	cpuOver, alloc float64
	p50s, p99s     []float64
}

// measure alternates the two, so that both meet the same drifts of the machine, and keeps the ratio of each couple.
func measure(out io.Writer, p pair, couples int) (result, error) {
	r := result{pair: p}
	for i := range couples + 1 {
		a, err := p.ours()
		if err != nil {
			return r, fmt.Errorf("%s: ours: %w", p.name, err)
		}
		b, err := p.baseline()
		if err != nil {
			return r, fmt.Errorf("%s: baseline: %w", p.name, err)
		}
		if i == 0 {
			continue // warm-up
		}
		r.our, r.base = append(r.our, a), append(r.base, b)
		r.ratios = append(r.ratios, a.perSecond()/b.perSecond())
		if p.latency > 0 {
			r.p50s = append(r.p50s, float64(a.p50)/float64(b.p50))
			r.p99s = append(r.p99s, float64(a.p99)/float64(b.p99))
		}
		fmt.Fprintf(out, "\r%-52s %2d/%d", p.name, i, couples)
	}
	fmt.Fprint(out, "\r")
	r.cpuOver = medianOf(r.our, sample.cpuEach) - medianOf(r.base, sample.cpuEach)
	r.alloc = medianOf(r.our, sample.allocsEach) - medianOf(r.base, sample.allocsEach)
	return r, nil
}

// ok says whether every goal is met.
func (r result) ok() bool {
	if r.latency > 0 && (median(r.p50s) > r.latency || median(r.p99s) > r.latency) {
		return false
	}
	return (r.goal == 0 || median(r.ratios) >= r.goal) && (r.maxCPU == 0 || r.cpuOver <= r.maxCPU) && (r.maxAllocs == 0 || r.alloc <= r.maxAllocs)
}

func (r result) print(out io.Writer) {
	if r.latency > 0 {
		r.printLatency(out)
		return
	}
	q := slices.Sorted(slices.Values(r.ratios))
	verdict := "ok"
	if !r.ok() {
		verdict = "MISSED"
	}
	goal := ""
	if r.goal > 0 {
		goal = fmt.Sprintf(" goal %.2f", r.goal)
	}
	if r.maxCPU > 0 {
		goal += fmt.Sprintf(" cpu≤%.0f", r.maxCPU)
	}
	if r.maxAllocs > 0 {
		goal += fmt.Sprintf(" allocs≤%.0f", r.maxAllocs)
	}
	fmt.Fprintf(out, "%-46s ratio %.2f [%.2f %.2f]%s | %8.0f/s vs %8.0f/s | cpu %5.0f vs %5.0f ns/msg (%+.0f) | allocs %.2f vs %.2f (%+.2f) | %s\n",
		r.name, median(r.ratios), q[len(q)/10], q[len(q)-1-len(q)/10], goal, medianOf(r.our, sample.perSecond), medianOf(r.base, sample.perSecond),
		medianOf(r.our, sample.cpuEach), medianOf(r.base, sample.cpuEach), r.cpuOver,
		medianOf(r.our, sample.allocsEach), medianOf(r.base, sample.allocsEach), r.alloc, verdict)
}

func (r result) printLatency(out io.Writer) {
	ms := func(ss []sample, f func(sample) time.Duration) float64 {
		return medianOf(ss, func(s sample) float64 { return f(s).Seconds() * 1000 })
	}
	p50 := func(s sample) time.Duration { return s.p50 }
	p99 := func(s sample) time.Duration { return s.p99 }
	verdict := "ok"
	if !r.ok() {
		verdict = "MISSED"
	}
	fmt.Fprintf(out, "%-46s p50 ratio %.2f (%.2f vs %.2f ms) p99 ratio %.2f (%.2f vs %.2f ms) goal ≤%.2f | %s\n",
		r.name, median(r.p50s), ms(r.our, p50), ms(r.base, p50), median(r.p99s), ms(r.our, p99), ms(r.base, p99), r.latency, verdict)
}

func medianOf(ss []sample, f func(sample) float64) float64 {
	fs := make([]float64, len(ss))
	for i, s := range ss {
		fs[i] = f(s)
	}
	return median(fs)
}

func median(fs []float64) float64 {
	if len(fs) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(fs))
	return s[len(s)/2]
}
