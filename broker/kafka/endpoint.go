package kafka

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

// Mechanisms of SASL, as they are named in a Broker's spec and by Kafka.
const (
	saslPlain    = "PLAIN"
	saslScram256 = "SCRAM-SHA-256"
	saslScram512 = "SCRAM-SHA-512"
	saslOAuth    = "OAUTHBEARER"
)

// endpoint is a Broker's kafka section, checked.
type endpoint struct {
	servers   []string // host:port
	mechanism string   // of SASL; empty: none
}

// address is the servers for people.
func (e endpoint) address() string { return strings.Join(e.servers, ",") }

type endpointJSON struct {
	BootstrapServers []string  `json:"bootstrapServers"`
	SASL             *saslJSON `json:"sasl"`
}

type saslJSON struct {
	Mechanism string `json:"mechanism"`
}

// parseEndpoint reads {"bootstrapServers": ["host:port"], "sasl": {"mechanism": "SCRAM-SHA-512"}}.
func parseEndpoint(raw json.RawMessage) (endpoint, error) {
	var in endpointJSON
	if err := broker.DecodeSection(raw, &in); err != nil {
		return endpoint{}, fmt.Errorf("kafka endpoint: %w", err)
	}
	if len(in.BootstrapServers) == 0 {
		return endpoint{}, errors.New("kafka endpoint: bootstrapServers: is missing: give one or more addresses such as kafka.shop.svc:9092")
	}
	for _, s := range in.BootstrapServers {
		if err := checkServer(s); err != nil {
			return endpoint{}, fmt.Errorf("kafka endpoint: bootstrapServers: %w", err)
		}
	}
	e := endpoint{servers: in.BootstrapServers}
	if in.SASL != nil {
		known := []string{saslPlain, saslScram256, saslScram512, saslOAuth}
		if !slices.Contains(known, in.SASL.Mechanism) {
			return endpoint{}, fmt.Errorf("kafka endpoint: sasl.mechanism: %q: use one of %s", in.SASL.Mechanism, strings.Join(known, ", "))
		}
		e.mechanism = in.SASL.Mechanism
	}
	return e, nil
}

// checkServer does not quote what may hold a password.
func checkServer(s string) error {
	if strings.Contains(s, "@") {
		return errors.New("has user information in it: leave it out and put username and password into the credentials Secret")
	}
	host, port, err := net.SplitHostPort(s)
	if n, convErr := strconv.Atoi(port); err != nil || host == "" || convErr != nil || n < 1 || n > 65535 {
		return fmt.Errorf("%q: use host:port without a scheme, such as kafka.shop.svc:9092", s)
	}
	return nil
}

// options is a Topology's kafka section, checked.
type options struct {
	Partitions        int32             `json:"partitions"`        // of main; 0: not set
	ReplicationFactor int16             `json:"replicationFactor"` // of all topics; 0: not set
	GroupID           string            `json:"groupId"`           // empty: the queue's name
	Config            map[string]string `json:"config"`            // of main
}

func parseOptions(raw json.RawMessage) (options, error) {
	var o options
	if len(raw) == 0 {
		return o, nil
	}
	if err := broker.DecodeSection(raw, &o); err != nil {
		return options{}, &topology.FieldError{Field: "kafka", Problem: err.Error()}
	}
	bad := func(field, format string, args ...any) (options, error) {
		return options{}, &topology.FieldError{Field: "kafka." + field, Problem: fmt.Sprintf(format, args...)}
	}
	switch {
	case o.Partitions < 0:
		return bad("partitions", "%d: use 1 or more", o.Partitions)
	case o.ReplicationFactor < 0:
		return bad("replicationFactor", "%d: use 1 or more", o.ReplicationFactor)
	}
	for k := range o.Config {
		if k == "" {
			return bad("config", "a setting has no name")
		}
	}
	return o, nil
}
