package testenv

import (
	"context"
	"crypto/rand"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/shove-dev/shove/internal/testenv/kafkaserver"
)

// KafkaServersVar names a running Kafka cluster that tests may use without credentials and with all rights:
// host:port[,host:port …].
const KafkaServersVar = "SHOVE_TEST_KAFKA_SERVERS"

// KafkaServer is a running broker that is shared with other tests. Use names of topics and groups of your own.
type KafkaServer struct {
	Servers []string // host:port
}

var sharedKafka = sync.OnceValues(func() (KafkaServer, error) {
	if servers := os.Getenv(KafkaServersVar); servers != "" {
		return KafkaServer{Servers: strings.Split(servers, ",")}, nil
	}
	server, err := kafkaserver.Start(context.Background(), kafkaserver.Options{})
	if err != nil {
		return KafkaServer{}, err
	}
	AtExit(server.Close)
	return KafkaServer{Servers: []string{server.Addr(kafkaserver.Plain)}}, nil
})

// Kafka returns a broker that all tests share: the one that the variable names, or one that is started once for this
// test binary. It calls [Skip] where there is none.
func Kafka(tb testing.TB) KafkaServer {
	tb.Helper()
	server, err := sharedKafka()
	kafkaFailed(tb, err)
	return server
}

// StartKafka starts a broker for this test alone, which may be killed, stopped and started again. It takes about 5 s.
// It calls [Skip] where none can be started, even if the variable names one.
func StartKafka(tb testing.TB, opts kafkaserver.Options) *kafkaserver.Server {
	tb.Helper()
	server, err := kafkaserver.Start(context.Background(), opts)
	kafkaFailed(tb, err)
	tb.Cleanup(func() {
		if err := server.Close(); err != nil {
			tb.Errorf("closing a private Kafka: %v", err)
		}
	})
	return server
}

var secureKafka = sync.OnceValues(func() (*kafkaserver.Server, error) {
	server, err := kafkaserver.Start(context.Background(), kafkaserver.Options{Secure: true})
	if err != nil {
		return nil, err
	}
	AtExit(server.Close)
	return server, nil
})

// SecureKafka returns a broker with every kind of listener that is started once for this test binary. Its tests may
// not stop it. It calls [Skip] where none can be started.
func SecureKafka(tb testing.TB) *kafkaserver.Server {
	tb.Helper()
	server, err := secureKafka()
	kafkaFailed(tb, err)
	return server
}

func kafkaFailed(tb testing.TB, err error) {
	tb.Helper()
	switch {
	case errors.Is(err, kafkaserver.ErrNotAvailable):
		Skip(tb, err.Error())
	case err != nil:
		tb.Fatal(err)
	}
}

// Name is a name for a topic or a group that no other test uses.
func (s KafkaServer) Name(prefix string) string {
	return prefix + "." + strings.ToLower(rand.Text()[:8])
}
