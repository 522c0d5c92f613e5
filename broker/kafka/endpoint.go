package kafka

import (
	"encoding/json"
	"errors"
)

// endpoint is a Broker's kafka section, checked.
type endpoint struct {
	servers []string
}

func parseEndpoint(raw json.RawMessage) (endpoint, error) {
	var in struct {
		BootstrapServers []string `json:"bootstrapServers"`
	}
	if err := json.Unmarshal(raw, &in); err != nil {
		return endpoint{}, err
	}
	if len(in.BootstrapServers) == 0 {
		return endpoint{}, errors.New("kafka endpoint: bootstrapServers: is empty")
	}
	return endpoint{servers: in.BootstrapServers}, nil
}

// options is a Topology's kafka section, checked.
type options struct {
	Partitions        int32             `json:"partitions"`
	ReplicationFactor int16             `json:"replicationFactor"`
	GroupID           string            `json:"groupId"`
	Config            map[string]string `json:"config"`
}

func parseOptions(raw json.RawMessage) (options, error) {
	var o options
	if len(raw) > 0 {
		if err := json.Unmarshal(raw, &o); err != nil {
			return options{}, err
		}
	}
	return o, nil
}
