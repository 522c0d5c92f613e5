// Package freeport picks loopback ports for the servers of tests.
package freeport

import (
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
)

// Ports lie below those that the kernel gives to outgoing connections: a port from there may be taken before the server
// listens, and a client that tries again while its server is down may be given the server's port and connect to itself.
const first, last = 10000, 32000

var (
	mu    sync.Mutex
	given = map[int]bool{}
)

// Pick returns n ports that are free and that no other call in this process got.
func Pick(n int) ([]int, error) {
	mu.Lock()
	defer mu.Unlock()
	ports := make([]int, 0, n)
	for try := 0; len(ports) < n; try++ {
		if try > 1000 {
			return nil, errors.New("looking for a free port: none found")
		}
		port := first + rand.IntN(last-first)
		if !given[port] && free(port) {
			given[port] = true
			ports = append(ports, port)
		}
	}
	return ports, nil
}

func free(port int) bool {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return false
	}
	return l.Close() == nil
}
