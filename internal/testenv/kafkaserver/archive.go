package kafkaserver

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// joined is the class path of a folder's jars, in an order that does not change: an archive of classes is for one class
// path.
func joined(dir string) (string, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.jar"))
	if err != nil || len(files) == 0 {
		return "", errors.Join(fmt.Errorf("no jar in %q", dir), err)
	}
	slices.Sort(files)
	return strings.Join(files, string(filepath.ListSeparator)), nil
}

// archive returns a file with the broker's classes as the Java runtime has them in memory, which halves the time that a
// start takes. It is made by a broker that is started and stopped once. Empty: there is none, and it does without.
func archive(ctx context.Context, java, dir, classPath string) string {
	if os.Getenv(JarsVar) != "" {
		return "" // not our folder
	}
	version, err := exec.CommandContext(ctx, java, "-version").CombinedOutput()
	if err != nil {
		return ""
	}
	sum := sha256.Sum256(append(version, java...))
	file := filepath.Join(dir, "classes-"+hex.EncodeToString(sum[:6])+".jsa")
	if _, err := os.Stat(file); err == nil {
		return file
	}
	if err := makeArchive(ctx, java, classPath, file); err != nil {
		fmt.Fprintln(os.Stderr, "testenv: Kafka starts without an archive of its classes:", err)
		return ""
	}
	return file
}

func makeArchive(ctx context.Context, java, classPath, file string) error {
	unlock, err := lock(file + ".lock")
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Stat(file); err == nil {
		return nil // another process was faster
	}
	fresh := file + ".new"
	s, err := start(ctx, &Server{java: java, classPath: classPath, opts: Options{JVM: []string{"-XX:ArchiveClassesAtExit=" + fresh}}})
	if err != nil {
		return err
	}
	if err := errors.Join(s.Stop(), s.Close()); err != nil {
		return err
	}
	return os.Rename(fresh, file)
}
