// Command capabilities writes the table of docs/capabilities.md: what each registered driver says that it can do. It
// replaces what is between the two marks and leaves the rest of the page.
//
//	go run ./hack/capabilities docs/capabilities.md
package main

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"time"

	"github.com/shove-dev/shove/internal/drivers"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: capabilities PAGE")
		os.Exit(2)
	}
	if err := update(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "capabilities:", err)
		os.Exit(1)
	}
}

const (
	begin = "<!-- begin: made by hack/capabilities from the drivers; make generate writes it -->\n"
	end   = "<!-- end -->\n"
)

func update(page string) error {
	b, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	text, err := replace(string(b), drivers.Columns())
	if err != nil {
		return fmt.Errorf("%s: %w", page, err)
	}
	if text == string(b) {
		return nil
	}
	return os.WriteFile(page, []byte(text), 0o644) //nolint:gosec // a page of documentation
}

func replace(page string, columns []drivers.Column) (string, error) {
	before, rest, ok := strings.Cut(page, begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return "", errors.New("the marks of the table are not there")
	}
	t, err := table(columns)
	return before + begin + t + end + after, err
}

// without says of each capability what its absence means. A field of broker.Capabilities without a line here is an
// error, and so is a line without a field.
var without = map[string]string{
	"Durable":              "Messages do not survive a restart of the broker.",
	"HeldInBroker":         "A held message waits in the consumer's memory and is lost from there with it; the broker redelivers it.",
	"ConsumersMoveHeld":    "Held messages that are due come back by themselves. With \"yes\", as on Redis and on NATS before 2.12, they wait on until a consumer runs.",
	"CountsDeliveries":     "The broker does not tell how often it delivered a message: `DeliveryCount` is absent, and `crashLimit` has no effect.",
	"CrashLimitDefault":    "`crashLimit` is off unless it is set.",
	"Partition":            "The metadata has no partition.",
	"Offset":               "The metadata has no offset.",
	"BrokerTimestamp":      "A message has a timestamp only where its publisher set one.",
	"Sequenced":            "`sequenced` is refused.",
	"TimeoutLeavesPending": "A handler that runs into its deadline is a retry. With \"yes\", its message gets no outcome unless `handlerTimeoutOutcome` says one, and comes again when its lease is over.",
	"CopiesAtomically":     "A crash between a copy and the acknowledgement of its original leaves both.",
	"ExactlyOnce":          "`exactlyOnce` has no effect: a crash between copy and acknowledgement makes a duplicate.",
	"WaitsInBroker":        "A message that waits in place is kept by the consumer, which holds its lease meanwhile.",
	"DedupesCopies":        "A copy whose confirm was lost is written again: a retry or a dead letter may then exist twice, with one message id.",
	"ReadsHolds":           "A held message that is due returns to the main queue. With \"yes\" it is handled straight from its hold queue.",
	"ResendsSafely":        "A publish whose confirm was lost is unknown at once. With \"yes\" it is repeated, and stored once.",
	"Bindings":             "A publisher reaches the queue only directly.",
	"Connected":            "There is no connection that could be lost.",
	"GivesBackUncounted":   "Draining a consumer raises the delivery count of what it gives back (on RabbitMQ before 4.3), so keep `crashLimit` generous.",
	"MaxHeaderBytes":       "About how much the headers of one message may take; a copy that would not fit loses its history first, then its details.",
	"HoldLateness":         "How late a held message is at most: 99th percentile with 20,000 held.",
}

func table(columns []drivers.Column) (string, error) {
	values := make([]reflect.Value, len(columns))
	head, line := "| capability |", "|---|"
	for i, c := range columns {
		values[i] = reflect.ValueOf(c.Driver.Capabilities(c.Options))
		head += " " + c.Name + " |"
		line += "---|"
	}
	var b strings.Builder
	b.WriteString(head + " what \"no\" means |\n" + line + "---|\n")
	fields := reflect.VisibleFields(values[0].Type())
	for _, f := range fields {
		meaning, ok := without[f.Name]
		if !ok {
			return "", fmt.Errorf("capability %s: say in hack/capabilities what its absence means", f.Name)
		}
		fmt.Fprintf(&b, "| `%s` |", f.Name)
		for _, v := range values {
			b.WriteString(" " + cell(v.FieldByIndex(f.Index).Interface()) + " |")
		}
		b.WriteString(" " + meaning + " |\n")
	}
	if len(without) != len(fields) {
		return "", errors.New("hack/capabilities explains a capability that is not there")
	}
	return b.String(), nil
}

func cell(v any) string {
	switch v := v.(type) {
	case bool:
		if v {
			return "yes"
		}
		return "no"
	case int:
		if v == 0 {
			return "no limit"
		}
		return fmt.Sprintf("%d KiB", (v+512)/1024)
	case time.Duration:
		if v == 0 {
			return "–"
		}
		return v.String()
	default:
		return fmt.Sprint(v)
	}
}
