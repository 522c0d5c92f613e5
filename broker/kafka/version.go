package kafka

import (
	"context"
	"strings"

	"github.com/twmb/franz-go/pkg/kadm"
)

// serverVersion guesses from the requests that a broker knows, because Kafka does not tell its version. Empty: unknown.
func serverVersion(ctx context.Context, c *kadm.Client) string {
	all, err := c.ApiVersions(ctx)
	if err != nil {
		return ""
	}
	for _, v := range all.Sorted() {
		if v.Err == nil {
			return tidyVersion(v.VersionGuess())
		}
	}
	return ""
}

// tidyVersion makes "4.1" of "v4.1", and says what is not exact.
func tidyVersion(guess string) string {
	if strings.Contains(guess, "unknown") {
		guess = "unknown, " + strings.NewReplacer("unknown custom version", "", "unknown", "").Replace(guess)
		return strings.Join(strings.Fields(guess), " ")
	}
	return strings.ReplaceAll(guess, "v", "")
}
