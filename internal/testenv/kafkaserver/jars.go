package kafkaserver

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

//go:embed pom.xml
var pom []byte

//go:embed jars.sha256
var sums []byte

// JarsVar names a folder with the jars of a Kafka broker, such as libs of a Kafka distribution, to run in place of
// the ones that pom.xml names. It is how other versions are tested.
const JarsVar = "SHOVE_TEST_KAFKA_JARS"

// minJava is what Kafka 4 asks for.
const minJava = 17

// findJava looks for a Java runtime that is new enough: JAVA_HOME's, else the one in PATH.
func findJava() (string, error) {
	path := filepath.Join(os.Getenv("JAVA_HOME"), "bin", "java")
	if _, err := exec.LookPath(path); os.Getenv("JAVA_HOME") == "" || err != nil {
		if path, err = exec.LookPath("java"); err != nil {
			return "", ErrNotAvailable
		}
	}
	out, err := exec.Command(path, "-version").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s -version: %w: %s", path, err, out)
	}
	if v := javaVersion(string(out)); v < minJava {
		return "", fmt.Errorf("%w; %s is version %d", ErrNotAvailable, path, v)
	}
	return path, nil
}

// javaVersion reads `openjdk version "17.0.15" 2025-04-15`; 0: not understood. Before 9 it was "1.8.0".
func javaVersion(text string) int {
	_, rest, _ := strings.Cut(text, `version "`)
	rest = strings.TrimPrefix(rest, "1.")
	end := strings.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' })
	if end < 0 {
		return 0
	}
	n, _ := strconv.Atoi(rest[:end])
	return n
}

// jars returns the folder with the broker's jars. The first time it has Maven download them (43 MB) into the user's
// cache; processes that ask at once wait for one of them.
func jars(ctx context.Context) (string, error) {
	if dir := os.Getenv(JarsVar); dir != "" {
		return dir, nil
	}
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, version())
	if complete(dir) {
		return dir, nil
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", fmt.Errorf("making the cache folder: %w", err)
	}
	unlock, err := lock(filepath.Join(cache, "lock"))
	if err != nil {
		return "", err
	}
	defer unlock()
	if complete(dir) {
		return dir, nil
	}
	fresh, err := os.MkdirTemp(cache, "new-")
	if err != nil {
		return "", fmt.Errorf("making the cache folder: %w", err)
	}
	defer os.RemoveAll(fresh)
	if err := download(ctx, fresh); err != nil {
		return "", err
	}
	if err := verify(fresh); err != nil {
		return "", fmt.Errorf("the jars that Maven brought: %w", err)
	}
	if err := errors.Join(os.RemoveAll(dir), os.Rename(fresh, dir)); err != nil {
		return "", fmt.Errorf("keeping the jars: %w", err)
	}
	return dir, nil
}

func cacheDir() (string, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("looking for the cache folder: %w", err)
	}
	return filepath.Join(base, "shove", "kafka"), nil
}

// version changes with what is to be downloaded.
func version() string {
	sum := sha256.Sum256(slices.Concat(pom, sums))
	return hex.EncodeToString(sum[:6])
}

// complete says whether every jar is there, by name: verify looked at them when they came.
func complete(dir string) bool {
	for name := range wanted() {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return false
		}
	}
	return true
}

// download has Maven resolve pom.xml into dir.
func download(ctx context.Context, dir string) error {
	mvn, err := exec.LookPath("mvn")
	if err != nil {
		return ErrNotAvailable
	}
	work, err := os.MkdirTemp("", "shove-kafka-pom-")
	if err != nil {
		return fmt.Errorf("making a folder for Maven: %w", err)
	}
	defer os.RemoveAll(work)
	if err := os.WriteFile(filepath.Join(work, "pom.xml"), pom, 0o644); err != nil {
		return fmt.Errorf("writing pom.xml: %w", err)
	}
	fmt.Fprintln(os.Stderr, "testenv: downloading a Kafka broker with Maven (43 MB, once)")
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, mvn, "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory="+dir)
	cmd.Dir = work
	cmd.WaitDelay = 10 * time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("downloading a Kafka broker: mvn: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// wanted are the jars by name, with their sums.
func wanted() map[string]string {
	out := map[string]string{}
	for lines := bufio.NewScanner(bytes.NewReader(sums)); lines.Scan(); {
		if sum, name, ok := strings.Cut(lines.Text(), "  "); ok {
			out[name] = sum
		}
	}
	return out
}

// verify compares the jars of a folder with jars.sha256.
func verify(dir string) error {
	have, err := checksums(dir)
	if err != nil {
		return err
	}
	want := wanted()
	for name, sum := range want {
		switch got, ok := have[name]; {
		case !ok:
			return fmt.Errorf("%s is missing", name)
		case got != sum:
			return fmt.Errorf("%s has the sum %s, not %s", name, got, sum)
		}
	}
	for name := range have {
		if _, ok := want[name]; !ok {
			return fmt.Errorf("%s is not in jars.sha256", name)
		}
	}
	return nil
}

func checksums(dir string) (map[string]string, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.jar"))
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, f := range files {
		if out[filepath.Base(f)], err = checksum(f); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func checksum(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("reading %q: %w", file, err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// lock waits until no other process holds the file.
func lock(file string) (unlock func(), err error) {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("opening a lock: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("locking %q: %w", file, err), f.Close())
	}
	return func() { _ = f.Close() }, nil // closing gives the lock back
}
