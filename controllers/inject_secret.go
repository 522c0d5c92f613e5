package controllers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/controllers/render"
)

// gather reads the Secrets that the plan's connections are made from. Where one cannot be read, what a pod has already
// stays as it is and a finding says so; without that, whoever needs it is not served, and the plan is made again.
func (r *injectReconciler) gather(ctx context.Context, s *injectScope, existing *corev1.Secret) (map[string]render.Facts, error) {
	for {
		s.secrets = map[string][]byte{}
		facts := map[string]render.Facts{}
		lost := false
		for _, c := range s.plan.Brokers {
			data, f, err := r.connectionData(ctx, c)
			var problem *secretError
			switch {
			case errors.As(err, &problem):
				kept, keptFacts := carriedOver(c, existing)
				lost = lost || len(kept) == 0
				s.blame(c, problem, len(kept) == 0)
				data, f = kept, keptFacts
			case err != nil:
				return nil, err
			}
			maps.Copy(s.secrets, data)
			facts[c.Name] = f
		}
		if !lost {
			return facts, nil
		}
		s.plan = render.NewPlan(s.target, s.containers(), s.out.members.consumers, s.out.members.publishers)
	}
}

func (s *injectScope) containers() []string {
	if s.workload == nil {
		return nil
	}
	return s.workload.containers()
}

// blame adds a finding to everyone who uses a connection.
func (s *injectScope) blame(c render.Connection, problem *secretError, blocks bool) {
	f := render.Finding{Condition: v1alpha1.ConditionCredentialsReady, Reason: problem.reason, Message: problem.message, Blocks: blocks}
	add := func(to *[]render.Finding) {
		if !slices.Contains(*to, f) {
			*to = append(*to, f)
		}
	}
	for _, k := range s.plan.Consumers {
		if c.Serves(k.Link, k.Credentials) {
			add(&k.Findings)
		}
	}
	for _, p := range s.plan.Publishers {
		if c.Serves(p.Link, p.Credentials) {
			add(&p.Findings)
		}
	}
}

// connectionData reads a connection's Secrets. The error is a *secretError where a person has to act.
func (r *injectReconciler) connectionData(ctx context.Context, c render.Connection) (map[string][]byte, render.Facts, error) {
	field := "workloadCredentials or credentials of Broker " + c.Link.Broker.Name
	if c.Own {
		field = "spec.credentials"
	}
	read := func(key *types.NamespacedName, field string) (map[string][]byte, error) {
		if key == nil {
			return nil, nil
		}
		s, err := readSecret(ctx, r.live, *key, field)
		if err != nil {
			return nil, err
		}
		return s.Data, nil
	}
	credentials, err := read(c.Secret, field)
	if err != nil {
		return nil, render.Facts{}, err
	}
	if c.Secret != nil && (len(credentials[keyCert]) == 0 || len(credentials[keyPrivate]) == 0) {
		if _, err := credentialsOf(&corev1.Secret{ObjectMeta: metaName(c.Secret.Name), Data: credentials}); err != nil {
			return nil, render.Facts{}, err
		}
	}
	ca, err := read(c.CA, "tls.caSecretRef of Broker "+c.Link.Broker.Name)
	if err != nil {
		return nil, render.Facts{}, err
	}
	if c.CA != nil && len(ca[keyCA]) == 0 {
		return nil, render.Facts{}, missingKey(&corev1.Secret{ObjectMeta: metaName(c.CA.Name)}, "certificate authorities need the key "+keyCA)
	}
	pair, err := read(c.ClientCert, "tls.clientCertSecretRef of Broker "+c.Link.Broker.Name)
	if err != nil {
		return nil, render.Facts{}, err
	}
	data, facts := render.SecretData(c, credentials, ca, pair)
	return data, facts, nil
}

// carriedOver is what a rendered Secret holds for a connection already.
func carriedOver(c render.Connection, existing *corev1.Secret) (map[string][]byte, render.Facts) {
	out := map[string][]byte{}
	if existing == nil {
		return out, render.Facts{}
	}
	for _, key := range append(render.CredentialKeys(), render.KeyCA) {
		if v, ok := existing.Data[c.Prefix+key]; ok {
			out[c.Prefix+key] = v
		}
	}
	return out, render.Facts{ClientCert: out[c.Prefix+render.KeyTLSCert] != nil}
}

// renderedSecret reads the target's Secret; nil where there is none, or where it may not be read.
func (r *injectReconciler) renderedSecret(ctx context.Context, t render.Target) (*corev1.Secret, error) {
	s, err := readSecret(ctx, r.live, types.NamespacedName{Namespace: t.Namespace, Name: t.ObjectName()}, "the injection")
	var problem *secretError
	if errors.As(err, &problem) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read rendered Secret: %w", err)
	}
	return s, nil
}
