package codec

import (
	"fmt"
	"reflect"

	"google.golang.org/protobuf/proto"
)

// Checker is implemented by codecs that do not take every type, so that a wrong pair is an error at start instead of
// a dead letter for every message.
type Checker interface {
	// Check says what is wrong with handling or publishing values of the type; nil: nothing.
	Check(reflect.Type) error
}

// Check says whether a codec takes values of type T. A codec that is no Checker takes every type.
func Check[T any](c Codec) error {
	k, ok := c.(Checker)
	if !ok {
		return nil
	}
	return k.Check(reflect.TypeFor[T]())
}

// Check refuses generated Protocol Buffers messages, whose JSON form encoding/json does not know.
func (jsonCodec) Check(t reflect.Type) error {
	if t.Implements(messageType) || reflect.PointerTo(t).Implements(messageType) {
		return fmt.Errorf("%s is a Protocol Buffers message: use codec.Protobuf, or a codec of your own for its JSON form", t)
	}
	return nil
}

// Check takes []byte, string and types made from them.
func (rawCodec) Check(t reflect.Type) error {
	if t.Kind() == reflect.String || t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Uint8 {
		return nil
	}
	return fmt.Errorf("%s is neither []byte nor string, which codec.Raw needs", t)
}

// Check takes generated messages and pointers to them.
func (protobufCodec) Check(t reflect.Type) error {
	if t.Kind() == reflect.Pointer && t.Implements(messageType) || t.Kind() != reflect.Pointer && reflect.PointerTo(t).Implements(messageType) {
		return nil
	}
	return fmt.Errorf("%s is not a generated Protocol Buffers message, which codec.Protobuf needs", t)
}

var messageType = reflect.TypeFor[proto.Message]()
