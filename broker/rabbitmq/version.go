package rabbitmq

import (
	"strconv"
	"strings"
)

// version is a server's version; the zero value is unknown and below everything.
type version struct{ major, minor, patch int }

// parseVersion reads "3.10.8" and takes what it cannot read for 0, such as in "4.3.0-rc.1".
func parseVersion(text string) version {
	var n [3]int
	for i, part := range strings.SplitN(text, ".", 4) {
		if i == len(n) {
			break
		}
		end := 0
		for end < len(part) && end < 6 && part[end] >= '0' && part[end] <= '9' {
			end++
		}
		n[i], _ = strconv.Atoi(part[:end])
	}
	return version{n[0], n[1], n[2]}
}

func (v version) atLeast(major, minor int) bool {
	return v.major > major || v.major == major && v.minor >= minor
}
