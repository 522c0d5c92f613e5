package codec

import (
	"fmt"
	"reflect"

	"google.golang.org/protobuf/proto"
)

// Protobuf is the binary form of Protocol Buffers, for generated messages: a handler of *pb.Order or of pb.Order,
// and a publisher of *pb.Order.
var Protobuf Codec = protobufCodec{}

type protobufCodec struct{}

func (protobufCodec) ContentType() string { return "application/protobuf" }

func (c protobufCodec) Encode(v any) ([]byte, error) {
	m, ok := v.(proto.Message)
	if !ok {
		return nil, &Error{Kind: ErrEncode, ContentType: c.ContentType(), Type: typeName(v), Detail: "use a pointer to a generated message"}
	}
	if r := reflect.ValueOf(v); r.Kind() == reflect.Pointer && r.IsNil() {
		return nil, &Error{Kind: ErrEncode, ContentType: c.ContentType(), Type: typeName(v), Detail: "the message is nil"}
	}
	b, err := proto.Marshal(m)
	if err != nil {
		return nil, &Error{Kind: ErrEncode, ContentType: c.ContentType(), Type: typeName(v), Cause: err}
	}
	return b, nil
}

func (c protobufCodec) Decode(body []byte, v any) error {
	m, ok := target(v)
	if !ok {
		return &Error{Kind: ErrDecode, ContentType: c.ContentType(), Type: typeName(v), Detail: "use a generated message with this codec"}
	}
	if err := proto.Unmarshal(body, m); err != nil {
		return &Error{Kind: ErrDecode, ContentType: c.ContentType(), Type: typeName(v), Cause: err,
			Detail: fmt.Sprintf("not the wire form of %s", m.ProtoReflect().Descriptor().FullName())}
	}
	return nil
}

// target finds the message to fill: v itself (*pb.Order), or what it points to (**pb.Order), made where it is nil.
func target(v any) (proto.Message, bool) {
	r := reflect.ValueOf(v)
	if r.Kind() != reflect.Pointer || r.IsNil() {
		return nil, false
	}
	if m, ok := v.(proto.Message); ok {
		return m, true
	}
	e := r.Elem()
	if e.Kind() != reflect.Pointer {
		return nil, false
	}
	if e.IsNil() {
		if !e.Type().Implements(messageType) {
			return nil, false
		}
		e.Set(reflect.New(e.Type().Elem()))
	}
	m, ok := e.Interface().(proto.Message)
	return m, ok
}
