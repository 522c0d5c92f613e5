package kafkaserver

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// node is the broker's number.
const node = "1"

// writeConfig writes the broker's files. The data folder is formatted by hand: it spares the start of a second Java
// runtime.
func (s *Server) writeConfig() error {
	data := filepath.Join(s.dir, "data")
	if err := os.MkdirAll(data, 0o755); err != nil {
		return fmt.Errorf("making the data folder: %w", err)
	}
	files := map[string]string{
		filepath.Join(data, "meta.properties"):    lines("version=1", "cluster.id="+newID(), "node.id="+node, "directory.id="+newID()),
		filepath.Join(s.dir, "server.properties"): lines(append(s.properties(data), s.opts.Config...)...),
	}
	if s.opts.Secure {
		store, err := s.keyStore()
		if err != nil {
			return err
		}
		files[s.keyStoreFile()] = store
	}
	for name, text := range files {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			return fmt.Errorf("writing the broker's configuration: %w", err)
		}
	}
	return nil
}

func lines(l ...string) string { return strings.Join(l, "\n") + "\n" }

// newID is an id as Kafka writes them: 16 bytes in base 64.
func newID() string {
	id := make([]byte, 16)
	_, _ = rand.Read(id) // never fails
	id[0] |= 0x80        // not one of the first hundred, which Kafka keeps for itself
	return base64.RawURLEncoding.EncodeToString(id)
}

// properties are the broker's settings: defaults of Kafka, but for one node instead of three, small, and quick to see
// that a consumer or a topic is gone.
func (s *Server) properties(data string) []string {
	var listen, advertise, protocols []string
	for _, name := range s.listeners() {
		listen = append(listen, name+"://"+s.Addr(name))
		protocols = append(protocols, name+":"+protocol[name])
		if name != controller {
			advertise = append(advertise, name+"://"+s.advertised(name))
		}
	}
	out := []string{
		"process.roles=broker,controller",
		"node.id=" + node,
		"controller.quorum.voters=" + node + "@" + s.Addr(controller),
		"listeners=" + strings.Join(listen, ","),
		"advertised.listeners=" + strings.Join(advertise, ","),
		"listener.security.protocol.map=" + strings.Join(protocols, ","),
		"inter.broker.listener.name=" + Plain,
		"controller.listener.names=" + controller,
		"log.dirs=" + data,
		"authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer",
		"super.users=User:ANONYMOUS;User:" + User,

		"offsets.topic.replication.factor=1", "offsets.topic.num.partitions=4",
		"transaction.state.log.replication.factor=1", "transaction.state.log.min.isr=1", "transaction.state.log.num.partitions=4",
		"share.coordinator.state.topic.replication.factor=1", "share.coordinator.state.topic.min.isr=1", "share.coordinator.state.topic.num.partitions=1",
		"group.initial.rebalance.delay.ms=0", "group.min.session.timeout.ms=200",
		"log.segment.delete.delay.ms=1000", "log.index.size.max.bytes=1048576", "log.cleaner.dedupe.buffer.size=4194304",
		"num.network.threads=2", "num.io.threads=4", "background.threads=4", "queued.max.requests=100",
	}
	if s.opts.Secure {
		out = append(out, s.security()...)
	}
	return out
}

var protocol = map[string]string{
	controller: "PLAINTEXT", Plain: "PLAINTEXT", SASL: "SASL_PLAINTEXT", TLS: "SSL", MTLS: "SSL", SASLTLS: "SASL_SSL",
}

// security are the settings of the listeners beside Plain.
func (s *Server) security() []string {
	out := []string{
		"ssl.keystore.type=PEM", "ssl.keystore.location=" + s.keyStoreFile(),
		"ssl.truststore.type=PEM", "ssl.truststore.location=" + s.Certificates.CA,
		"listener.name.tls.ssl.client.auth=none", "listener.name.sasltls.ssl.client.auth=none", "listener.name.mtls.ssl.client.auth=required",
		"sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
	}
	for _, listener := range []string{"sasl", "sasltls"} {
		prefix := "listener.name." + listener + "."
		out = append(out,
			fmt.Sprintf("%splain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required user_%s=%q user_%s=%q;",
				prefix, User, Password, Weak, WeakPassword),
			prefix+"scram-sha-256.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;",
			prefix+"scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;")
	}
	return out
}

func (s *Server) keyStoreFile() string { return filepath.Join(s.dir, "tls", "keystore.pem") }

// keyStore is the broker's key and certificate in one file, as Kafka wants them.
func (s *Server) keyStore() (string, error) {
	key, err := os.ReadFile(s.Certificates.ServerKey)
	if err != nil {
		return "", fmt.Errorf("reading the broker's key: %w", err)
	}
	cert, err := os.ReadFile(s.Certificates.ServerCert)
	if err != nil {
		return "", fmt.Errorf("reading the broker's certificate: %w", err)
	}
	return string(key) + string(cert), nil
}
