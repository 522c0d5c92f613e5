package rabbitmq

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/shove-dev/shove/broker"
)

const (
	managementTimeout = 30 * time.Second
	// maxAnswer bounds an answer; a list of 100,000 queues has about 60 MB.
	maxAnswer = 512 << 20
	// singleReads is how many queues are read one by one before the list of all of them is read instead.
	singleReads = 8
)

// management is the server's HTTP API. It only reads.
type management struct {
	dialer *dialer
	base   *url.URL
	http   *http.Client
}

func newManagement(d *dialer) *management {
	if d.endpoint.management == nil {
		return nil
	}
	transport := &http.Transport{
		MaxIdleConnsPerHost: 4,
		IdleConnTimeout:     time.Minute,
		Proxy:               nil, // an internal address: a proxy of the environment would see the credentials
	}
	// Asked at every connection, so that rotated certificates are used.
	transport.DialTLSContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := d.tlsConfig(true)
		if err != nil {
			return nil, err
		}
		if c.ServerName == "" {
			c.ServerName = d.endpoint.management.Hostname()
		}
		return (&tls.Dialer{Config: c}).DialContext(ctx, network, addr)
	}
	return &management{dialer: d, base: d.endpoint.management, http: &http.Client{
		Transport: transport,
		Timeout:   managementTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse
		},
	}}
}

func (m *management) close() { m.http.CloseIdleConnections() }

// get reads path, whose segments are escaped, into out.
func (m *management) get(ctx context.Context, path string, query url.Values, out any) error {
	err := m.read(ctx, path, query, out)
	if err != nil {
		return fmt.Errorf("management API of RabbitMQ at %s: GET %s: %w", m.base.Host, path, err)
	}
	return nil
}

func (m *management) read(ctx context.Context, path string, query url.Values, out any) error {
	address := m.base.Scheme + "://" + m.base.Host + m.base.EscapedPath() + path
	if len(query) > 0 {
		address += "?" + query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return fmt.Errorf("%w: %w", broker.ErrUnsupported, err)
	}
	creds, err := m.dialer.credentials(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", broker.ErrUnavailable, err)
	}
	switch {
	case creds.Token != "":
		req.Header.Set("Authorization", "Bearer "+creds.Token)
	case creds.Username != "" || creds.Password != "":
		req.SetBasicAuth(creds.Username, creds.Password)
	default:
		req.SetBasicAuth("guest", "guest")
	}
	res, err := m.http.Do(req)
	if err != nil {
		if e, ok := errors.AsType[*url.Error](err); ok {
			err = e.Err // without the address, which is in the error already
		}
		return fmt.Errorf("%w: %w", broker.ErrUnavailable, err)
	}
	defer res.Body.Close()
	switch {
	case res.StatusCode == http.StatusUnauthorized, res.StatusCode == http.StatusForbidden:
		return fmt.Errorf("%w: %s: the user needs the right credentials, the tag \"management\" and access to the vhost", broker.ErrUnauthorized, res.Status)
	case res.StatusCode == http.StatusNotFound:
		return fmt.Errorf("%w: %s", broker.ErrNotFound, res.Status)
	case res.StatusCode != http.StatusOK:
		return fmt.Errorf("%w: %s", broker.ErrUnavailable, res.Status)
	}
	d := json.NewDecoder(io.LimitReader(res.Body, maxAnswer))
	d.UseNumber()
	if err := d.Decode(out); err != nil {
		return fmt.Errorf("%w: reading the answer: %w", broker.ErrUnavailable, err)
	}
	// Read to the end, so that the connection is used again.
	_, _ = io.Copy(io.Discard, io.LimitReader(res.Body, 4096))
	return nil
}

// check says why queues cannot be listed.
func (m *management) check(ctx context.Context) error {
	var page struct{}
	return m.get(ctx, "/api/queues/"+url.PathEscape(m.dialer.endpoint.vhost), url.Values{"page": {"1"}, "page_size": {"1"}, "columns": {"name"}}, &page)
}

// object is a JSON object that some versions write as an empty array when it is empty.
type object map[string]any

