package codec

import (
	"encoding/json"
	"errors"
	"fmt"
)

// JSON is encoding/json. It is the default. Unknown fields are ignored, so that a publisher may add some first.
var JSON Codec = jsonCodec{}

type jsonCodec struct{}

func (jsonCodec) ContentType() string { return "application/json" }

func (c jsonCodec) Encode(v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, &Error{Kind: ErrEncode, ContentType: c.ContentType(), Type: typeName(v), Detail: encodeDetail(err), Cause: err}
	}
	return b, nil
}

func (c jsonCodec) Decode(body []byte, v any) error {
	if err := json.Unmarshal(body, v); err != nil {
		return &Error{Kind: ErrDecode, ContentType: c.ContentType(), Type: typeName(v), Detail: decodeDetail(body, err), Cause: err}
	}
	return nil
}

func encodeDetail(err error) string {
	if e, ok := errors.AsType[*json.UnsupportedTypeError](err); ok {
		return fmt.Sprintf("JSON has no form for the Go type %s", e.Type)
	}
	return ""
}

// decodeDetail says where decoding failed without quoting the body.
func decodeDetail(body []byte, err error) string {
	if len(body) == 0 {
		return "the body is empty"
	}
	if e, ok := errors.AsType[*json.SyntaxError](err); ok {
		return fmt.Sprintf("not JSON at byte %d of %d", e.Offset, len(body))
	}
	if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		// e.Value may hold the value itself ("number 12"), and e.Field may hold a map's key: neither is shown.
		return fmt.Sprintf("the value that ends at byte %d does not fit the Go type %s", e.Offset, e.Type)
	}
	return ""
}
