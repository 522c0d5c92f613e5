package kafka

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/topology"
)

func TestEndpoint(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{ // what the error says; empty: accepted
		`{"bootstrapServers": ["kafka:9092", "[::1]:9093"]}`:                                 "",
		`{"bootstrapServers": ["kafka:9092"], "sasl": {"mechanism": "SCRAM-SHA-256"}}`:       "",
		`{"bootstrapServers": []}`:                                                           "bootstrapServers: is missing",
		``:                                                                                   "is empty",
		`{"bootstrapServers": ["kafka"]}`:                                                    "host:port",
		`{"bootstrapServers": ["kafka:0"]}`:                                                  "host:port",
		`{"bootstrapServers": [":9092"]}`:                                                    "host:port",
		`{"bootstrapServers": ["kafka://kafka:9092"]}`:                                       "without a scheme",
		`{"bootstrapServers": ["me:hunter2@kafka:9092"]}`:                                    "credentials Secret",
		`{"bootstrapServers": ["kafka:9092"], "sasl": {"mechanism": "GSSAPI"}}`:              "use one of PLAIN",
		`{"bootstrapServers": ["kafka:9092"], "tls": true}`:                                  "unknown field",
		`{"bootstrapServers": ["kafka:9092"]} {}`:                                            "after its end",
		`{"bootstrapServers": ["kafka:9092"], "sasl": {"mechanism": "PLAIN", "user": "me"}}`: "unknown field",
	} {
		_, err := parseEndpoint(json.RawMessage(text))
		switch {
		case want == "" && err != nil, want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%s: %v, want %q", text, err, want)
		case err != nil && strings.Contains(err.Error(), "hunter2"):
			t.Errorf("%s: the error shows a password", text)
		}
		if _, limitErr := Driver.LeaseLimit(json.RawMessage(text)); (limitErr == nil) != (err == nil) {
			t.Errorf("%s: the lease limit says %v", text, limitErr)
		}
	}
}

func TestObjectsRefuses(t *testing.T) {
	t.Parallel()
	for options, want := range map[string]string{
		`{"partitions": -1}`:                     "kafka.partitions",
		`{"replicationFactor": -1}`:              "kafka.replicationFactor",
		`{"partition": 3}`:                       "unknown field",
		`{"config": {"": "x"}}`:                  "no name",
		`{"config": {"retention.ms": "7 days"}}`: "milliseconds",
		`{"config": {"retention.ms": "-2"}}`:     "milliseconds",
	} {
		topo, err := topology.Derive(topology.Spec{Queue: "orders", Holds: []time.Duration{time.Second}})
		must(t, err)
		_, err = Driver.Objects(broker.Declaration{Topology: topo, Options: json.RawMessage(options)})
		if _, ok := errors.AsType[*topology.FieldError](err); !ok || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want a field error that says %q", options, err, want)
		}
	}
	topo, err := topology.Derive(topology.Spec{Queue: "orders", External: true})
	must(t, err)
	if _, err := Driver.Objects(broker.Declaration{Topology: topo, Options: json.RawMessage(`{"partitions": 3}`)}); err == nil {
		t.Error("an external topology with partitions was accepted")
	}
}

func TestRetentionOfHolds(t *testing.T) {
	t.Parallel()
	week := 7 * 24 * time.Hour
	ms := func(d time.Duration) string { return fmt.Sprint(d.Milliseconds()) }
	for config, want := range map[string]string{
		`{}`:                                           ms(week + time.Hour),
		`{"retention.ms": "-1"}`:                       forever,
		`{"retention.ms": "1"}`:                        ms(week + time.Hour),
		`{"retention.ms": "` + ms(2*week) + `"}`:       ms(2*week + time.Hour),
		`{"retention.ms": "9223372036854775807"}`:      ms(maxMillis*time.Millisecond + time.Hour),
		`{"cleanup.policy": "compact"}`:                ms(week + time.Hour),
		`{"message.timestamp.type": "CreateTime"}`:     ms(week + time.Hour),
		`{"retention.bytes": "1", "segment.ms": "10"}`: ms(week + time.Hour),
	} {
		topo, err := topology.Derive(topology.Spec{Queue: "orders", Holds: []time.Duration{time.Hour}})
		must(t, err)
		objects, err := Driver.Objects(broker.Declaration{Topology: topo, Options: json.RawMessage(`{"config": ` + config + `}`)})
		must(t, err)
		hold := objects[1].Properties
		if hold[configRetention] != want || hold[configCleanup] != cleanDelete || hold[configTimestamp] != logAppendTime || hold[configRetainSize] != forever {
			t.Errorf("%s: %v, want retention.ms %s", config, hold, want)
		}
	}
}

