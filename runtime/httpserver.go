package runtime

import (
	"context"
	"sync"
)

// serveHTTP serves the endpoints until the context ends and returns their address. Being written.
func (r *Runtime) serveHTTP(context.Context, *sync.WaitGroup) (string, error) { return "", nil }
