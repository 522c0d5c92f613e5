package config

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/shove-dev/shove/broker"
)

func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func TestReadCredentials(t *testing.T) {
	cases := map[string]struct {
		files  map[string]string
		prefix string
		want   broker.Credentials
		err    string
	}{
		"username and password": {files: map[string]string{"username": "app\n", "password": "s3cr3t\r\n"}, want: broker.Credentials{Username: "app", Password: "s3cr3t"}},
		"every key": {files: map[string]string{"username": "1", "password": "2", "token": "3", "nkey": "4", "creds": "5", "accessKeyId": "6", "secretAccessKey": "7", "sessionToken": "8"},
			want: broker.Credentials{Username: "1", Password: "2", Token: "3", NKey: "4", Creds: "5", AccessKeyID: "6", SecretAccessKey: "7", SessionToken: "8"}},
		"inner space is kept":  {files: map[string]string{"token": " a b \n"}, want: broker.Credentials{Token: " a b "}},
		"prefix":               {files: map[string]string{"rabbit-username": "app", "username": "other"}, prefix: "rabbit-", want: broker.Credentials{Username: "app"}},
		"other files are none": {files: map[string]string{"config.yaml": "x"}, err: "no key found"},
		"an empty directory":   {err: "no key found"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, dir, c.files)
			got, err := ReadCredentials(Broker{Name: "b", CredentialsDir: dir, CredentialsPrefix: c.prefix})
			if (err == nil) != (c.err == "") || err != nil && (!strings.Contains(err.Error(), c.err) || !strings.Contains(err.Error(), `"b"`)) {
				t.Fatalf("got %v, want %q", err, c.err)
			}
			if got != c.want { // cmp.Diff would show them
				t.Error("the credentials differ")
			}
		})
	}
	t.Run("unreadable", func(t *testing.T) {
		dir := t.TempDir()
		if err := os.Mkdir(filepath.Join(dir, "password"), 0o755); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadCredentials(Broker{Name: "b", CredentialsDir: dir}); err == nil {
			t.Error("a directory as password was accepted")
		}
	})
}

// TestReadCredentialsNeverMixesVersions rotates a volume while it is read.
func TestReadCredentialsNeverMixesVersions(t *testing.T) {
	dir := t.TempDir()
	rotate := func(n int) {
		version := fmt.Sprintf("..v%d", n)
		if err := os.Mkdir(filepath.Join(dir, version), 0o755); err != nil {
			t.Error(err)
			return
		}
		text := fmt.Sprint(n)
		for _, name := range []string{"username", "password"} {
			if err := os.WriteFile(filepath.Join(dir, version, name), []byte(text), 0o600); err != nil {
				t.Error(err)
			}
		}
		tmp := filepath.Join(dir, "..data_tmp")
		if err := os.Symlink(version, tmp); err != nil {
			t.Error(err)
		}
		if err := os.Rename(tmp, filepath.Join(dir, "..data")); err != nil {
			t.Error(err)
		}
	}
	rotate(0)
	for _, name := range []string{"username", "password"} {
		if err := os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		for n := 1; n < 200; n++ {
			rotate(n)
		}
	})
	for range 500 {
		c, err := ReadCredentials(Broker{Name: "b", CredentialsDir: dir})
		if err != nil {
			t.Fatal(err)
		}
		if c.Username != c.Password {
			t.Fatalf("the user of version %s with the password of version %s", c.Username, c.Password)
		}
	}
}

// keyPair writes a self-signed certificate and its key.
func keyPair(t *testing.T, dir, name string) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour)}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	write(t, dir, map[string]string{
		"tls.crt": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})),
		"tls.key": string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})),
	})
	return filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
}

func TestTLSLoader(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile := keyPair(t, dir, "first")
	load := TLSLoader(&TLS{CAFile: certFile, CertFile: certFile, KeyFile: keyFile, ServerName: "rabbit"})
	first, err := load()
	if err != nil {
		t.Fatal(err)
	}
	if first.ServerName != "rabbit" || first.RootCAs == nil || len(first.Certificates) != 1 || first.InsecureSkipVerify {
		t.Errorf("got %+v", first)
	}
	keyPair(t, dir, "second") // rotated
	second, err := load()
	if err != nil {
		t.Fatal(err)
	}
	if cmp.Equal(first.Certificates[0].Certificate, second.Certificates[0].Certificate) {
		t.Error("the rotated certificate is not used")
	}

	write(t, dir, map[string]string{"empty": "", "broken.key": "-----BEGIN PRIVATE KEY-----\ns3cr3t\n"})
	for name, c := range map[string]*TLS{
		"missing CA":       {CAFile: filepath.Join(dir, "none")},
		"CA without PEM":   {CAFile: filepath.Join(dir, "empty")},
		"missing key":      {CertFile: certFile, KeyFile: filepath.Join(dir, "none")},
		"certificate only": {CertFile: certFile},
		"broken key":       {CertFile: certFile, KeyFile: filepath.Join(dir, "broken.key")},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := TLSLoader(c)()
			if err == nil || strings.Contains(err.Error(), "s3cr3t") {
				t.Errorf("got %v", err)
			}
		})
	}
}
