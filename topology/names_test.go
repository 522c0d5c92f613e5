package topology

import (
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var kinds = []Kind{RabbitMQ, Kafka, NATS, Redis, SQS, Memory}

// TestPhysicalVectors reads the table of docs/names.md.
func TestPhysicalVectors(t *testing.T) {
	doc, err := os.ReadFile("../docs/names.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, found := strings.Cut(string(doc), "## Test vectors")
	if !found {
		t.Fatal("docs/names.md has no section \"Test vectors\"")
	}
	perKind := map[Kind]int{}
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) != 5 || !strings.Contains(cells[0], "`") {
			continue
		}
		for i := range cells {
			cells[i] = strings.Trim(strings.TrimSpace(cells[i]), "`")
		}
		top := Topology{Queue: cells[0], Source: cells[0]}
		if cells[1] == "yes" {
			top.Sequenced = &Sequenced{}
		}
		kind := Kind(cells[2])
		if got := top.Physical(kind, cells[3]); got != cells[4] {
			t.Errorf("queue %q on %s: Physical(%q) = %q, the document says %q", top.Queue, kind, cells[3], got, cells[4])
		}
		perKind[kind]++
	}
	for _, k := range kinds {
		if perKind[k] == 0 {
			t.Errorf("docs/names.md has no test vector for %s", k)
		}
	}
	if len(perKind) != len(kinds) {
		t.Errorf("docs/names.md names an unknown broker: %v", perKind)
	}
}

// legal is what each broker accepts as a name.
var legal = map[Kind]*regexp.Regexp{
	RabbitMQ: regexp.MustCompile(`^.{1,255}$`),
	Kafka:    regexp.MustCompile(`^[a-zA-Z0-9._-]{1,249}$`),
	NATS:     regexp.MustCompile(`^[^\s.*>/\\]{1,255}$`),
	Redis:    regexp.MustCompile(`^\{[^{}]+\}[^{}]*$`),
	SQS:      regexp.MustCompile(`^[a-zA-Z0-9_-]+(\.fifo)?$`),
	Memory:   regexp.MustCompile(`^.+$`),
}

// specs generates specs that Derive accepts.
func specs() *rapid.Generator[Spec] {
	name := rapid.StringMatching(`[A-Za-z0-9]([A-Za-z0-9._-]{0,30}[A-Za-z0-9])?`)
	return rapid.Custom(func(t *rapid.T) Spec {
		s := Spec{Queue: name.Draw(t, "queue"), DeadLetter: rapid.Bool().Draw(t, "dead letter")}
		var at time.Duration
		for range rapid.IntRange(0, MaxHolds).Draw(t, "tiers") {
			at += time.Duration(rapid.IntRange(1, 200_000).Draw(t, "step")) * time.Millisecond
			s.Holds = append(s.Holds, at)
		}
		if s.DeadLetter && rapid.Bool().Draw(t, "named") {
			s.DeadLetterQueue = name.Draw(t, "dead-letter queue")
		}
		if rapid.Bool().Draw(t, "sequenced") {
			s.Sequenced = &SequencedSpec{Shards: rapid.IntRange(1, 9).Draw(t, "shards"), AllowMessageLoss: true}
		}
		return s
	})
}

