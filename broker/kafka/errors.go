package kafka

import (
	"fmt"

	"github.com/shove-dev/shove/broker"
)

// mapError puts an error of the client library under one of the seam's.
func mapError(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", broker.ErrUnavailable, err)
}
