package kafka

import (
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/header"
	"github.com/shove-dev/shove/settle"
)

// target is the topic that a copy goes to.
func (p *plan) target(a settle.Action) string {
	switch a.Kind {
	case settle.Hold:
		return p.holds[a.Tier].name
	case settle.DeadLetter:
		return p.dead
	default:
		return p.main
	}
}

// copyOf is the copy that an action asks for: the original's key and value, its headers without those that would harm
// it, and those that are written anew (C9).
func copyOf(e *entry, in *broker.Settlement, topic string) *kgo.Record {
	o := e.record
	r := &kgo.Record{Topic: topic, Key: o.Key, Value: o.Value, Headers: make([]kgo.RecordHeader, 0, len(o.Headers)+len(in.Stamp)+1)}
	if in.Envelope == nil {
		for _, h := range o.Headers {
			if header.Keep(h.Key) {
				r.Headers = append(r.Headers, h)
			}
		}
	} else {
		r.Value = in.Envelope
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: contentType, Value: []byte("application/json")})
	}
	for _, f := range in.Stamp {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: f.Name, Value: text(f.Value)})
	}
	return r
}
