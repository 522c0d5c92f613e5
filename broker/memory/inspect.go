package memory

import (
	"fmt"
	"slices"
	"time"

	"github.com/shove-dev/shove/broker/header"
)

// Raw is a message as the broker stores it: nothing is added to what Put is given.
type Raw struct {
	Body        []byte
	Headers     header.Map
	ContentType string
	Key         string
	// Death is what the broker itself would have recorded of a message that it dead-lettered.
	Death *header.Death
}

// Put stores messages as a foreign program would, without the headers that shove's publishers add.
func (s *Server) Put(queue string, msgs ...Raw) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for i, r := range msgs {
		m := &stored{
			body: append([]byte(nil), r.Body...), headers: cloneHeaders(r.Headers, 0),
			contentType: r.ContentType, key: r.Key, death: r.Death,
		}
		q, err := s.admit(queue, m)
		if err != nil {
			return fmt.Errorf("put message %d: %w", i, err)
		}
		s.add(q, m, now)
	}
	return nil
}

// Peek returns the ready messages of a queue in the order in which they would be delivered, without taking them. It
// is nil for a queue that does not exist.
func (s *Server) Peek(queue string) []Raw {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.peek(s.queues[queue])
}

// Take returns the ready messages of a queue in order and removes them.
func (s *Server) Take(queue string) []Raw {
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.queues[queue]
	raw := s.peek(q)
	for range raw {
		q.pop()
	}
	return raw
}

func (s *Server) peek(q *queue) []Raw {
	if q == nil {
		return nil
	}
	ms := slices.Clone([]*stored(q.back))
	slices.SortFunc(ms, func(a, b *stored) int { return int(int64(a.seq) - int64(b.seq)) })
	for m := q.fresh.head; m != nil; m = m.next {
		ms = append(ms, m)
	}
	raw := make([]Raw, len(ms))
	for i, m := range ms {
		raw[i] = Raw{
			Body: append([]byte(nil), m.body...), Headers: cloneHeaders(m.headers, 0),
			ContentType: m.contentType, Key: m.key, Death: m.death,
		}
	}
	return raw
}

// Counts says how many messages of a queue are ready and how many are delivered and unsettled.
func (s *Server) Counts(queue string) (ready, unsettled int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if q := s.queues[queue]; q != nil {
		return q.ready(), q.unsettled
	}
	return 0, 0
}
