package controllers

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/controllers/render"
)

// Keys of Secrets. They are a fixed contract.
const (
	keyUsername, keyPassword                       = "username", "password"
	keyToken, keyNKey, keyCreds                    = "token", "nkey", "creds"
	keyAccessKeyID, keySecretAccessKey, keySession = "accessKeyId", "secretAccessKey", "sessionToken"
	keyCA, keyCert, keyPrivate                     = "ca.crt", "tls.crt", "tls.key"
	acceptedKeys                                   = "username and password, token, nkey, creds, or accessKeyId and secretAccessKey"
)

// secretError is a Secret that cannot be used, as a condition's reason and message.
type secretError struct{ reason, message string }

func (e *secretError) Error() string { return e.message }

// readSecret reads one Secret by name, past any cache: nothing keeps Secrets in memory that nobody asked for.
func readSecret(ctx context.Context, live client.Reader, key types.NamespacedName, field string) (*corev1.Secret, error) {
	s := &corev1.Secret{}
	err := live.Get(ctx, key, s)
	switch {
	case apierrors.IsNotFound(err):
		return nil, &secretError{v1alpha1.ReasonSecretNotFound, fmt.Sprintf("Secret %q, named by %s, does not exist in namespace %q: create it", key.Name, field, key.Namespace)}
	case apierrors.IsForbidden(err):
		return nil, &secretError{v1alpha1.ReasonSecretForbidden, fmt.Sprintf("the operator may not read Secret %q in namespace %q, named by %s: add the namespace to the namespaces whose Secrets it may read", key.Name, key.Namespace, field)}
	case err != nil:
		return nil, fmt.Errorf("read Secret %q: %w", key.Name, err)
	}
	return s, nil
}

// operatorSecrets are the names of the Secrets that the operator's own connection needs.
func operatorSecrets(b *v1alpha1.Broker) []string {
	var names []string
	if c := render.OperatorCredentials(b); c != nil {
		names = append(names, c.SecretRef.Name)
	}
	if t := b.Spec.TLS; t != nil {
		if t.CASecretRef != nil {
			names = append(names, t.CASecretRef.Name)
		}
		if t.ClientCertSecretRef != nil {
			names = append(names, t.ClientCertSecretRef.Name)
		}
	}
	return names
}

// access is what a connection needs from Secrets. It is never logged: its String says nothing.
type access struct {
	credentials *broker.Credentials
	tls         *tls.Config
	// hash is over name, UID and resource version of every Secret, never over what is in them.
	hash string
}

func (access) String() string { return "(access)" }

// readAccess reads the Secrets that a Broker names. The error is a *secretError where a person has to act.
func readAccess(ctx context.Context, live client.Reader, b *v1alpha1.Broker) (access, error) {
	var a access
	var used []string
	read := func(name, field string) (*corev1.Secret, error) {
		s, err := readSecret(ctx, live, types.NamespacedName{Namespace: b.Namespace, Name: name}, field)
		if err == nil {
			used = append(used, s.Name+" "+string(s.UID)+" "+s.ResourceVersion)
		}
		return s, err
	}
	if c := render.OperatorCredentials(b); c != nil {
		s, err := read(c.SecretRef.Name, "spec.credentials")
		if err != nil {
			return access{}, err
		}
		creds, err := credentialsOf(s)
		if err != nil {
			return access{}, err
		}
		a.credentials = &creds
	}
	if t := b.Spec.TLS; t != nil {
		cfg, err := tlsConfig(t, read)
		if err != nil {
			return access{}, err
		}
		a.tls = cfg
	}
	if len(used) > 0 {
		slices.Sort(used)
		sum := sha256.New()
		for _, u := range slices.Compact(used) {
			fmt.Fprintln(sum, u)
		}
		a.hash = hex.EncodeToString(sum.Sum(nil)[:16])
	}
	return a, nil
}

// credentialsOf takes the first complete set of keys.
func credentialsOf(s *corev1.Secret) (broker.Credentials, error) {
	get := func(key string) string { return string(s.Data[key]) }
	has := func(keys ...string) bool {
		return !slices.ContainsFunc(keys, func(k string) bool { return len(s.Data[k]) == 0 })
	}
	switch {
	case has(keyUsername, keyPassword):
		return broker.Credentials{Username: get(keyUsername), Password: get(keyPassword)}, nil
	case has(keyToken):
		return broker.Credentials{Token: get(keyToken)}, nil
	case has(keyNKey):
		return broker.Credentials{NKey: get(keyNKey)}, nil
	case has(keyCreds):
		return broker.Credentials{Creds: get(keyCreds)}, nil
	case has(keyAccessKeyID, keySecretAccessKey):
		return broker.Credentials{AccessKeyID: get(keyAccessKeyID), SecretAccessKey: get(keySecretAccessKey), SessionToken: get(keySession)}, nil
	}
	return broker.Credentials{}, missingKey(s, "credentials need the keys "+acceptedKeys)
}

func missingKey(s *corev1.Secret, needs string) error {
	return &secretError{v1alpha1.ReasonSecretKeyMissing, fmt.Sprintf("Secret %q lacks a key, or it is empty: %s", s.Name, needs)}
}

func tlsConfig(t *v1alpha1.BrokerTLS, read func(name, field string) (*corev1.Secret, error)) (*tls.Config, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: t.ServerName}
	if ref := t.CASecretRef; ref != nil {
		s, err := read(ref.Name, "spec.tls.caSecretRef")
		if err != nil {
			return nil, err
		}
		if len(s.Data[keyCA]) == 0 {
			return nil, missingKey(s, "certificate authorities need the key "+keyCA)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(s.Data[keyCA]) {
			return nil, &secretError{v1alpha1.ReasonTLSFailed, fmt.Sprintf("key %q of Secret %q holds no PEM certificate", keyCA, s.Name)}
		}
	}
	if ref := t.ClientCertSecretRef; ref != nil {
		s, err := read(ref.Name, "spec.tls.clientCertSecretRef")
		if err != nil {
			return nil, err
		}
		if len(s.Data[keyCert]) == 0 || len(s.Data[keyPrivate]) == 0 {
			return nil, missingKey(s, "a client certificate needs the keys "+keyCert+" and "+keyPrivate)
		}
		pair, err := tls.X509KeyPair(s.Data[keyCert], s.Data[keyPrivate])
		if err != nil { // without its text: it may quote the key
			return nil, &secretError{v1alpha1.ReasonTLSFailed, fmt.Sprintf("keys %q and %q of Secret %q are not a certificate and its private key in PEM", keyCert, keyPrivate, s.Name)}
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return cfg, nil
}
