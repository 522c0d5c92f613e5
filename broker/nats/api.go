package nats

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	natsgo "github.com/nats-io/nats.go"

	"github.com/shove-dev/shove/broker"
)

// apiTimeout bounds one request to the JetStream API.
const apiTimeout = 10 * time.Second

// Subjects of the JetStream API (https://docs.nats.io/reference/reference-protocols/nats_api_reference).
const (
	apiStreamInfo     = "$JS.API.STREAM.INFO."
	apiStreamCreate   = "$JS.API.STREAM.CREATE."
	apiStreamUpdate   = "$JS.API.STREAM.UPDATE."
	apiStreamDelete   = "$JS.API.STREAM.DELETE."
	apiStreamPurge    = "$JS.API.STREAM.PURGE."
	apiStreamNames    = "$JS.API.STREAM.NAMES"
	apiConsumerInfo   = "$JS.API.CONSUMER.INFO."
	apiConsumerDelete = "$JS.API.CONSUMER.DELETE."
	apiConsumerCreate = "$JS.API.CONSUMER.DURABLE.CREATE."
	apiConsumerNext   = "$JS.API.CONSUMER.MSG.NEXT."
)

// settings is a configuration of a stream or consumer as the server writes it. What this package does not know is kept
// as it is, so that an update changes nothing else.
type settings map[string]json.RawMessage

func (s settings) text(key string) string {
	var out string
	_ = json.Unmarshal(s[key], &out)
	return out
}

func (s settings) number(key string) int64 {
	var out int64
	_ = json.Unmarshal(s[key], &out)
	return out
}

func (s settings) flag(key string) bool { return bytes.Equal(s[key], []byte("true")) }

func (s settings) list(key string) []string {
	var out []string
	_ = json.Unmarshal(s[key], &out)
	return out
}

// with is s with other values.
func (s settings) with(change map[string]any) (settings, error) {
	out := make(settings, len(s)+len(change))
	for k, v := range s {
		out[k] = v
	}
	for k, v := range change {
		raw, err := json.Marshal(v)
		if err != nil {
			return nil, fmt.Errorf("encode %s: %w", k, err)
		}
		out[k] = raw
	}
	return out, nil
}

type streamInfo struct {
	Config settings `json:"config"`
	State  struct {
		Messages uint64 `json:"messages"`
	} `json:"state"`
	// Total counts the subjects that the request's filter matches.
	Total int `json:"total"`
	// Now is the clock of the stream's leader.
	Now time.Time `json:"ts"`
}

type consumerInfo struct {
	Config     settings `json:"config"`
	AckPending uint64   `json:"num_ack_pending"`
	Pending    uint64   `json:"num_pending"`
}

// api sends one request to the JetStream API and reads its answer into out.
func (c *conn) api(ctx context.Context, subject string, in, out any) error {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return fmt.Errorf("encode a request: %w", err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	unwatch := c.watchDenied(subject, fail)
	defer unwatch()
	m, err := c.RequestMsgWithContext(ctx, &natsgo.Msg{Subject: subject, Data: body})
	switch {
	case errors.Is(err, natsgo.ErrNoResponders):
		return fmt.Errorf("no answer from JetStream: it is not enabled for this account, or has no leader: %w", broker.ErrUnavailable)
	case err != nil:
		if cause := context.Cause(ctx); errors.Is(cause, broker.ErrUnauthorized) {
			return cause
		}
		if interrupted(err) {
			return fmt.Errorf("no answer from JetStream: %w: %w", broker.ErrUnavailable, err)
		}
		return mapError(err)
	}
	var failed struct {
		Error *apiError `json:"error"`
	}
	if err := json.Unmarshal(m.Data, &failed); err != nil {
		return fmt.Errorf("an answer of JetStream does not parse: %w: %w", err, broker.ErrUnavailable)
	}
	if failed.Error != nil {
		return fmt.Errorf("%w: %w", failed.Error.seam(), failed.Error)
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(m.Data, out); err != nil {
		return fmt.Errorf("an answer of JetStream does not parse: %w: %w", err, broker.ErrUnavailable)
	}
	return nil
}

func (c *conn) stream(ctx context.Context, name string) (*streamInfo, error) {
	var out streamInfo
	if err := c.api(ctx, apiStreamInfo+name, nil, &out); err != nil {
		return nil, err
	}
	return &out, nil
}

// subjects counts the subjects of a stream that hold messages and match a filter.
func (c *conn) subjects(ctx context.Context, stream, filter string) (int, error) {
	var out streamInfo
	// An offset beyond the end leaves the list of them out of the answer.
	in := map[string]any{"subjects_filter": filter, "offset": 1 << 30}
	if err := c.api(ctx, apiStreamInfo+stream, in, &out); err != nil {
		return 0, err
	}
	return out.Total, nil
}

// streamOf finds the stream that takes a subject; empty: none.
func (c *conn) streamOf(ctx context.Context, subject string) (string, error) {
	var out struct {
		Streams []string `json:"streams"`
	}
	if err := c.api(ctx, apiStreamNames, map[string]any{"subject": subject}, &out); err != nil {
		return "", err
	}
	if len(out.Streams) == 0 {
		return "", nil
	}
	return out.Streams[0], nil
}

func (c *conn) consumer(ctx context.Context, stream, name string) (*consumerInfo, error) {
	var out consumerInfo
	if err := c.api(ctx, apiConsumerInfo+stream+"."+name, nil, &out); err != nil {
		return nil, err
	}
	return &out, nil
}

// setConsumer creates a durable consumer or changes it.
func (c *conn) setConsumer(ctx context.Context, stream string, cfg settings) error {
	in := map[string]any{"stream_name": stream, "config": cfg}
	return c.api(ctx, apiConsumerCreate+stream+"."+cfg.text("durable_name"), in, nil)
}
