package kafka

import (
	"net"
	"strconv"
	"testing"
)

const childVar = "SHOVE_TEST_KAFKA_CHILD"

func childMain(string) {}

func portsOf(t testing.TB, addrs []string) []int {
	t.Helper()
	var ports []int
	for _, a := range addrs {
		_, p, err := net.SplitHostPort(a)
		must(t, err)
		n, err := strconv.Atoi(p)
		must(t, err)
		ports = append(ports, n)
	}
	return ports
}