func TestPlan(t *testing.T) {
	t.Parallel()
	names := func(s topology.Spec, options string) (read, declared []string, group string) {
		t.Helper()
		topo, err := topology.Derive(s)
		must(t, err)
		p, err := newPlan(broker.Declaration{Topology: topo, Options: json.RawMessage(options), Retired: []topology.Queue{{Name: "orders-hold-9s", Delay: 9 * time.Second}}})
		must(t, err)
		read = []string{p.source}
		for _, h := range p.holds {
			read = append(read, h.name)
		}
		for _, s := range p.topics {
			declared = append(declared, s.name)
		}
		return read, declared, p.group
	}
	hold := []time.Duration{time.Second}
	for name, tc := range map[string]struct {
		spec           topology.Spec
		options        string
		read, declared []string
		group          string
	}{
		"owned": {topology.Spec{Queue: "orders", Holds: hold, DeadLetter: true}, `{}`,
			[]string{"orders", "orders-hold-1s", "orders-hold-9s"}, []string{"orders-dlq", "orders", "orders-hold-1s"}, "orders"},
		"adopted group": {topology.Spec{Queue: "orders"}, `{"groupId": "legacy"}`, []string{"orders", "orders-hold-9s"}, []string{"orders"}, "legacy"},
		"external":      {topology.Spec{Queue: "orders", External: true, Holds: hold, DeadLetter: true}, ``, []string{"orders"}, []string{"orders-dlq"}, "orders"},
		// What comes back at once must not be seen by others of the source: it has a topic of its own.
		"source": {topology.Spec{Queue: "audit", Source: "orders", Holds: hold}, ``,
			[]string{"orders", "audit-hold-1s", "orders-hold-9s", "audit"}, []string{"audit", "audit-hold-1s"}, "audit"},
	} {
		read, declared, group := names(tc.spec, tc.options)
		if d := cmp.Diff(tc.read, read); d != "" {
			t.Errorf("%s reads (-want +got):\n%s", name, d)
		}
		if d := cmp.Diff(tc.declared, declared); d != "" {
			t.Errorf("%s declares (-want +got):\n%s", name, d)
		}
		if group != tc.group {
			t.Errorf("%s: group %q, want %q", name, group, tc.group)
		}
	}
}

func TestSequencedIsRefused(t *testing.T) {
	t.Parallel()
	topo, err := topology.Derive(topology.Spec{Queue: "orders", Holds: []time.Duration{time.Second}, DeadLetter: true, Sequenced: &topology.SequencedSpec{Shards: 4}})
	must(t, err)
	if _, err := objects(broker.Declaration{Topology: topo}); !errors.Is(err, broker.ErrUnsupported) {
		t.Errorf("got %v, want ErrUnsupported", err)
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	text := "Unknown topic config name: x"
	for _, tc := range []struct {
		err  error
		want error
		says string
	}{
		{kerr.SaslAuthenticationFailed, broker.ErrUnauthorized, "SASL_AUTHENTICATION_FAILED"},
		{kerr.TopicAuthorizationFailed, broker.ErrUnauthorized, "TOPIC_AUTHORIZATION_FAILED"},
		{kerr.UnknownTopicOrPartition, broker.ErrNotFound, ""},
		{kerr.UnknownTopicID, broker.ErrNotFound, ""},
		{kerr.PolicyViolation, broker.ErrUnsupported, ""},
		{kerr.UnsupportedVersion, broker.ErrUnsupported, ""},
		{kerr.MessageTooLarge, broker.ErrTooLarge, ""},
		{kerr.NotLeaderForPartition, broker.ErrUnavailable, ""},
		{kerr.CoordinatorNotAvailable, broker.ErrUnavailable, ""},
		{kgo.ErrClientClosed, broker.ErrClosed, ""},
		{io.ErrUnexpectedEOF, broker.ErrUnavailable, ""},
		{context.DeadlineExceeded, broker.ErrUnavailable, ""},
		{fmt.Errorf("commit: %w", kerr.GroupAuthorizationFailed), broker.ErrUnauthorized, "commit"},
		{fmt.Errorf("x: %w", broker.ErrLost), broker.ErrLost, ""},
		{answer(kerr.InvalidConfig.Code, &text), broker.ErrUnsupported, text + " (INVALID_CONFIG)"},
		{answer(0, nil), nil, ""},
		{right{"Read", "group", "orders"}.on(kerr.GroupAuthorizationFailed), broker.ErrUnauthorized, `the operation Read on group "orders"`},
		{right{"Read", "group", "orders"}.on(kerr.SaslAuthenticationFailed), broker.ErrUnauthorized, "SASL"},
		{right{"Read", "group", "orders"}.on(kerr.UnknownTopicOrPartition), broker.ErrNotFound, ""},
		{right{"Read", "group", "orders"}.on(nil), nil, ""},
	} {
		got := mapError(tc.err)
		if !errors.Is(got, tc.want) || got != nil && !strings.Contains(got.Error(), tc.says) || (got == nil) != (tc.want == nil) {
			t.Errorf("%v became %v, want %v saying %q", tc.err, got, tc.want, tc.says)
		}
	}
	if err := (right{"Read", "group", "orders"}).on(kerr.UnknownTopicOrPartition); strings.Contains(err.Error(), "ACL") {
		t.Errorf("a right is named that is not missing: %v", err)
	}
}

func TestSettings(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		s    setting
		have string
		met  bool
	}{
		{setting{"a", "5", exactly}, "5", true}, {setting{"a", "5", exactly}, "6", false}, {setting{"a", "5", exactly}, "", false},
		{setting{"a", "compact,delete", exactly}, "compact, delete", true}, {setting{"a", "TRUE", exactly}, "true", true},
		{setting{"a", "5", atLeast}, "5", true}, {setting{"a", "5", atLeast}, "6", true}, {setting{"a", "5", atLeast}, "4", false},
		{setting{"a", "5", atLeast}, "-1", true}, {setting{"a", "-1", atLeast}, "-1", true}, {setting{"a", "-1", atLeast}, "5", false}, {setting{"a", "5", atLeast}, "x", false},
		{setting{"a", "5", onCreation}, "4", true},
	} {
		if got := tc.s.met(tc.have); got != tc.met {
			t.Errorf("%+v with %q: %t", tc.s, tc.have, got)
		}
	}
}

