package rabbitmq

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/shove-dev/shove/broker"
)

// defaultConsumerTimeout is the server's own default of consumer_timeout since RabbitMQ 3.8.17.
const defaultConsumerTimeout = 30 * time.Minute

// endpoint is a Broker's rabbitmq section, checked.
type endpoint struct {
	host            string
	port            int
	vhost           string
	secure          bool
	management      *url.URL // nil: none
	consumerTimeout time.Duration
}

// address is where the server listens, for dialing and for people.
func (e endpoint) address() string { return net.JoinHostPort(e.host, strconv.Itoa(e.port)) }

// url is the server's address without credentials and without the vhost, which are given apart.
func (e endpoint) url() string {
	if e.secure {
		return "amqps://" + e.address()
	}
	return "amqp://" + e.address()
}

type endpointJSON struct {
	URL             string          `json:"url"`
	Management      *managementJSON `json:"management"`
	ConsumerTimeout string          `json:"consumerTimeout"`
}

type managementJSON struct {
	URL string `json:"url"`
}

// parseEndpoint reads {"url": …, "management": {"url": …}, "consumerTimeout": "30m"}.
func parseEndpoint(raw json.RawMessage) (endpoint, error) {
	var in endpointJSON
	if err := broker.DecodeSection(raw, &in); err != nil {
		return endpoint{}, fmt.Errorf("rabbitmq endpoint: %w", err)
	}
	e, err := parseURL(in.URL)
	if err != nil {
		return endpoint{}, fmt.Errorf("rabbitmq endpoint: url: %w", err)
	}
	e.consumerTimeout = defaultConsumerTimeout
	if in.ConsumerTimeout != "" {
		d, err := time.ParseDuration(in.ConsumerTimeout)
		if err != nil || d < 0 {
			return endpoint{}, fmt.Errorf("rabbitmq endpoint: consumerTimeout: %q: use a duration such as 30m, or 0s where the server has no consumer timeout", in.ConsumerTimeout)
		}
		e.consumerTimeout = d
	}
	if in.Management != nil {
		if e.management, err = parseManagement(in.Management.URL); err != nil {
			return endpoint{}, fmt.Errorf("rabbitmq endpoint: management.url: %w", err)
		}
	}
	return e, nil
}

var errUserInfo = errors.New("has user information in it: leave it out and put username and password into the credentials Secret")

func parseURL(text string) (endpoint, error) {
	if text == "" {
		return endpoint{}, errors.New("is missing: give the AMQP address, such as amqp://rabbit.shop.svc:5672/")
	}
	u, err := parseServerURL(text, "an AMQP address such as amqp://rabbit.shop.svc:5672/my-vhost")
	if err != nil {
		return endpoint{}, err
	}
	e := endpoint{host: u.Hostname(), vhost: "/"}
	switch u.Scheme {
	case "amqp":
		e.port = 5672
	case "amqps":
		e.port, e.secure = 5671, true
	default:
		return endpoint{}, fmt.Errorf("scheme %q: use amqp or amqps", u.Scheme)
	}
	if p := u.Port(); p != "" {
		if e.port, err = strconv.Atoi(p); err != nil || e.port < 1 || e.port > 65535 {
			return endpoint{}, fmt.Errorf("port %q: use 1 to 65535", p)
		}
	}
	if v := strings.TrimPrefix(u.EscapedPath(), "/"); v != "" {
		if strings.Contains(v, "/") {
			return endpoint{}, fmt.Errorf("path %q has more than one segment: write a '/' within a vhost's name as %%2F", u.Path)
		}
		if e.vhost, err = url.PathUnescape(v); err != nil {
			return endpoint{}, errors.New("the vhost is not percent-encoded correctly")
		}
		if len(e.vhost) > maxShortString {
			return endpoint{}, fmt.Errorf("the vhost has %d bytes: AMQP allows %d", len(e.vhost), maxShortString)
		}
	}
	return e, nil
}

func parseManagement(text string) (*url.URL, error) {
	if text == "" {
		return nil, errors.New("is missing: give the root of the management API, such as http://rabbit.shop.svc:15672, or leave management out")
	}
	u, err := parseServerURL(text, "the root of the management API, such as http://rabbit.shop.svc:15672")
	if err != nil {
		return nil, err
	}
	if u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("scheme %q: use http or https", u.Scheme)
	}
	u.Path = strings.TrimSuffix(strings.TrimSuffix(u.Path, "/"), "/api")
	u.RawPath = ""
	return u, nil
}

// parseServerURL never repeats the text in an error: it may hold a password.
func parseServerURL(text, want string) (*url.URL, error) {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return nil, fmt.Errorf("does not parse: give %s", want)
	case u.User != nil:
		return nil, errUserInfo
	case u.Hostname() == "":
		return nil, fmt.Errorf("has no host: give %s", want)
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return nil, errors.New("has a query or a fragment: leave them out; TLS is configured in the Broker's tls section")
	}
	return u, nil
}

const (
	quorumQueue  = "quorum"
	classicQueue = "classic"
)

// options is a Topology's rabbitmq section, checked.
type options struct {
	QueueType string    `json:"queueType"`
	Bindings  []binding `json:"bindings"`
	// RetiredBindings were made for an earlier version of Bindings and are to be removed. The operator names them;
	// they are in no manifest.
	RetiredBindings []binding `json:"retiredBindings"`
}

// binding binds the main queue to an exchange that somebody else declared.
type binding struct {
	Exchange   string `json:"exchange"`
	RoutingKey string `json:"routingKey"`
}

// parseOptions reads {"queueType": "quorum", "bindings": [{"exchange": …, "routingKey": …}]}. Absent: the defaults.
func parseOptions(raw json.RawMessage) (options, error) {
	var o options
	if len(bytes.TrimSpace(raw)) > 0 {
		if err := broker.DecodeSection(raw, &o); err != nil {
			return options{}, fmt.Errorf("rabbitmq options: %w", err)
		}
	}
	switch o.QueueType {
	case "":
		o.QueueType = quorumQueue
	case quorumQueue, classicQueue:
	default:
		return options{}, fmt.Errorf("rabbitmq options: queueType: %q: use quorum or classic", o.QueueType)
	}
	seen := map[binding]bool{}
	for i, b := range o.Bindings {
		switch {
		case b.Exchange == "":
			return options{}, fmt.Errorf("rabbitmq options: bindings[%d].exchange: is empty: name an exchange; the default exchange reaches every queue by its name without a binding", i)
		case len(b.Exchange) > maxShortString:
			return options{}, fmt.Errorf("rabbitmq options: bindings[%d].exchange: has %d bytes: AMQP allows %d", i, len(b.Exchange), maxShortString)
		case len(b.RoutingKey) > maxShortString:
			return options{}, fmt.Errorf("rabbitmq options: bindings[%d].routingKey: has %d bytes: AMQP allows %d", i, len(b.RoutingKey), maxShortString)
		case seen[b]:
			return options{}, fmt.Errorf("rabbitmq options: bindings[%d]: exchange %q with routing key %q is listed twice", i, b.Exchange, b.RoutingKey)
		}
		seen[b] = true
	}
	return o, nil
}
