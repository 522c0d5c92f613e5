package redis

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/shove-dev/shove/broker"
)

// mode is how an installation is laid out.
type mode string

const (
	standalone mode = "Standalone"
	cluster    mode = "Cluster"
	sentinel   mode = "Sentinel"
)

// endpoint is a Broker's redis section, checked.
type endpoint struct {
	Addresses  []string `json:"addresses"`
	Mode       mode     `json:"mode"`
	MasterName string   `json:"masterName"`
}

const maxAddresses = 32

// parseEndpoint reads {"addresses": ["host:port", …], "mode": "Standalone|Cluster|Sentinel", "masterName": …}.
func parseEndpoint(raw json.RawMessage) (endpoint, error) {
	var e endpoint
	fail := func(format string, args ...any) (endpoint, error) {
		return endpoint{}, fmt.Errorf("redis endpoint: "+format, args...)
	}
	if err := broker.DecodeSection(raw, &e); err != nil {
		return fail("%w", err)
	}
	if n := len(e.Addresses); n == 0 || n > maxAddresses {
		return fail("addresses: %d of them: give 1 to %d, such as redis.shop.svc:6379", n, maxAddresses)
	}
	for i, a := range e.Addresses {
		if err := checkAddress(a); err != nil {
			return fail("addresses[%d]: %w", i, err)
		}
	}
	switch e.Mode {
	case "":
		e.Mode = standalone
	case standalone, cluster, sentinel:
	default:
		return fail("mode: %q: use Standalone, Cluster or Sentinel", string(e.Mode))
	}
	switch {
	case e.Mode == standalone && len(e.Addresses) > 1:
		return fail("addresses: %d of them with mode Standalone, which is one server: write one, or set mode to Cluster or Sentinel", len(e.Addresses))
	case e.Mode == sentinel && e.MasterName == "":
		return fail("masterName: is missing: give the name under which the sentinels know the primary")
	case e.Mode != sentinel && e.MasterName != "":
		return fail("masterName: goes with mode Sentinel only")
	}
	return e, nil
}

// checkAddress never repeats the text in an error: it may hold a password.
func checkAddress(a string) error {
	const form = "write it as host:port, such as redis.shop.svc:6379"
	if strings.ContainsAny(a, "@/") {
		return errors.New("is a URL or has user information in it: " + form + ", and put username and password into the credentials Secret")
	}
	host, port, err := net.SplitHostPort(a)
	if err != nil || host == "" {
		return errors.New("is not an address: " + form)
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return fmt.Errorf("port %q: use 1 to 65535", port)
	}
	return nil
}

// checkOptions refuses what a Topology's redis section may say, which is nothing.
func checkOptions(raw json.RawMessage) error {
	if len(bytes.TrimSpace(raw)) == 0 || bytes.Equal(bytes.TrimSpace(raw), []byte("null")) {
		return nil
	}
	if err := broker.DecodeSection(raw, &struct{}{}); err != nil {
		return fmt.Errorf("redis options: %w", err)
	}
	return nil
}
