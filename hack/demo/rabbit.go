package main

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
	"time"

	"github.com/shove-dev/shove/hack/demo/ledger"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/rabbitserver"
)

// rabbit is a virtual host on a RabbitMQ server, with a user for the operator and one for the workloads.
type rabbit struct {
	amqp       *url.URL // with the credentials of an administrator, path is the vhost
	management *url.URL // with the same credentials
	vhost      string
	version    string
	operator   user
	workload   user
	server     *rabbitserver.Server // of this machine; nil: somebody else's
	forward    *forward             // to a server in the user's cluster; nil: there is none
	tap        *tap
}

// startRabbit takes the server that the URL variables name, else starts one where the pods run, and makes the virtual
// host in it.
func startRabbit(ctx context.Context, c *cluster, dir string) (*rabbit, error) {
	r := &rabbit{vhost: "shove-demo-" + strings.ToLower(rand.Text()[:6])}
	r.operator = user{r.vhost + "-operator", rand.Text()}
	r.workload = user{r.vhost + "-orders", rand.Text()}
	amqpURL, managementURL := os.Getenv(testenv.RabbitMQURLVar), os.Getenv(testenv.RabbitMQManagementURLVar)
	switch {
	case amqpURL != "" && managementURL != "":
	case amqpURL != "" || managementURL != "":
		return nil, fmt.Errorf("set both of %s and %s, or none", testenv.RabbitMQURLVar, testenv.RabbitMQManagementURLVar)
	case !c.mine():
		f, admin, err := startRabbitInCluster(ctx, c, dir)
		if err != nil {
			return nil, err
		}
		r.forward = f
		amqpURL, managementURL = "amqp://"+admin+"@"+f.local[amqpPort]+"/", "http://"+admin+"@"+f.local[managementPort]
	default:
		server, err := rabbitserver.Start(ctx, rabbitserver.Options{Config: []string{"collect_statistics_interval = 1000"}})
		if err != nil {
			return nil, err
		}
		r.server, amqpURL, managementURL = server, server.URL(), server.ManagementURL()
	}
	var err error
	if r.amqp, err = url.Parse(amqpURL); err == nil {
		r.management, err = url.Parse(managementURL)
	}
	if err != nil {
		return r, fmt.Errorf("%s or %s is not a URL", testenv.RabbitMQURLVar, testenv.RabbitMQManagementURLVar) // its text may hold a password
	}
	r.amqp = r.amqp.JoinPath("/")
	r.amqp.Path = "/" + r.vhost
	return r, r.prepare(ctx)
}

// prepare makes the virtual host, with the firehose on, and both users. The workloads' user may read and write and
// declare nothing.
func (r *rabbit) prepare(ctx context.Context) error {
	var overview struct {
		Version string `json:"rabbitmq_version"`
	}
	if err := r.call(ctx, http.MethodGet, "/api/overview", nil, &overview); err != nil {
		return err
	}
	r.version = overview.Version
	type object map[string]any
	rights := func(configure string) object { return object{"configure": configure, "write": ".*", "read": ".*"} }
	v := url.PathEscape(r.vhost)
	for _, step := range []struct {
		path string
		body object
	}{
		{"/api/vhosts/" + v, object{"tracing": true, "description": "made by shove's demo"}},
		{"/api/permissions/" + v + "/" + url.PathEscape(r.management.User.Username()), rights(".*")},
		{"/api/users/" + r.operator.Name, object{"password": r.operator.Password, "tags": "monitoring"}},
		{"/api/permissions/" + v + "/" + r.operator.Name, rights(".*")},
		{"/api/users/" + r.workload.Name, object{"password": r.workload.Password, "tags": ""}},
		{"/api/permissions/" + v + "/" + r.workload.Name, rights("^$")},
	} {
		if err := r.call(ctx, http.MethodPut, step.path, step.body, nil); err != nil {
			return fmt.Errorf("%w (the demo needs an administrator of the server)", err)
		}
	}
	return nil
}

func (r *rabbit) title() string { return "RabbitMQ " + r.version + " at " + r.brokerURL() }

func (r *rabbit) overlay(o *overlayData) {
	o.Broker, o.Operator, o.Workload, o.BrokerURL, o.ManagementURL = "rabbitmq", r.operator, r.workload, r.brokerURL(), r.brokerManagementURL()
}

func (r *rabbit) connect(context.Context) (err error) {
	r.tap, err = openTap(r.amqp.String())
	return err
}

func (r *rabbit) book(_ context.Context, l *ledger.Ledger) error {
	r.tap.book(l)
	return nil
}

// close takes away what prepare made, and the server if it is ours.
func (r *rabbit) close() error {
	var tapErr error
	if r.tap != nil {
		tapErr = r.tap.close()
	}
	switch {
	case r.server != nil:
		return errors.Join(tapErr, r.server.Close())
	case r.forward != nil:
		return errors.Join(tapErr, r.forward.close()) // the server goes with its namespace
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return errors.Join(tapErr,
		r.call(ctx, http.MethodDelete, "/api/vhosts/"+url.PathEscape(r.vhost), nil, nil),
		r.call(ctx, http.MethodDelete, "/api/users/"+r.operator.Name, nil, nil),
		r.call(ctx, http.MethodDelete, "/api/users/"+r.workload.Name, nil, nil))
}

// brokerURL is what a Broker's spec holds: without credentials, and as pods reach it.
func (r *rabbit) brokerURL() string {
	u := *r.amqp
	u.User = nil
	if r.forward != nil {
		u.Host = r.forward.host + ":" + amqpPort
	}
	return u.String()
}

// brokerManagementURL is the same for the management API.
func (r *rabbit) brokerManagementURL() string {
	if r.forward != nil {
		return "http://" + r.forward.host + ":" + managementPort
	}
	return r.managementURL()
}

func (r *rabbit) managementURL() string {
	u := *r.management
	u.User, u.Path = nil, ""
	return u.String()
}

// queues reads the management API's view of the virtual host, by queue name. It is one to two seconds old on a server
// that the demo started, and up to seven elsewhere.
func (r *rabbit) queues(ctx context.Context, _ ledger.Queues) (map[string]queueState, error) {
	var list []queueState
	path := "/api/queues/" + url.PathEscape(r.vhost) + "?columns=name,messages_ready,messages_unacknowledged,consumers,message_stats"
	if err := r.call(ctx, http.MethodGet, path, nil, &list); err != nil {
		return nil, err
	}
	out := map[string]queueState{}
	for _, q := range list {
		if !strings.HasPrefix(q.Name, "amq.") { // the tap's own
			out[q.Name] = q
		}
	}
	return out, nil
}

var managementClient = &http.Client{Timeout: 10 * time.Second}

// call asks the management API. Errors hold no credentials.
func (r *rabbit) call(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, r.managementURL()+path, body)
	if err != nil {
		return err
	}
	password, _ := r.management.User.Password()
	req.SetBasicAuth(r.management.User.Username(), password)
	req.Header.Set("Content-Type", "application/json")
	res, err := managementClient.Do(req)
	if err != nil {
		return fmt.Errorf("management API: %w", err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(io.LimitReader(res.Body, 8<<20))
	if err != nil {
		return fmt.Errorf("management API: %s %s: %w", method, path, err)
	}
	if res.StatusCode > 299 {
		return fmt.Errorf("management API: %s %s: %s: %.200s", method, path, res.Status, text)
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(text, out); err != nil {
		return fmt.Errorf("management API: %s %s: %w", method, path, err)
	}
	return nil
}
