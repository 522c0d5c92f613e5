package main

// A scope is a place where a rule has to be proven.
type scope string

const (
	pure        scope = "pure"        // functions without I/O: names, the decision, headers, options
	loop        scope = "loop"        // the runtime, on the in-memory broker
	backend     scope = "backend"     // every broker backend, by the conformance suite
	controllers scope = "controllers" // the operator, on a real API server
)

// packages says which packages prove a scope: the folder itself and, with a trailing slash, all below it.
var packages = map[scope][]string{
	pure:        {"topology/", "settle/", "broker", "broker/header/", "runtime/config/"},
	loop:        {"runtime/"},
	controllers: {"controllers/"},
}

// backends are the columns of the backend scope and the packages that run the suite.
var backends = []struct{ name, pkg string }{
	{"memory", "broker/memory/"},
	{"rabbitmq", "broker/rabbitmq/"},
	{"kafka", "broker/kafka/"},
	{"nats", "broker/nats/"},
	{"redis", "broker/redis/"},
}

// A rule of the delivery semantics. The ids are those of the specification, the titles only remind of it.
type rule struct {
	id     string
	title  string
	scopes []scope
	only   []string // backends that the rule is limited to for now; nil: all
	not    []string // backends that the rule means nothing for
	own    string   // a backend that proves the rule in tests of its own; it means nothing for the others
	later  string   // set: not in play yet, for this reason
	rest   string   // set: the part of the rule that comes later
}

func in(scopes ...scope) []scope { return scopes }

const (
	sequencing  = "sequenced topologies are a later step"
	keyLanes    = "the loop keeps the order on the in-memory broker; sequenced topologies on real ones are a later step"
	exactlyOnce = "exactly-once routing is a later step"
	scaling     = "scaling is a later step"
)

