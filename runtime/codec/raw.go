package codec

import (
	"bytes"
	"reflect"
)

// Raw passes bodies through: for handlers and publishers of []byte, string, or a type made from either. A handler
// gets bytes of its own and may change them.
var Raw Codec = rawCodec{}

type rawCodec struct{}

func (rawCodec) ContentType() string { return "application/octet-stream" }

func (c rawCodec) Encode(v any) ([]byte, error) {
	switch b := v.(type) {
	case []byte:
		return b, nil
	case string:
		return []byte(b), nil
	}
	switch r := reflect.ValueOf(v); {
	case isBytes(r):
		return r.Bytes(), nil
	case r.Kind() == reflect.String:
		return []byte(r.String()), nil
	}
	return nil, &Error{Kind: ErrEncode, ContentType: c.ContentType(), Type: typeName(v), Detail: "use []byte or string with this codec"}
}

func (c rawCodec) Decode(body []byte, v any) error {
	switch p := v.(type) {
	case *[]byte:
		*p = bytes.Clone(body)
		return nil
	case *string:
		*p = string(body)
		return nil
	}
	if r := reflect.ValueOf(v); r.Kind() == reflect.Pointer && !r.IsNil() {
		switch e := r.Elem(); {
		case isBytes(e):
			e.SetBytes(bytes.Clone(body))
			return nil
		case e.Kind() == reflect.String:
			e.SetString(string(body))
			return nil
		}
	}
	return &Error{Kind: ErrDecode, ContentType: c.ContentType(), Type: typeName(v), Detail: "use []byte or string with this codec"}
}

func isBytes(v reflect.Value) bool {
	return v.Kind() == reflect.Slice && v.Type().Elem().Kind() == reflect.Uint8
}
