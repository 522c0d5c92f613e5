package rabbitserver

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// Certificates names PEM files made for one server: its authority, its own pair for localhost and 127.0.0.1, and a
// pair for a client whose common name is "shove-test".
type Certificates struct {
	CA                    string
	ServerCert, ServerKey string
	ClientCert, ClientKey string
}

// NewCertificates makes the files in dir, valid for a day.
func NewCertificates(dir string) (Certificates, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return Certificates{}, fmt.Errorf("making the certificate folder: %w", err)
	}
	c := Certificates{
		CA:         filepath.Join(dir, "ca.crt"),
		ServerCert: filepath.Join(dir, "server.crt"), ServerKey: filepath.Join(dir, "server.key"),
		ClientCert: filepath.Join(dir, "client.crt"), ClientKey: filepath.Join(dir, "client.key"),
	}
	ca := &x509.Certificate{
		Subject: pkix.Name{CommonName: "shove-test-ca"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return c, fmt.Errorf("making the authority's key: %w", err)
	}
	if err := issue(ca, ca, caKey, caKey, c.CA, ""); err != nil {
		return c, err
	}
	server := &x509.Certificate{
		Subject: pkix.Name{CommonName: "localhost"}, DNSNames: []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	client := &x509.Certificate{
		Subject:  pkix.Name{CommonName: "shove-test"},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if err := issueNew(server, ca, caKey, c.ServerCert, c.ServerKey); err != nil {
		return c, err
	}
	return c, issueNew(client, ca, caKey, c.ClientCert, c.ClientKey)
}

func issueNew(cert, parent *x509.Certificate, parentKey *ecdsa.PrivateKey, certFile, keyFile string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("making a key for %q: %w", cert.Subject.CommonName, err)
	}
	return issue(cert, parent, key, parentKey, certFile, keyFile)
}

// issue signs cert with parentKey and writes it, and the key unless keyFile is empty.
func issue(cert, parent *x509.Certificate, key, parentKey *ecdsa.PrivateKey, certFile, keyFile string) error {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return fmt.Errorf("making a serial number: %w", err)
	}
	cert.SerialNumber = serial
	cert.NotBefore, cert.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(24*time.Hour)
	der, err := x509.CreateCertificate(rand.Reader, cert, parent, &key.PublicKey, parentKey)
	if err != nil {
		return fmt.Errorf("signing the certificate of %q: %w", cert.Subject.CommonName, err)
	}
	if err := writePEM(certFile, "CERTIFICATE", der, 0o644); err != nil || keyFile == "" {
		return err
	}
	der, err = x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return fmt.Errorf("encoding the key of %q: %w", cert.Subject.CommonName, err)
	}
	return writePEM(keyFile, "PRIVATE KEY", der, 0o600)
}

func writePEM(file, kind string, der []byte, mode os.FileMode) error {
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), mode); err != nil {
		return fmt.Errorf("writing a certificate: %w", err)
	}
	return nil
}