func TestVersions(t *testing.T) {
	t.Parallel()
	for guess, want := range map[string]string{"v4.1": "4.1", "at least v4.2": "at least 4.2", "between v3.6 and v3.7": "between 3.6 and 3.7", "": ""} {
		if got := tidyVersion(guess); got != want {
			t.Errorf("%q became %q, want %q", guess, got, want)
		}
	}
}

// TestCredentials: what cannot work is said before anything is sent.
func TestCredentials(t *testing.T) {
	t.Parallel()
	const servers = `{"bootstrapServers": ["127.0.0.1:1"]`
	if _, err := newDialer(broker.Config{Endpoint: json.RawMessage(servers + `, "sasl": {"mechanism": "PLAIN"}}`)}, mode{}); !errors.Is(err, broker.ErrUnsupported) {
		t.Errorf("a mechanism without credentials: %v", err)
	}
	for _, tc := range []struct {
		mechanism string
		creds     broker.Credentials
		err       error
		want      error
	}{
		{saslPlain, broker.Credentials{Username: "u", Password: "p"}, nil, nil},
		{saslPlain, broker.Credentials{Username: "u"}, nil, broker.ErrUnauthorized},
		{saslScram512, broker.Credentials{Token: "t"}, nil, broker.ErrUnauthorized},
		{saslOAuth, broker.Credentials{Token: "t"}, nil, nil},
		{saslOAuth, broker.Credentials{Username: "u", Password: "p"}, nil, broker.ErrUnauthorized},
		{saslPlain, broker.Credentials{}, errors.New("no such file"), broker.ErrUnavailable},
		{"", broker.Credentials{}, nil, nil},
		{"", broker.Credentials{Username: "u", Password: "p"}, nil, broker.ErrUnsupported},
	} {
		e := servers + "}"
		if tc.mechanism != "" {
			e = servers + `, "sasl": {"mechanism": "` + tc.mechanism + `"}}`
		}
		d, err := newDialer(broker.Config{Endpoint: json.RawMessage(e), Credentials: func(context.Context) (broker.Credentials, error) { return tc.creds, tc.err }}, mode{})
		must(t, err)
		if err := d.checkCredentials(t.Context()); !errors.Is(err, tc.want) || (err == nil) != (tc.want == nil) {
			t.Errorf("%s with %+v: %v, want %v", tc.mechanism, tc.creds.Username, err, tc.want)
		}
	}
}

func TestLibraryLog(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	for _, level := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelError} {
		l := libraryLog{slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: level})), "kafka:9092"}
		levels := []kgo.LogLevel{kgo.LogLevelError, kgo.LogLevelWarn}
		want := map[slog.Level]kgo.LogLevel{slog.LevelDebug: kgo.LogLevelWarn, slog.LevelInfo: kgo.LogLevelError, slog.LevelError: kgo.LogLevelNone}[level]
		if l.Level() != want {
			t.Errorf("at %s the library tells %s, want %s", level, l.Level(), want)
		}
		for _, at := range levels {
			l.Log(at, at.String(), "broker", 1)
		}
	}
	var got []string
	for line := range strings.Lines(out.String()) {
		f := strings.Fields(line)
		got = append(got, f[1]+" "+f[4])
	}
	if want := []string{`level=WARN ERROR"`, `level=DEBUG WARN"`, `level=WARN ERROR"`}; !slices.Equal(got, want) {
		t.Errorf("logged %q, want %q: %s", got, want, out.String())
	}
}
