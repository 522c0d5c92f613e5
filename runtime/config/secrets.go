package config

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/shove-dev/shove/broker"
)

// ReadCredentials reads a broker's credentials from their files, one per secret key. Missing files are absent keys. It
// is called at every connection attempt, so that a rotated secret is used without a restart. Keys of two versions are
// never mixed where the directory is a Kubernetes volume, which swaps all of its files at once.
func ReadCredentials(b Broker) (broker.Credentials, error) {
	const attempts = 20
	for n := 1; ; n++ {
		version := volumeVersion(b.CredentialsDir)
		c, err := readCredentials(b)
		if n < attempts && volumeVersion(b.CredentialsDir) != version {
			continue // swapped while it was read
		}
		if err != nil {
			return broker.Credentials{}, fmt.Errorf("read credentials of broker %q: %w", b.Name, err)
		}
		return c, nil
	}
}

// volumeVersion is where the link "..data" of a Kubernetes volume points; empty in any other directory.
func volumeVersion(dir string) string {
	target, err := os.Readlink(filepath.Join(dir, "..data"))
	if err != nil {
		return ""
	}
	return target
}

func readCredentials(b Broker) (c broker.Credentials, err error) {
	for key, dst := range map[string]*string{
		"username": &c.Username, "password": &c.Password, "token": &c.Token, "nkey": &c.NKey, "creds": &c.Creds,
		"accessKeyId": &c.AccessKeyID, "secretAccessKey": &c.SecretAccessKey, "sessionToken": &c.SessionToken,
	} {
		content, err := os.ReadFile(b.CredentialFile(key))
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return broker.Credentials{}, err
		default:
			*dst = strings.TrimRight(string(content), "\r\n")
		}
	}
	if c == (broker.Credentials{}) {
		return c, fmt.Errorf("no key found in %q", b.CredentialsDir)
	}
	return c, nil
}

// TLSLoader returns a function that reads the files anew at every connection attempt.
func TLSLoader(t *TLS) func() (*tls.Config, error) {
	return func() (*tls.Config, error) {
		cfg := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: t.ServerName}
		if t.CAFile != "" {
			pem, err := os.ReadFile(t.CAFile)
			if err != nil {
				return nil, fmt.Errorf("read the certificate authority: %w", err)
			}
			cfg.RootCAs = x509.NewCertPool()
			if !cfg.RootCAs.AppendCertsFromPEM(pem) {
				return nil, fmt.Errorf("read the certificate authority: %q has no PEM certificate", t.CAFile)
			}
		}
		if t.CertFile != "" || t.KeyFile != "" {
			cert, err := tls.LoadX509KeyPair(t.CertFile, t.KeyFile)
			if err != nil {
				return nil, fmt.Errorf("read the client certificate: %w", err)
			}
			cfg.Certificates = []tls.Certificate{cert}
		}
		return cfg, nil
	}
}
