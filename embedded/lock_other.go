//go:build !linux && !darwin && !freebsd && !netbsd && !openbsd && !dragonfly

package embedded

import (
	"errors"
	"os"
)

// tryLock refuses: without a lock two servers could destroy a store.
func tryLock(*os.File) error {
	return errors.New("this system has no file locks that the embedded broker knows")
}