var rules = []rule{
	{id: "A1", title: "four outcomes, as values or errors", scopes: in(loop)},
	{id: "A2", title: "ack removes and writes nothing else", scopes: in(backend)},
	{id: "A3", title: "reject dead-letters at once", scopes: in(pure, backend)},
	{id: "A4", title: "retry waits in the tier of its count", scopes: in(pure, backend)},
	{id: "A5", title: "retry beyond the budget dead-letters", scopes: in(pure, backend)},
	{id: "A6", title: "defer waits in the first tier, count kept", scopes: in(pure, backend)},
	{id: "A7", title: "one pure decision for every backend", scopes: in(pure)},
	{id: "A8", title: "a panic is a retry, the consumer lives on", scopes: in(loop)},
	{id: "A9", title: "the copy is confirmed before the ack", scopes: in(backend)},
	{id: "A10", title: "a failed copy leaves the original, with backoff", scopes: in(loop, backend)},
	{id: "A11", title: "handlers run at once, one slow one delays none", scopes: in(loop)},
	{id: "A12", title: "a handler is bound to a topology, not a type", scopes: in(loop)},
	{id: "A13", title: "shared state reaches handlers without globals", scopes: in(loop)},

	{id: "B1", title: "names are made in one place", scopes: in(pure)},
	{id: "B2", title: "tiers are strictly ascending and bounded", scopes: in(pure)},
	{id: "B3", title: "the last tier repeats", scopes: in(pure)},
	{id: "B4", title: "never before the delay is over", scopes: in(backend)},
	{id: "B5", title: "held messages outlive every consumer", scopes: in(backend)},
	{id: "B6", title: "warnings for tiers or dead letters alone", scopes: in(controllers)},

	{id: "C1", title: "max+1 calls for an always-retry message", scopes: in(pure, backend)},
	{id: "C2", title: "the last call's outcome counts", scopes: in(pure, backend)},
	{id: "C3", title: "default budget, and a budget of zero", scopes: in(pure, backend)},
	{id: "C4", title: "over budget on arrival still gets one call", scopes: in(pure, backend)},
	{id: "C5", title: "count headers, ours and the older ones", scopes: in(loop, backend)},
	{id: "C6", title: "what spends budget and what does not", scopes: in(loop, backend)},
	{id: "C7", title: "retry without tiers still advances the count", scopes: in(pure, backend)},
	{id: "C8", title: "a crash duplicates under one message id", scopes: in(loop, backend)},
	{id: "C9", title: "user headers survive a hop", scopes: in(loop, backend)},
	{id: "C10", title: "a message that kills the process is bounded", scopes: in(loop, backend)},

	{id: "D1", title: "defer never raises the count; not-before", scopes: in(pure, backend)},
	{id: "D2", title: "defer without tiers is no hot loop", scopes: in(loop, backend)},
	{id: "D3", title: "retry, defer, retry over two tiers", scopes: in(pure, backend)},
	{id: "D4", title: "defer on sequenced topologies", later: sequencing},
	{id: "D5", title: "the optional bound on deferrals", scopes: in(pure)},

	{id: "E1", title: "a dead-letter queue has its own consumer", scopes: in(loop, backend)},
	{id: "E2", title: "draining none is an error at start", scopes: in(loop)},
	{id: "E3", title: "metadata and reasons of a dead letter", scopes: in(loop, backend)},
	{id: "E4", title: "the default dead handler logs a warning", scopes: in(loop)},
	{id: "E5", title: "acked after the dead handler, at most 3 more tries", scopes: in(loop)},
	{id: "E6", title: "whose position, count and id a drain shows", scopes: in(loop, backend)},
	{id: "E7", title: "an undecodable dead letter arrives raw", scopes: in(loop, backend)},

	{id: "F1", title: "no dead-letter queue: discard with a warning", scopes: in(loop, backend)},
	{id: "F2", title: "every discard is counted twice over", scopes: in(loop)},

	{id: "G1", title: "undecodable dead-letters without a call", scopes: in(loop, backend)},
	{id: "G2", title: "oversize dead-letters before decoding", scopes: in(loop, backend)},
	{id: "G3", title: "poison on a sequenced topology", later: sequencing},

	{id: "H1", title: "every call has a deadline", scopes: in(loop)},
	{id: "H2", title: "the first layer that sets an option wins", scopes: in(pure, controllers)},
	{id: "H3", title: "what a timeout becomes", scopes: in(loop)},
	{id: "H4", title: "the outcome is on time, a late one is dropped", scopes: in(loop, backend)},
	{id: "H5", title: "a panic is a retry whatever the setting", scopes: in(loop)},
	{id: "H6", title: "no deadline: shutdown still ends", scopes: in(loop)},
	{id: "H7", title: "timeout to defer needs tiers", scopes: in(controllers)},
	{id: "H8", title: "timed-out entries stay pending", own: "redis"},
	{id: "H9", title: "leases are renewed, lost ones route nothing", own: "redis"},
	{id: "H10", title: "deadlines of one group lie close together", scopes: in(controllers), own: "redis"},
	{id: "H11", title: "no redelivery within the deadline", scopes: in(backend)},

	{id: "I1", title: "the metadata a handler gets", scopes: in(loop)},
	{id: "I2", title: "filled wherever the broker knows", scopes: in(backend)},
	{id: "I3", title: "which counts restart with a copy", scopes: in(backend)},
	{id: "I4", title: "the history of attempts, trimmed", scopes: in(loop)},

	{id: "J1", title: "republish: a copy, then settle", scopes: in(backend)},
	{id: "J2", title: "in place: no copy, the same record", scopes: in(backend)},
	{id: "J3", title: "nothing is written into an external topology", scopes: in(backend)},
	{id: "J4", title: "external: verified, own dead letters made", scopes: in(backend, controllers)},

	{id: "K1", title: "strict order per key, also over retries", scopes: in(loop), only: []string{}, rest: keyLanes},
	{id: "K2", title: "the publisher gives the key", scopes: in(loop), only: []string{}, rest: keyLanes},
	{id: "K3", title: "skip: only the failed message dies", scopes: in(pure, loop), only: []string{}, rest: keyLanes},
	{id: "K4", title: "fail all: the rest of the key dies", scopes: in(pure, loop), only: []string{}, rest: keyLanes},
	{id: "K5", title: "poison survives a restart", later: sequencing},
	{id: "K6", title: "shards are immutable, keys run concurrently", later: sequencing},
	{id: "K7", title: "pending messages of a key are bounded", later: sequencing},
	{id: "K8", title: "sequenced needs dead letters and a tier", later: sequencing},
	{id: "K9", title: "sequenced topologies scale", later: sequencing},

	{id: "L1", title: "when to scale", later: scaling},
	{id: "L2", title: "what counts as backlog", later: scaling},
	{id: "L3", title: "how far one decision may jump", later: scaling},

	{id: "M1", title: "reconnect with backoff, without end", scopes: in(backend), not: []string{"memory"}},
	{id: "M2", title: "an optional bound that resets when healthy", scopes: in(backend), not: []string{"memory"}},
	{id: "M3", title: "late outcomes never meet a new connection", scopes: in(loop, backend), not: []string{"memory"}},

	{id: "N1", title: "shutdown: hand back, finish, give up in time", scopes: in(loop, backend)},
	{id: "N2", title: "exit codes, the highest wins", scopes: in(loop)},
	{id: "N3", title: "nothing of ours stays behind", scopes: in(loop, backend)},
	{id: "N4", title: "one process, many consumers and drains", scopes: in(loop)},

	{id: "O1", title: "the audit record", scopes: in(loop)},
	{id: "O2", title: "audit of timeouts, panics, dead letters; sinks fail", scopes: in(loop)},
	{id: "O3", title: "built-in audit sinks", scopes: in(loop)},

	{id: "P", title: "metric names, labels, buckets and log levels", scopes: in(loop)},

	{id: "Q1", title: "publish one, with headers, a batch; codecs", scopes: in(loop)},
	{id: "Q2", title: "confirmed and routed before it returns; ids", scopes: in(backend)},
	{id: "Q3", title: "a batch reports each message", scopes: in(loop, backend)},
	{id: "Q4", title: "reserved headers are refused", scopes: in(loop)},

	{id: "R1", title: "copy and ack in one transaction", later: exactlyOnce},
	{id: "R2", title: "transactions on other brokers", later: exactlyOnce},

	{id: "T", title: "defaults", scopes: in(loop)},
}
