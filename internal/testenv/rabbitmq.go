package testenv

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shove-dev/shove/internal/testenv/rabbitserver"
)

// URLs of a running RabbitMQ server that tests may use, with credentials of an administrator. Both or none.
const (
	RabbitMQURLVar           = "SHOVE_TEST_RABBITMQ_URL"
	RabbitMQManagementURLVar = "SHOVE_TEST_RABBITMQ_MANAGEMENT_URL"
)

// RabbitMQServer is a running server, shared with other tests unless it came from [StartRabbitMQ]. Make a vhost
// for each test with [RabbitMQServer.Vhost]; the default vhost belongs to nobody.
type RabbitMQServer struct {
	URL           string // amqp://user:password@host:port/, the default vhost
	ManagementURL string // http://user:password@host:port, no path
	TLSURL        string // amqps://…, the default vhost; only of a private server started with TLS
	Certificates  rabbitserver.Certificates

	private *rabbitserver.Server
}

// RabbitMQVhost is a virtual host of one test.
type RabbitMQVhost struct {
	Name          string
	URL           string // amqp://user:password@host:port/name
	TLSURL        string // amqps://…/name, if the server listens with TLS
	ManagementURL string // http://user:password@host:port, no path
	Server        RabbitMQServer
}

var sharedRabbitMQ = sync.OnceValues(func() (RabbitMQServer, error) {
	amqp, management := os.Getenv(RabbitMQURLVar), os.Getenv(RabbitMQManagementURLVar)
	switch {
	case amqp != "" && management != "":
		return RabbitMQServer{URL: amqp, ManagementURL: strings.TrimSuffix(management, "/")}, nil
	case amqp != "" || management != "":
		return RabbitMQServer{}, fmt.Errorf("set both of %s and %s, or none", RabbitMQURLVar, RabbitMQManagementURLVar)
	}
	server, err := rabbitserver.Start(context.Background(), rabbitserver.Options{})
	if err != nil {
		return RabbitMQServer{}, err
	}
	AtExit(server.Close)
	return RabbitMQServer{URL: server.URL(), ManagementURL: server.ManagementURL()}, nil
})

// RabbitMQ returns a server that all tests share: the one that the URL variables name, or one that is started once
// for this test binary. It calls [Skip] where there is none.
func RabbitMQ(tb testing.TB) RabbitMQServer {
	tb.Helper()
	server, err := sharedRabbitMQ()
	switch {
	case errors.Is(err, rabbitserver.ErrNotAvailable):
		Skip(tb, err.Error())
	case err != nil:
		tb.Fatal(err)
	}
	return server
}

// StartRabbitMQ starts a server for this test alone, which may be killed, stopped and started again. It takes 4 to
// 8 seconds. It calls [Skip] where no server can be started, even if the URL variables name one.
func StartRabbitMQ(tb testing.TB, opts rabbitserver.Options) *RabbitMQServer {
	tb.Helper()
	server, err := rabbitserver.Start(context.Background(), opts)
	switch {
	case errors.Is(err, rabbitserver.ErrNotAvailable):
		Skip(tb, err.Error())
	case err != nil:
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := server.Close(); err != nil {
			tb.Errorf("closing a private RabbitMQ: %v", err)
		}
	})
	s := &RabbitMQServer{URL: server.URL(), ManagementURL: server.ManagementURL(), Certificates: server.Certificates, private: server}
	if addr := server.TLSAddr(); addr != "" {
		s.TLSURL = "amqps://" + rabbitserver.User + ":" + rabbitserver.Password + "@" + addr + "/"
	}
	return s
}

// Kill ends the server with SIGKILL. Wait two seconds after declaring a quorum queue: a younger one may lose
// confirmed messages (observed on RabbitMQ 3.10 to 4.3). Only for a server of [StartRabbitMQ].
func (s RabbitMQServer) Kill(tb testing.TB) {
	tb.Helper()
	s.lifecycle(tb, "killing", (*rabbitserver.Server).Kill)
}

// Stop ends the server in order. Only for a server of [StartRabbitMQ].
func (s RabbitMQServer) Stop(tb testing.TB) {
	tb.Helper()
	s.lifecycle(tb, "stopping", (*rabbitserver.Server).Stop)
}

// Restart starts a server again that was killed or stopped, on the same ports with the same data, and returns
// when it accepts connections. Only for a server of [StartRabbitMQ].
func (s RabbitMQServer) Restart(tb testing.TB) {
	tb.Helper()
	s.lifecycle(tb, "restarting", func(server *rabbitserver.Server) error { return server.Restart(context.Background()) })
}

