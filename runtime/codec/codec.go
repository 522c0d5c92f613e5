// Package codec turns message bodies into values and back. A topology has one codec on each side; JSON is the
// default, Raw and Protobuf are built in, and anything with the three methods of Codec plugs in.
package codec

import (
	"errors"
	"fmt"
)

// Codec encodes and decodes message bodies. It is safe for concurrent use.
//
// Decode is given a pointer to what it has to fill. An error means that the body will never decode: the message is
// dead-lettered (G1), so an implementation returns one only for what depends on the body alone. Decode must neither
// keep body nor write to it. A codec's errors are logged and travel in headers: they must not quote the body.
type Codec interface {
	Encode(v any) ([]byte, error)
	Decode(body []byte, v any) error
	// ContentType is sent with a message and shown to people, such as "application/json".
	ContentType() string
}

var (
	// ErrDecode: the body is not what the codec and the handler's type expect. It comes as an *Error.
	ErrDecode = errors.New("body does not decode")
	// ErrEncode: the value cannot be encoded by this codec. It comes as an *Error.
	ErrEncode = errors.New("value does not encode")
)

// Error is a failed Encode or Decode. Its text says where and against which type, and never holds any of the body:
// the texts of encoding/json and of a type's own methods often do. The cause is there for errors.As.
type Error struct {
	// Kind is ErrDecode or ErrEncode.
	Kind error
	// ContentType is the codec's.
	ContentType string
	// Type is the Go type decoded into or encoded from.
	Type string
	// Detail is what is known of the place and the problem; empty: nothing.
	Detail string
	// Cause is not part of the text. Nil after a panic in a type's own methods.
	Cause error
}

func (e *Error) Error() string {
	text := fmt.Sprintf("%v: %s as %s", e.Kind, e.ContentType, e.Type)
	if e.Detail != "" {
		text += ": " + e.Detail
	}
	return text
}

// Unwrap yields the kind and the cause.
func (e *Error) Unwrap() []error {
	if e.Cause == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.Cause}
}

// Decode calls a codec and turns what goes wrong in it, a panic included, into an *Error of kind ErrDecode. A type's
// own decoding methods, and custom codecs, may panic on input that they did not expect.
func Decode(c Codec, body []byte, v any) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &Error{Kind: ErrDecode, ContentType: c.ContentType(), Type: typeName(v), Detail: "panic while decoding"}
		}
	}()
	err = c.Decode(body, v)
	if err == nil || errors.Is(err, ErrDecode) {
		return err
	}
	return &Error{Kind: ErrDecode, ContentType: c.ContentType(), Type: typeName(v), Cause: err}
}

// Encode calls a codec and turns what goes wrong in it, a panic included, into an *Error of kind ErrEncode.
func Encode(c Codec, v any) (body []byte, err error) {
	defer func() {
		if p := recover(); p != nil {
			body, err = nil, &Error{Kind: ErrEncode, ContentType: c.ContentType(), Type: typeName(v), Detail: "panic while encoding"}
		}
	}()
	body, err = c.Encode(v)
	if err == nil || errors.Is(err, ErrEncode) {
		return body, err
	}
	return nil, &Error{Kind: ErrEncode, ContentType: c.ContentType(), Type: typeName(v), Cause: err}
}

func typeName(v any) string { return fmt.Sprintf("%T", v) }
