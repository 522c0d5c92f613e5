package topology

import "strings"

// Kind names a broker technology, in lower case as in a Broker's spec.
type Kind string

const (
	RabbitMQ Kind = "rabbitmq"
	Kafka    Kind = "kafka"
	NATS     Kind = "nats"
	Redis    Kind = "redis"
	SQS      Kind = "sqs"
	Memory   Kind = "memory"
)

// Physical is the name that a logical queue of t has on a broker. It is one to one: two logical names never
// become the same physical one.
//
//   - RabbitMQ, Kafka, in-memory: the logical name.
//   - NATS: streams and durables allow no dot; '.' becomes '~', which no logical name contains.
//   - Redis: all keys of one topology share one hash tag, so that a script may touch them together on a cluster:
//     "{orders}", "{orders}-hold-5s", and "{orders}:my-dead-orders" for a name that does not begin with the queue's. The
//     tag of a topology that reads another one's stream (source) is that stream's: "{orders}:audit-hold-5s".
//   - SQS: only letters, digits, '-' and '_' are allowed; '_' becomes "__" and '.' becomes "_d". Queues of a
//     sequenced topology are FIFO queues, whose names end in ".fifo".
func (t Topology) Physical(kind Kind, name string) string {
	switch kind {
	case NATS:
		return strings.ReplaceAll(name, ".", "~")
	case Redis:
		tag := t.Source
		if tag == "" {
			tag = t.Queue
		}
		if rest, ok := strings.CutPrefix(name, tag); ok && (rest == "" || rest[0] == '-') {
			return "{" + tag + "}" + rest
		}
		return "{" + tag + "}:" + name
	case SQS:
		n := sqsEscape.Replace(name)
		if t.Sequenced != nil {
			n += ".fifo"
		}
		return n
	default:
		return name
	}
}

var sqsEscape = strings.NewReplacer("_", "__", ".", "_d")
