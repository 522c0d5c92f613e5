package nats

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/shove-dev/shove/broker"
)

// endpoint is a Broker's nats section, checked.
type endpoint struct {
	servers []string
	// secure says that at least one server is to be reached by TLS whether TLS is configured or not.
	secure bool
}

// name is the endpoint for people.
func (e endpoint) name() string { return strings.Join(e.servers, ",") }

type endpointJSON struct {
	Servers []string `json:"servers"`
}

// parseEndpoint reads {"servers": ["nats://…"]}.
func parseEndpoint(raw json.RawMessage) (endpoint, error) {
	var in endpointJSON
	if err := broker.DecodeSection(raw, &in); err != nil {
		return endpoint{}, fmt.Errorf("nats endpoint: %w", err)
	}
	if len(in.Servers) == 0 {
		return endpoint{}, errors.New("nats endpoint: servers: is empty: give at least one address, such as nats://nats.shop.svc:4222")
	}
	var e endpoint
	for i, text := range in.Servers {
		server, secure, err := parseServer(text)
		if err != nil {
			return endpoint{}, fmt.Errorf("nats endpoint: servers[%d]: %w", i, err)
		}
		if slices.Contains(e.servers, server) {
			return endpoint{}, fmt.Errorf("nats endpoint: servers[%d]: %s is listed twice", i, server)
		}
		e.servers = append(e.servers, server)
		e.secure = e.secure || secure
	}
	return e, nil
}

// parseServer never repeats the text in an error: it may hold a password.
func parseServer(text string) (server string, secure bool, err error) {
	const want = "an address such as nats://nats.shop.svc:4222 or tls://nats.shop.svc:4222"
	if !strings.Contains(text, "://") {
		text = "nats://" + text
	}
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return "", false, fmt.Errorf("does not parse: give %s", want)
	case u.User != nil:
		return "", false, errors.New("has user information in it: leave it out and put it into the credentials Secret")
	case u.Hostname() == "":
		return "", false, fmt.Errorf("has no host: give %s", want)
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || strings.Trim(u.Path, "/") != "":
		return "", false, fmt.Errorf("has a path, a query or a fragment: give %s", want)
	}
	switch u.Scheme {
	case "nats", "ws":
	case "tls", "wss":
		secure = true
	default:
		return "", false, fmt.Errorf("scheme %q: use nats, tls, ws or wss", u.Scheme)
	}
	if u.Port() == "" && (u.Scheme == "nats" || u.Scheme == "tls") {
		u.Host += ":4222"
	}
	return u.Scheme + "://" + u.Host, secure, nil
}

// options is a Topology's nats section, checked.
type options struct {
	replicas int    // 0: as it is, 1 on creation
	storage  string // "": as it is, file on creation
	ackWait  time.Duration
}

type optionsJSON struct {
	Replicas int    `json:"replicas"`
	Storage  string `json:"storage"`
	AckWait  string `json:"ackWait"`
}

// Storage as the server writes it.
const (
	storageFile   = "file"
	storageMemory = "memory"
)

const (
	// defaultAckWait is how long the messages of a consumer that died stay away. One that lives renews three times
	// as often.
	defaultAckWait = 30 * time.Second
	minAckWait     = time.Second
	maxAckWait     = time.Hour
	// maxReplicas is the server's own bound.
	maxReplicas = 5
)

// parseOptions reads {"replicas": 3, "storage": "File", "ackWait": "30s"}. Absent: the defaults.
func parseOptions(raw json.RawMessage) (options, error) {
	var in optionsJSON
	if len(bytes.TrimSpace(raw)) > 0 {
		if err := broker.DecodeSection(raw, &in); err != nil {
			return options{}, fmt.Errorf("nats options: %w", err)
		}
	}
	o := options{replicas: in.Replicas, ackWait: defaultAckWait}
	if in.Replicas < 0 || in.Replicas > maxReplicas {
		return options{}, fmt.Errorf("nats options: replicas: %d: use 1 to %d, or leave it out", in.Replicas, maxReplicas)
	}
	switch in.Storage {
	case "":
	case "File":
		o.storage = storageFile
	case "Memory":
		o.storage = storageMemory
	default:
		return options{}, fmt.Errorf("nats options: storage: %q: use File or Memory", in.Storage)
	}
	if in.AckWait != "" {
		d, err := time.ParseDuration(in.AckWait)
		if err != nil || d < minAckWait || d > maxAckWait {
			return options{}, fmt.Errorf("nats options: ackWait: %q: use a duration from %s to %s", in.AckWait, minAckWait, maxAckWait)
		}
		o.ackWait = d
	}
	return o, nil
}
