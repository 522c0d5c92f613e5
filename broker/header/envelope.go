package header

import (
	"encoding/json"
	"fmt"
)

// envelope is the body of a dead letter whose headers did not fit the broker's frame.
type envelope struct {
	Headers map[string]string `json:"headers"`
	Body    []byte            `json:"body"` // base64
}

// Envelope puts all headers and the body of a message into one JSON document (C9). Header values that are neither
// text nor a number are written as Go prints them.
func Envelope(h Map, body []byte) []byte {
	e := envelope{Headers: make(map[string]string, len(h)), Body: body}
	for name, v := range h {
		if s, ok := h.Text(name); ok {
			e.Headers[name] = s
		} else {
			e.Headers[name] = fmt.Sprint(v)
		}
	}
	b, err := json.Marshal(e)
	if err != nil { // a map of strings and bytes always marshals
		return body
	}
	return b
}
