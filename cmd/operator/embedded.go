package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/embedded"
)

// embeddedOptions are the flags of the subcommand.
type embeddedOptions struct {
	dir, users, host, healthAddress string
	port                            int
	maxBytes                        int64
	stopTimeout                     time.Duration
}

func (o *embeddedOptions) bind(fs *flag.FlagSet) {
	fs.StringVar(&o.dir, "store", "/data", "folder of the messages; one process at a time has it")
	fs.StringVar(&o.users, "users", "/etc/shove-embedded", "folder with the files username and password, and workload-username and workload-password for one with fewer rights; changes are noticed")
	fs.StringVar(&o.host, "host", envOr("SHOVE_EMBEDDED_HOST", "0.0.0.0"), "address to listen on, for clients and probes (SHOVE_EMBEDDED_HOST)")
	fs.IntVar(&o.port, "port", render.EmbeddedClientPort, "port for clients")
	fs.StringVar(&o.healthAddress, "health-port", fmt.Sprint(render.EmbeddedHealthPort), "port of /healthz and /readyz; empty: none")
	fs.Int64Var(&o.maxBytes, "max-bytes", 0, "bytes that messages may take on disk; 0: what the disk has")
	fs.DurationVar(&o.stopTimeout, "stop-timeout", 20*time.Second, "how long clients have to leave on SIGTERM")
}

func envOr(name, fallback string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return fallback
}

// usersInterval is how often the folder of users is looked at.
const usersInterval = 2 * time.Second

// runEmbedded is `shove-operator embedded`: the server of a Broker with spec.embedded. It ends in order on SIGTERM.
func runEmbedded(args []string, out io.Writer) error {
	var o embeddedOptions
	fs := flag.NewFlagSet("embedded", flag.ContinueOnError)
	fs.SetOutput(out)
	o.bind(fs)
	switch err := fs.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return nil
	case err != nil:
		return err
	case fs.NArg() > 0:
		return fmt.Errorf("embedded: %q: there are flags only", fs.Arg(0))
	}
	log := slog.New(slog.NewJSONHandler(out, &slog.HandlerOptions{Level: slog.LevelDebug}))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	users, err := readUsers(o.users)
	if err != nil {
		return err
	}
	health := ""
	if o.healthAddress != "" {
		health = o.host + ":" + o.healthAddress
	}
	srv, err := embedded.Start(ctx, embedded.Options{Dir: o.dir, Host: o.host, Port: o.port, MaxBytes: o.maxBytes, Users: users, HealthAddr: health, Logger: log})
	if err != nil {
		return err
	}
	log.Info("Embedded broker is ready", "url", srv.URL(), "store", o.dir, "maxBytes", o.maxBytes, "version", version)
	ended := srv.Done()
	tick := time.NewTicker(usersInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			log.Info("Embedded broker ends")
			stopping, cancel := context.WithTimeout(context.Background(), o.stopTimeout)
			defer cancel()
			return srv.Stop(stopping)
		case <-ended:
			return errors.Join(errors.New("the server ended by itself: see its log"), srv.Stop(ctx))
		case <-tick.C:
			users = renewUsers(srv, o.users, users, log)
		}
	}
}

// renewUsers takes over what changed in the folder. What cannot be read changes nothing.
func renewUsers(srv *embedded.Server, dir string, have []embedded.User, log *slog.Logger) []embedded.User {
	now, err := readUsers(dir)
	switch {
	case err != nil:
		log.Error("Users are as they were", "error", err.Error())
		return have
	case slices.Equal(now, have):
		return have
	}
	if err := srv.SetUsers(now); err != nil {
		log.Error("Users are as they were", "error", err.Error())
		return have
	}
	log.Info("Users changed", "users", len(now))
	return now
}

// readUsers reads the users that a mounted Secret names.
func readUsers(dir string) ([]embedded.User, error) {
	read := func(key string) (string, error) {
		b, err := os.ReadFile(filepath.Join(dir, key))
		if errors.Is(err, os.ErrNotExist) {
			return "", nil
		}
		if err != nil {
			return "", fmt.Errorf("read users: %w", err)
		}
		return strings.TrimRight(string(b), "\r\n"), nil
	}
	var out []embedded.User
	for _, u := range []struct {
		prefix   string
		workload bool
	}{{"", false}, {render.EmbeddedWorkloadPrefix, true}} {
		name, err := read(u.prefix + "username")
		if err != nil {
			return nil, err
		}
		password, err := read(u.prefix + "password")
		if err != nil {
			return nil, err
		}
		switch {
		case name != "" && password != "":
			out = append(out, embedded.User{Name: name, Password: password, Workload: u.workload})
		case name != "" || password != "" || !u.workload:
			return nil, fmt.Errorf("folder %q of --users needs both of the files %q and %q, not empty", dir, u.prefix+"username", u.prefix+"password")
		}
	}
	return out, nil
}
