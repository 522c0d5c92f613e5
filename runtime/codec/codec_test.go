package codec_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/shove-dev/shove/runtime/codec"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type order struct {
	ID   int               `json:"id"`
	Name string            `json:"name"`
	At   time.Time         `json:"at,omitzero"`
	Tags map[string]int    `json:"tags,omitempty"`
	Odd  panicky           `json:"odd,omitzero"`
	Raw  json.RawMessage   `json:"raw,omitempty"`
	More map[string]*order `json:"more,omitempty"`
}

// panicky is what a careless type does on input that it did not expect.
type panicky struct{ b byte }

func (p *panicky) UnmarshalJSON(b []byte) error {
	p.b = b[1000]
	return nil
}

func (p panicky) MarshalJSON() ([]byte, error) { panic("no") }

func TestRoundTrip(t *testing.T) {
	t.Run("Q1_json", func(t *testing.T) {
		want := order{ID: 7, Name: "büch", Tags: map[string]int{"a": 1}}
		got := encodeDecode[order](t, codec.JSON, want)
		if d := cmp.Diff(want, got, cmp.AllowUnexported(panicky{})); d != "" {
			t.Error(d)
		}
	})
	t.Run("Q1_json_pointer", func(t *testing.T) {
		got := encodeDecode[*order](t, codec.JSON, &order{ID: 7})
		if got == nil || got.ID != 7 {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("Q1_raw_bytes", func(t *testing.T) {
		want := []byte{0, 255, 1}
		if got := encodeDecode[[]byte](t, codec.Raw, want); !bytes.Equal(got, want) {
			t.Errorf("got %v", got)
		}
	})
	t.Run("Q1_raw_string", func(t *testing.T) {
		if got := encodeDecode[string](t, codec.Raw, "text"); got != "text" {
			t.Errorf("got %q", got)
		}
	})
	t.Run("Q1_raw_named", func(t *testing.T) {
		type text string
		if got := encodeDecode[text](t, codec.Raw, "text"); got != "text" {
			t.Errorf("got %q", got)
		}
		if got := encodeDecode[json.RawMessage](t, codec.Raw, json.RawMessage(`{}`)); string(got) != "{}" {
			t.Errorf("got %q", got)
		}
	})
	t.Run("Q1_protobuf_pointer", func(t *testing.T) {
		got := encodeDecode[*durationpb.Duration](t, codec.Protobuf, durationpb.New(3*time.Second))
		if got.AsDuration() != 3*time.Second {
			t.Errorf("got %v", got)
		}
	})
	t.Run("Q1_protobuf_value", func(t *testing.T) {
		b, err := codec.Encode(codec.Protobuf, wrapperspb.String("x"))
		if err != nil {
			t.Fatal(err)
		}
		var got wrapperspb.StringValue
		if err := codec.Decode(codec.Protobuf, b, &got); err != nil || got.Value != "x" {
			t.Errorf("got %q, %v", got.Value, err)
		}
	})
	t.Run("Q1_custom", func(t *testing.T) {
		if got := encodeDecode[int](t, upper{}, 5); got != 5 {
			t.Errorf("got %d", got)
		}
	})
}

// upper is a codec of somebody else: it fails with errors of its own and panics on a zero.
type upper struct{}

func (upper) ContentType() string { return "application/x-upper" }

func (upper) Encode(v any) ([]byte, error) { return []byte(strings.Repeat("A", v.(int))), nil }

func (upper) Decode(b []byte, v any) error {
	if bytes.Contains(b, []byte("b")) {
		return errors.New("not an A: " + string(b))
	}
	*v.(*int) = len(b)
	return nil
}

func encodeDecode[T any](t *testing.T, c codec.Codec, v T) T {
	t.Helper()
	b, err := codec.Encode(c, v)
	if err != nil {
		t.Fatalf("encode: %v", err)
	}
	var got T
	if err := codec.Decode(c, b, &got); err != nil {
		t.Fatalf("decode: %v", err)
	}
	return got
}

func TestDecodeErrors(t *testing.T) {
	const secret = "s3cr3t"
	cases := map[string]struct {
		codec codec.Codec
		body  string
		into  any
		want  string
	}{
		"empty":          {codec.JSON, "", &order{}, "body does not decode: application/json as *codec_test.order: the body is empty"},
		"syntax":         {codec.JSON, `{"id":7,` + secret, &order{}, "body does not decode: application/json as *codec_test.order: not JSON at byte 9 of 14"},
		"truncated":      {codec.JSON, `{"id":7`, &order{}, "body does not decode: application/json as *codec_test.order: not JSON at byte 7 of 7"},
		"trailing":       {codec.JSON, `{} ` + secret, &order{}, "body does not decode: application/json as *codec_test.order: not JSON at byte 4 of 9"},
		"type":           {codec.JSON, `{"id":"` + secret + `"}`, &order{}, "body does not decode: application/json as *codec_test.order: the value that ends at byte 14 does not fit the Go type int"},
		"number":         {codec.JSON, `{"id":12345678901234567890}`, &order{}, "body does not decode: application/json as *codec_test.order: the value that ends at byte 26 does not fit the Go type int"},
		"map key":        {codec.JSON, `{"tags":{"` + secret + `":"x"}}`, &order{}, "body does not decode: application/json as *codec_test.order: the value that ends at byte 21 does not fit the Go type int"},
		"own method":     {codec.JSON, `{"at":"` + secret + `"}`, &order{}, "body does not decode: application/json as *codec_test.order"},
		"own panic":      {codec.JSON, `{"odd":"` + secret + `"}`, &order{}, "body does not decode: application/json as *codec_test.order: panic while decoding"},
		"protobuf":       {codec.Protobuf, "\xff" + secret, &durationpb.Duration{}, "body does not decode: application/protobuf as *durationpb.Duration: not the wire form of google.protobuf.Duration"},
		"protobuf type":  {codec.Protobuf, "", new(int), "body does not decode: application/protobuf as *int: use a generated message with this codec"},
		"raw type":       {codec.Raw, "x", new(int), "body does not decode: application/octet-stream as *int: use []byte or string with this codec"},
		"raw nil":        {codec.Raw, "x", nil, "body does not decode: application/octet-stream as <nil>: use []byte or string with this codec"},
		"custom":         {upper{}, "b" + secret, new(int), "body does not decode: application/x-upper as *int"},
		"custom panic":   {upper{}, "A", new(string), "body does not decode: application/x-upper as *string: panic while decoding"},
		"json not a ptr": {codec.JSON, "{}", order{}, "body does not decode: application/json as codec_test.order"},
	}
	for name, c := range cases {
		t.Run("G1/"+name, func(t *testing.T) {
			err := codec.Decode(c.codec, []byte(c.body), c.into)
			if !errors.Is(err, codec.ErrDecode) {
				t.Fatalf("got %v, want ErrDecode", err)
			}
			if d := cmp.Diff(c.want, err.Error()); d != "" {
				t.Error(d)
			}
			if strings.Contains(err.Error(), secret) {
				t.Errorf("the body is in the error text: %v", err)
			}
		})
	}
}

func TestEncodeErrors(t *testing.T) {
	cases := map[string]struct {
		codec codec.Codec
		v     any
		want  string
	}{
		"type":         {codec.JSON, func() {}, "value does not encode: application/json as func(): JSON has no form for the Go type func()"},
		"own panic":    {codec.JSON, order{Odd: panicky{1}}, "value does not encode: application/json as codec_test.order: panic while encoding"},
		"raw":          {codec.Raw, 7, "value does not encode: application/octet-stream as int: use []byte or string with this codec"},
		"raw nil":      {codec.Raw, nil, "value does not encode: application/octet-stream as <nil>: use []byte or string with this codec"},
		"protobuf":     {codec.Protobuf, order{}, "value does not encode: application/protobuf as codec_test.order: use a pointer to a generated message"},
		"protobuf nil": {codec.Protobuf, (*durationpb.Duration)(nil), "value does not encode: application/protobuf as *durationpb.Duration: the message is nil"},
		"custom panic": {upper{}, "x", "value does not encode: application/x-upper as string: panic while encoding"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := codec.Encode(c.codec, c.v)
			if !errors.Is(err, codec.ErrEncode) {
				t.Fatalf("got %v, want ErrEncode", err)
			}
			if d := cmp.Diff(c.want, err.Error()); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestRawDecodeOwnsItsBytes(t *testing.T) {
	body := []byte("body")
	var got []byte
	if err := codec.Decode(codec.Raw, body, &got); err != nil {
		t.Fatal(err)
	}
	got[0] = 'B'
	if string(body) != "body" {
		t.Errorf("changing what the handler got changed the message: %q", body)
	}
}

func TestCheck(t *testing.T) {
	cases := map[string]struct {
		err  error
		good bool
	}{
		"json struct":       {codec.Check[order](codec.JSON), true},
		"json protobuf":     {codec.Check[*durationpb.Duration](codec.JSON), false},
		"raw bytes":         {codec.Check[[]byte](codec.Raw), true},
		"raw string":        {codec.Check[string](codec.Raw), true},
		"raw struct":        {codec.Check[order](codec.Raw), false},
		"protobuf pointer":  {codec.Check[*durationpb.Duration](codec.Protobuf), true},
		"protobuf value":    {codec.Check[durationpb.Duration](codec.Protobuf), true},
		"protobuf struct":   {codec.Check[order](codec.Protobuf), false},
		"protobuf ptr ptr":  {codec.Check[**durationpb.Duration](codec.Protobuf), false},
		"custom everything": {codec.Check[chan int](upper{}), true},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			if (c.err == nil) != c.good {
				t.Errorf("got %v", c.err)
			}
		})
	}
}

func FuzzDecode(f *testing.F) {
	for _, s := range []string{"", "{}", `{"id":1}`, `{"more":{"a":{"more":{}}}}`, "\x08\x01", "\xff\xff", `{"odd":1}`, "[[[["} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		before := bytes.Clone(body)
		for _, c := range []codec.Codec{codec.JSON, codec.Raw, codec.Protobuf, upper{}} {
			for _, into := range []any{&order{}, new([]byte), new(string), new(*durationpb.Duration), new(int), new(any)} {
				if err := codec.Decode(c, body, into); err != nil && !errors.Is(err, codec.ErrDecode) {
					t.Errorf("%s into %T: %v is not ErrDecode", c.ContentType(), into, err)
				}
			}
		}
		if !bytes.Equal(before, body) {
			t.Error("decoding changed the body")
		}
	})
}
