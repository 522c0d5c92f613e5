package metrics

// Label names and the metric names are a contract: dashboards made for the Rust original read them (P).
const (
	labelTopic   = "topic"
	labelGroup   = "consumer_group"
	labelOutcome = "outcome"
	labelReason  = "reason"
	labelBackend = "backend"
	labelKind    = "kind"
	labelResult  = "result"
	labelGen     = "generation"
)

// Kinds of collectors.
const (
	counter   = "counter"
	gauge     = "gauge"
	histogram = "histogram"
)

// definition is one metric. The documentation's table is made from the same data.
type definition struct {
	name    string
	kind    string
	labels  []string
	help    string
	buckets []float64
}

// consumerLabels are the labels of everything that one consumer moves.
var consumerLabels = []string{labelTopic, labelGroup}

// durationBuckets go from 1 ms to 10 s, sizeBuckets from 256 B to 10 MiB (P).
var (
	durationBuckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
	sizeBuckets     = []float64{256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 10 << 20}
)

var (
	defConsumed = definition{name: "shove_messages_consumed_total", kind: counter, labels: with(consumerLabels, labelOutcome),
		help: "Messages that got an outcome: ack, retry, reject or defer. A message that never reaches its handler counts as reject, one that is not due yet as defer."}
	defFailed = definition{name: "shove_messages_failed_total", kind: counter, labels: with(consumerLabels, labelReason),
		help: "Messages that failed, by reason: those of a death, and timeout and panic, which a retry may still mend."}
	defDiscarded = definition{name: "shove_messages_discarded_total", kind: counter, labels: with(consumerLabels, labelReason),
		help: "Messages that were lost because their topology has no dead-letter queue, by reason. Worth an alert."}
	defDuration = definition{name: "shove_message_processing_duration_seconds", kind: histogram, labels: with(consumerLabels, labelOutcome), buckets: durationBuckets,
		help: "Time from the start of decoding to the outcome, by outcome."}
	defSize = definition{name: "shove_message_size_bytes", kind: histogram, labels: consumerLabels, buckets: sizeBuckets,
		help: "Body sizes of received messages."}
	defInflight = definition{name: "shove_messages_inflight", kind: gauge, labels: consumerLabels,
		help: "Messages that are received and not settled yet."}
	defAbandoned = definition{name: "shove_handlers_abandoned", kind: gauge, labels: consumerLabels,
		help: "Handler calls that still run although their deadline is over and their message is settled."}
	defMalformed = definition{name: "shove_malformed_headers_total", kind: counter, labels: consumerLabels,
		help: "Headers of ours that could not be understood and were taken for absent."}
	defSuspects = definition{name: "shove_suspect_messages_total", kind: counter, labels: consumerLabels,
		help: "Messages that ran alone because they may be what ends the process."}
	defReconnects = definition{name: "shove_reconnects_total", kind: counter, labels: consumerLabels,
		help: "Attempts to subscribe again after a subscription was lost."}
	defUp = definition{name: "shove_consumer_up", kind: gauge, labels: consumerLabels,
		help: "1 while the consumer holds a subscription, else 0."}
	defDeadHandled = definition{name: "shove_dead_letters_handled_total", kind: counter, labels: consumerLabels,
		help: "Dead letters that a dead handler took."}
	defDeadFailed = definition{name: "shove_dead_letter_handler_failures_total", kind: counter, labels: with(consumerLabels, labelReason),
		help: "Calls of a dead handler that ended in a panic or a timeout."}
	defAuditFailures = definition{name: "shove_audit_failures_total", kind: counter, labels: []string{labelTopic},
		help: "Audit records that their sink did not take."}
	defPublished = definition{name: "shove_messages_published_total", kind: counter, labels: []string{labelTopic, labelOutcome},
		help: "Messages given to a publisher: success (confirmed), error (known not to be stored) or unknown."}
	defPublishDuration = definition{name: "shove_message_publish_duration_seconds", kind: histogram, labels: []string{labelTopic, labelOutcome}, buckets: durationBuckets,
		help: "Time of a publish call from the first attempt to the last answer, by its worst outcome."}
	defBackendErrors = definition{name: "shove_backend_errors_total", kind: counter, labels: []string{labelBackend, labelKind},
		help: "Errors of a broker, by kind: connection, publish, consume, topology or ack."}
	defReloads = definition{name: "shove_config_reloads_total", kind: counter, labels: []string{labelResult},
		help: "Configurations that the watcher found: applied, restart_required (applied but for what needs a restart) or refused (the last good one stays)."}
	defGeneration = definition{name: "shove_config_info", kind: gauge, labels: []string{labelGen},
		help: "1, with the generation of the configuration in force as label."}
)

// definitions lists every metric of the runtime.
var definitions = []definition{
	defConsumed, defFailed, defDiscarded, defDuration, defSize, defInflight, defAbandoned, defMalformed, defSuspects, defReconnects, defUp,
	defDeadHandled, defDeadFailed, defAuditFailures, defPublished, defPublishDuration, defBackendErrors, defReloads, defGeneration,
}

func with(labels []string, more ...string) []string {
	return append(append(make([]string, 0, len(labels)+len(more)), labels...), more...)
}
