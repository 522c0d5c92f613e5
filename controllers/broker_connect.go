package controllers

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/topology"
)

// counters counts failures in a row per object.
type counters struct {
	mu sync.Mutex
	n  map[types.NamespacedName]int
}

func (c *counters) add(key types.NamespacedName) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = map[types.NamespacedName]int{}
	}
	c.n[key]++
	return c.n[key]
}

func (c *counters) forget(key types.NamespacedName) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.n, key)
}

// connect sees to the connection and fills the status with what the server says. What is wrong becomes a condition;
// the error is one of the API server's.
func (r *brokerReconciler) connect(ctx context.Context, s *brokerScope) error {
	b := s.broker
	s.status.Kind = b.Spec.Kind()
	kind := render.Kind(b)
	driver, ok := r.drivers[kind]
	if !ok {
		s.fail(stalled, v1alpha1.ReasonBackendNotAvailable, fmt.Sprintf("this release has no backend for brokers of kind %s", s.status.Kind))
		return nil
	}
	if b.Spec.Embedded != nil {
		if up, err := r.embed(ctx, s); err != nil || !up {
			return err
		}
	}
	endpoint, err := r.endpoint(b)
	if err == nil && driver.LeaseLimit != nil {
		_, err = driver.LeaseLimit(endpoint) // what reads the endpoint without a connection
	}
	if err != nil {
		s.fail(stalled, v1alpha1.ReasonInvalidSpec, plain(err))
		return nil
	}
	a, err := readAccess(ctx, r.live, b)
	if bad, ok := errors.AsType[*secretError](err); ok {
		s.fail(stalled, bad.reason, bad.message)
		s.after = jitter(resyncOf(b)) // rights and endpoints may change without an event
		return nil
	}
	if err != nil {
		return err
	}
	entry, err := r.open(ctx, s, driver, endpoint, a)
	if err == nil {
		entry.observer.configure(kind, resyncOf(b), r.topologies.addLater)
		err = r.probe(ctx, s, entry)
	}
	if err != nil {
		r.refused(s, err)
		return nil
	}
	r.failures.forget(client.ObjectKeyFromObject(b))
	s.status.SecretHash = a.hash
	s.after = jitter(probeInterval)
	return nil
}

// endpoint is where the operator connects to.
func (r *brokerReconciler) endpoint(b *v1alpha1.Broker) (json.RawMessage, error) {
	if b.Spec.Embedded != nil {
		return json.Marshal(v1alpha1.NATSBroker{Servers: r.embedded.servers(b)})
	}
	return render.Endpoint(b)
}

// open returns the Broker's entry, with a new connection where what it depends on has changed.
func (r *brokerReconciler) open(ctx context.Context, s *brokerScope, driver broker.Driver, endpoint json.RawMessage, a access) (*brokerEntry, error) {
	b := s.broker
	key := connectionKey(driver.Kind, endpoint, b.Spec.TLS, a.hash)
	cfg := broker.Config{Endpoint: endpoint, Name: fmt.Sprintf("%s %s/%s", FieldOwner, b.Namespace, b.Name)}
	if a.credentials != nil {
		cfg.Credentials = func(context.Context) (broker.Credentials, error) { return *a.credentials, nil }
	}
	if a.tls != nil {
		cfg.TLS = func() (*tls.Config, error) { return a.tls.Clone(), nil }
	}
	before := r.pool.entry(b.UID)
	wasUp, epoch := before.up(), before.currentEpoch()
	entry, err := r.pool.ensure(ctx, b.UID, client.ObjectKeyFromObject(b), key, func(ctx context.Context) (broker.Admin, error) {
		return driver.OpenAdmin(ctx, cfg)
	})
	if err != nil {
		r.metrics.backendError(driver.Kind, err)
		return nil, err
	}
	if entry.currentEpoch() == epoch {
		return entry, nil
	}
	if wasUp && s.broker.Status.SecretHash != a.hash {
		s.notes = append(s.notes, normal(EventCredentialsRotated, actionConnect, "a Secret changed: a new connection replaces the old one"))
	}
	if !wasUp { // whoever found the connection down has returned without doing anything
		topologies, err := r.dependents(ctx, entry.name)
		if err != nil {
			return nil, err
		}
		for i := range topologies {
			r.topologies.addLater(client.ObjectKeyFromObject(&topologies[i]))
		}
	}
	return entry, nil
}

