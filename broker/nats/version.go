package nats

import (
	"strconv"
	"strings"
)

// version of a server, without what follows a dash.
type version struct{ major, minor, patch int }

func parseVersion(text string) version {
	text, _, _ = strings.Cut(strings.TrimPrefix(text, "v"), "-")
	var n [3]int
	for i, part := range strings.SplitN(text, ".", 3) {
		n[i], _ = strconv.Atoi(part) // what is no number is 0: an old server
	}
	return version{n[0], n[1], n[2]}
}

func (v version) atLeast(major, minor int) bool {
	return v.major > major || v.major == major && v.minor >= minor
}

// schedules says whether the server has scheduled messages. An older one accepts a stream that asks for them, and
// never sends one.
func (v version) schedules() bool { return v.atLeast(2, 12) }

// supported says whether the server has what parking takes: consumers with several filters.
func (v version) supported() bool { return v.atLeast(2, 10) }