func (o *object) UnmarshalJSON(text []byte) error {
	*o = nil
	if !strings.HasPrefix(strings.TrimSpace(string(text)), "{") {
		return nil
	}
	m := map[string]any{}
	d := json.NewDecoder(strings.NewReader(string(text)))
	d.UseNumber()
	if err := d.Decode(&m); err != nil {
		return err
	}
	*o = m
	return nil
}

// listedQueue is a queue as the management API lists it. What statistics give is absent until the first pass of the
// server, up to 7 s after a queue was made: absent is not zero and not none.
type listedQueue struct {
	Name       string `json:"name"`
	Type       string `json:"type"`
	State      string `json:"state"`
	Durable    bool   `json:"durable"`
	AutoDelete bool   `json:"auto_delete"`
	Exclusive  bool   `json:"exclusive"`
	Arguments  object `json:"arguments"`

	Policy          string `json:"policy"`
	OperatorPolicy  string `json:"operator_policy"`
	EffectivePolicy object `json:"effective_policy_definition"`

	Ready     *int64 `json:"messages_ready"`
	Unacked   *int64 `json:"messages_unacknowledged"`
	DLX       *int64 `json:"messages_dlx"`
	Consumers *int64 `json:"consumers"`
}

var queueColumns = url.Values{"columns": {strings.Join([]string{
	"name", "type", "state", "durable", "auto_delete", "exclusive", "arguments", "policy", "operator_policy",
	"effective_policy_definition", "messages_ready", "messages_unacknowledged", "messages_dlx", "consumers",
}, ",")}}

// queues reads the named queues: a few one by one, many from one list. What does not exist is not in the result.
func (m *management) queues(ctx context.Context, names []string) (map[string]*listedQueue, error) {
	out := make(map[string]*listedQueue, len(names))
	vhost := url.PathEscape(m.dialer.endpoint.vhost)
	if len(names) > singleReads {
		var all []*listedQueue
		if err := m.get(ctx, "/api/queues/"+vhost, queueColumns, &all); err != nil {
			return nil, err
		}
		for _, q := range all {
			out[q.Name] = q
		}
		return out, nil
	}
	for _, name := range names {
		var q listedQueue
		err := m.get(ctx, "/api/queues/"+vhost+"/"+url.PathEscape(name), queueColumns, &q)
		switch {
		case errors.Is(err, broker.ErrNotFound):
		case err != nil:
			return nil, err
		default:
			out[name] = &q
		}
	}
	return out, nil
}

type listedBinding struct {
	Source          string `json:"source"`
	Destination     string `json:"destination"`
	DestinationType string `json:"destination_type"`
	RoutingKey      string `json:"routing_key"`
	Arguments       object `json:"arguments"`
}

// bindingOf is one binding of one queue.
type bindingOf struct {
	binding
	queue string
}

// bindings reads the bindings of the named queues.
func (m *management) bindings(ctx context.Context, queues []string) (map[bindingOf]bool, error) {
	vhost := url.PathEscape(m.dialer.endpoint.vhost)
	var paths []string
	if len(queues) > singleReads {
		paths = []string{"/api/bindings/" + vhost}
	} else {
		for _, q := range queues {
			paths = append(paths, "/api/queues/"+vhost+"/"+url.PathEscape(q)+"/bindings")
		}
	}
	out := map[bindingOf]bool{}
	for _, path := range paths {
		var all []listedBinding
		err := m.get(ctx, path, nil, &all)
		if errors.Is(err, broker.ErrNotFound) { // the queue does not exist
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, b := range all {
			if b.DestinationType == "queue" && len(b.Arguments) == 0 {
				out[bindingOf{binding{b.Source, b.RoutingKey}, b.Destination}] = true
			}
		}
	}
	return out, nil
}

// flagOff says whether a feature flag is known to the server and not enabled.
func (m *management) flagOff(ctx context.Context, name string) (bool, error) {
	var all []struct {
		Name  string `json:"name"`
		State string `json:"state"`
	}
	if err := m.get(ctx, "/api/feature-flags", nil, &all); err != nil {
		return false, err
	}
	for _, f := range all {
		if f.Name == name {
			return f.State != "enabled", nil
		}
	}
	return false, nil
}