// connectionKey is the same as long as a connection need not be replaced.
func connectionKey(kind topology.Kind, endpoint json.RawMessage, t *v1alpha1.BrokerTLS, secrets string) string {
	sum := sha256.New()
	fmt.Fprintf(sum, "%s\n%s\n%s\n", kind, endpoint, secrets)
	if t != nil {
		fmt.Fprintln(sum, t.ServerName)
	}
	return hex.EncodeToString(sum.Sum(nil))
}

func resyncOf(b *v1alpha1.Broker) time.Duration {
	if d := b.Spec.ResyncInterval; d != nil && d.Duration > 0 {
		return d.Duration
	}
	return defaultResync
}

// probe asks the server who it is and how it is.
func (r *brokerReconciler) probe(ctx context.Context, s *brokerScope, entry *brokerEntry) error {
	server, err := entry.probe(ctx)
	if err != nil {
		return err
	}
	s.status.ServerID, s.status.ServerVersion = server.ID, server.Version
	s.conds.true(v1alpha1.ConditionConnected, v1alpha1.ReasonConnected, "the broker answers")
	if rabbit := s.broker.Spec.RabbitMQ; rabbit != nil {
		s.management(rabbit.Management != nil, server.DetailsErr)
	}
	if len(server.Warnings) > 0 {
		s.conds.warn(v1alpha1.ConditionServerWarning, plain(errors.New(strings.Join(server.Warnings, "; "))))
	}
	s.conds.summarise(done, v1alpha1.ReasonReady, fmt.Sprintf("connected to %s", s.status.Kind))
	return nil
}

// management says whether the management API of RabbitMQ answers.
func (s *brokerScope) management(configured bool, err error) {
	const without = "without it unacknowledged counts, arguments and bindings are unknown"
	switch {
	case !configured:
		s.conds.false(v1alpha1.ConditionManagementReady, v1alpha1.ReasonManagementNotConfigured, "rabbitmq.management is not set: "+without)
	case err == nil:
		s.conds.true(v1alpha1.ConditionManagementReady, v1alpha1.ReasonManagementReachable, "the management API answers")
	case errors.Is(err, broker.ErrUnauthorized):
		s.conds.false(v1alpha1.ConditionManagementReady, v1alpha1.ReasonManagementForbidden, "the user may not read the management API: give it the tag monitoring; "+without+": "+plain(err))
	default:
		s.conds.false(v1alpha1.ConditionManagementReady, v1alpha1.ReasonManagementUnreachable, "the management API does not answer; "+without+": "+plain(err))
	}
}

// fail says that there is no connection.
func (s *brokerScope) fail(p progress, reason, message string) {
	s.conds.false(v1alpha1.ConditionConnected, reason, message)
	s.conds.summarise(p, reason, message)
}

// refused turns an error of the broker into conditions, and says when to try again: soon where it may pass by itself,
// at the resync interval where a person has to act on the server.
func (r *brokerReconciler) refused(s *brokerScope, err error) {
	p, reason := refusal(err)
	text := plain(err)
	if s.broker.Spec.Embedded != nil && reason == v1alpha1.ReasonAuthenticationFailed {
		p = working // its server takes over changed users when kubelet has brought it their file
	}
	switch reason {
	case v1alpha1.ReasonAuthenticationFailed:
		text = "the broker refused the credentials: correct the Secret that spec.credentials names, or the user on the server: " + text
	case v1alpha1.ReasonVHostNotFound:
		text = "create it on the server, or correct the address: " + text
	case v1alpha1.ReasonTLSFailed:
		text = "check tls.caSecretRef, tls.serverName and the client certificate: " + text
	}
	s.fail(p, reason, text)
	n := r.failures.add(client.ObjectKeyFromObject(s.broker))
	if p == stalled {
		s.after = jitter(resyncOf(s.broker))
		return
	}
	s.after = backoff(n)
}

func refusal(err error) (progress, string) {
	_, field := errors.AsType[*topology.FieldError](err)
	switch {
	case field:
		return stalled, v1alpha1.ReasonInvalidSpec
	case errors.Is(err, broker.ErrUnauthorized):
		return stalled, v1alpha1.ReasonAuthenticationFailed
	case errors.Is(err, broker.ErrUnsupported):
		return stalled, v1alpha1.ReasonUnsupportedVersion
	case errors.Is(err, broker.ErrNotFound):
		return stalled, v1alpha1.ReasonVHostNotFound
	case isTLS(err):
		return working, v1alpha1.ReasonTLSFailed
	default:
		return working, v1alpha1.ReasonUnreachable
	}
}

func isTLS(err error) bool {
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return true
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return true
	}
	if _, ok := errors.AsType[tls.AlertError](err); ok {
		return true
	}
	_, ok := errors.AsType[x509.UnknownAuthorityError](err)
	return ok
}
