package broker

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
)

// DecodeSection decodes a driver's own section of a spec (Config.Endpoint, Declaration.Options): one JSON object,
// of which it refuses what it does not know. The error has no prefix; the driver says whose section it is.
func DecodeSection(raw json.RawMessage, into any) error {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		if errors.Is(err, io.EOF) {
			return errors.New("is empty")
		}
		return errors.New(strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("has something after its end")
	}
	return nil
}