func TestNameProperties(t *testing.T) {
	t.Run("B1_names_are_unique_and_legal_on_every_broker", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			top, err := Derive(specs().Draw(t, "spec"))
			if err != nil { // only a dead-letter queue named like another queue is possible here
				t.Skip(err.Error())
			}
			for _, kind := range kinds {
				seen := map[string]string{}
				for _, q := range top.Queues() {
					p := top.Physical(kind, q.Name)
					if other, dup := seen[p]; dup {
						t.Fatalf("%s: %q and %q are both %q", kind, other, q.Name, p)
					}
					seen[p] = q.Name
					if !legal[kind].MatchString(p) {
						t.Fatalf("%s does not accept %q", kind, p)
					}
				}
			}
		})
	})
	t.Run("B1_physical_is_one_to_one_between_topologies", func(t *testing.T) {
		name := rapid.StringMatching(`[a_.d-]{1,6}`)
		rapid.Check(t, func(t *rapid.T) {
			a, b := name.Draw(t, "a"), name.Draw(t, "b")
			for _, kind := range kinds {
				ta, tb := Topology{Queue: a}, Topology{Queue: b}
				if (a == b) != (ta.Physical(kind, a) == tb.Physical(kind, b)) {
					t.Fatalf("%s: %q and %q map to %q and %q", kind, a, b, ta.Physical(kind, a), tb.Physical(kind, b))
				}
			}
		})
	})
	t.Run("B1_names_of_hold_queues_read_back", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			queue := rapid.StringMatching(`[a-z0-9](-hold-|[a-z0-9._-]){0,9}[a-z0-9]`).Draw(t, "queue")
			delay := time.Duration(rapid.IntRange(1, 10_000_000).Draw(t, "ms")) * time.Millisecond
			gotQueue, gotDelay, ok := ParseHoldName(HoldName(queue, delay))
			if !ok || gotQueue != queue || gotDelay != delay {
				t.Fatalf("%s of %s reads back as %q, %s, %t", HoldName(queue, delay), queue, gotQueue, gotDelay, ok)
			}
		})
		for _, other := range []string{"", "orders", "orders-hold-", "orders-hold-5", "orders-hold-1m", "orders-hold-1000ms", "orders-hold-05s", "orders-hold--5s", "-hold-5s", "orders-hold-0s", "orders-hold-5s-dlq"} {
			if queue, delay, ok := ParseHoldName(other); ok {
				t.Errorf("%q is taken for a hold queue of %q with %s", other, queue, delay)
			}
		}
	})
	t.Run("B1_longest_names_fit", func(t *testing.T) {
		top := derive(t, Spec{
			Queue: strings.Repeat("q", MaxQueueLength), DeadLetter: true,
			Holds:     []time.Duration{1<<63 - 1 - (1<<63-1)%time.Millisecond},
			Sequenced: &SequencedSpec{Shards: MaxShards},
		})
		for _, q := range top.Queues() {
			if len(q.Name) > 249 {
				t.Fatalf("%q has %d characters", q.Name, len(q.Name))
			}
		}
	})
	t.Run("B2_accepted_tiers_are_strictly_ascending", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			ds := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) time.Duration {
				return time.Duration(rapid.IntRange(-2, 5).Draw(t, "ms")) * time.Millisecond
			}), 0, 20).Draw(t, "delays")
			ok := len(ds) <= MaxHolds
			for i, d := range ds {
				ok = ok && d > 0 && (i == 0 || d > ds[i-1])
			}
			top, err := Derive(Spec{Queue: "q", Holds: ds})
			if ok != (err == nil) {
				t.Fatalf("Derive(%v): %v", ds, err)
			}
			if err == nil && len(ds) > 0 && !equal(top.Delays(), ds) {
				t.Fatalf("delays %v became %v", ds, top.Delays())
			}
		})
	})
}

func equal(a, b []time.Duration) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

// FuzzDerive feeds names and delays that people would never write: Derive must refuse or accept, never panic, and
// what it accepts must have unique, usable names.
func FuzzDerive(f *testing.F) {
	f.Add("orders", "", int64(5e9), int64(30e9), uint8(3))
	f.Add("a.b_c-d", "a.b_c-d-hold-5s", int64(5e9), int64(-1), uint8(7))
	f.Add("", "\x00", int64(0), int64(1<<62), uint8(255))
	f.Fuzz(func(t *testing.T, queue, dead string, first, step int64, bits uint8) {
		s := Spec{Queue: queue, DeadLetter: bits&1 != 0, DeadLetterQueue: dead, External: bits&8 != 0}
		if bits&2 != 0 {
			s.Holds = []time.Duration{time.Duration(first), time.Duration(first + step)}
		}
		if bits&4 != 0 {
			s.Sequenced = &SequencedSpec{Shards: int(bits >> 4), AllowMessageLoss: bits&16 != 0}
		}
		top, err := Derive(s)
		if err != nil {
			if len(fields(err)) == 0 {
				t.Fatalf("%v names no field", err)
			}
			return
		}
		for _, kind := range kinds {
			seen := map[string]bool{}
			for _, q := range top.Queues() {
				p := top.Physical(kind, q.Name)
				if seen[p] || !legal[kind].MatchString(p) {
					t.Fatalf("%s: %q of %+v is not usable", kind, p, s)
				}
				seen[p] = true
			}
		}
	})
}