func (s RabbitMQServer) lifecycle(tb testing.TB, what string, do func(*rabbitserver.Server) error) {
	tb.Helper()
	if s.private == nil {
		tb.Fatalf("%s a RabbitMQ that other tests share: use StartRabbitMQ", what)
	}
	if err := do(s.private); err != nil {
		tb.Fatalf("%s RabbitMQ: %v", what, err)
	}
}

// Vhost makes a virtual host for this test, with full rights for the server's user, and deletes it with all its
// queues and connections when the test ends.
func (s RabbitMQServer) Vhost(tb testing.TB) RabbitMQVhost {
	tb.Helper()
	name := "t-" + strings.ToLower(rand.Text()[:10])
	s.MustCall(tb, http.MethodPut, "/api/vhosts/"+name, map[string]any{"description": tb.Name()}, nil)
	user := s.user(tb)
	s.MustCall(tb, http.MethodPut, "/api/permissions/"+name+"/"+url.PathEscape(user),
		map[string]string{"configure": ".*", "write": ".*", "read": ".*"}, nil)
	tb.Cleanup(func() {
		err := s.Call(http.MethodDelete, "/api/vhosts/"+name, nil, nil)
		if err != nil && s.private == nil { // a private server may be down by now
			tb.Errorf("deleting the vhost of the test: %v", err)
		}
	})
	v := RabbitMQVhost{Name: name, URL: withPath(tb, s.URL, name), ManagementURL: s.ManagementURL, Server: s}
	if s.TLSURL != "" {
		v.TLSURL = withPath(tb, s.TLSURL, name)
	}
	return v
}

// AddUser makes a user with the given rights (regular expressions for configure, write, read) in the vhost and
// deletes it when the test ends. Tags as in RabbitMQ: "", "monitoring", "administrator" ….
func (v RabbitMQVhost) AddUser(tb testing.TB, name, password, tags, configure, write, read string) {
	tb.Helper()
	path := "/api/users/" + url.PathEscape(name)
	v.Server.MustCall(tb, http.MethodPut, path, map[string]string{"password": password, "tags": tags}, nil)
	tb.Cleanup(func() { _ = v.Server.Call(http.MethodDelete, path, nil, nil) }) // the server may be down by now
	v.Server.MustCall(tb, http.MethodPut, "/api/permissions/"+v.Name+"/"+url.PathEscape(name),
		map[string]string{"configure": configure, "write": write, "read": read}, nil)
}

// MustCall is [RabbitMQServer.Call] that fails the test on an error.
func (s RabbitMQServer) MustCall(tb testing.TB, method, path string, in, out any) {
	tb.Helper()
	if err := s.Call(method, path, in, out); err != nil {
		tb.Fatal(err)
	}
}

// Call sends in as JSON (nil: no body) to the management API at path, which starts with /api/, and reads the answer
// into out (nil: ignored). An answer above 299 is an error.
func (s RabbitMQServer) Call(method, path string, in, out any) error {
	base, err := url.Parse(s.ManagementURL)
	if err != nil {
		return errors.New("the management URL does not parse") // without its text: it holds a password
	}
	var body io.Reader
	if in != nil {
		text, err := json.Marshal(in)
		if err != nil {
			return fmt.Errorf("%s %s: %w", method, path, err)
		}
		body = bytes.NewReader(text)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, base.Scheme+"://"+base.Host+path, body)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	password, _ := base.User.Password()
	req.SetBasicAuth(base.User.Username(), password)
	req.Header.Set("Content-Type", "application/json")
	res, err := noReuse.Do(req)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	if res.StatusCode > 299 {
		return fmt.Errorf("%s %s: %s: %s", method, path, res.Status, text)
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(text, out); err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	return nil
}

// noReuse keeps no idle connection, whose goroutine a leak check would find.
var noReuse = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

func (s RabbitMQServer) user(tb testing.TB) string {
	tb.Helper()
	return mustParse(tb, s.URL).User.Username()
}

func mustParse(tb testing.TB, rawURL string) *url.URL {
	tb.Helper()
	u, err := url.Parse(rawURL)
	if err != nil {
		tb.Fatal("a URL of the test server does not parse") // without its text: it may hold a password
	}
	return u
}

func withPath(tb testing.TB, rawURL, path string) string {
	tb.Helper()
	u := mustParse(tb, rawURL)
	u.Path = "/" + path
	return u.String()
}

func withHost(tb testing.TB, rawURL, host string) string {
	tb.Helper()
	u := mustParse(tb, rawURL)
	u.Host = host
	return u.String()
}
