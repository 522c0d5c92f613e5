package controllers

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker/kafka"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/kafkaserver"
)

// kafkaCluster is a real broker as the plain library sees it.
type kafkaCluster struct {
	t      testing.TB
	client *kgo.Client
	admin  *kadm.Client
	prefix string
}

func newKafkaCluster(t testing.TB, server, prefix string) *kafkaCluster {
	t.Helper()
	c, err := kgo.NewClient(kgo.SeedBrokers(server), kgo.ProducerLinger(0), kgo.MetadataMinAge(50*time.Millisecond), kgo.DisableClientMetrics())
	if err != nil {
		t.Fatal(err)
	}
	k := &kafkaCluster{t, c, kadm.NewClient(c), prefix}
	t.Cleanup(func() {
		defer c.Close()
		if names := k.topics(); len(names) > 0 {
			if _, err := k.admin.DeleteTopics(context.Background(), names...); err != nil {
				t.Error(err)
			}
		}
	})
	return k
}

// topics are those of the test.
func (k *kafkaCluster) topics() []string {
	k.t.Helper()
	all, err := k.admin.ListTopics(context.Background())
	if err != nil {
		k.t.Fatal(err)
	}
	var out []string
	for _, n := range all.Names() {
		if strings.HasPrefix(n, k.prefix) {
			out = append(out, n)
		}
	}
	return out
}

func (k *kafkaCluster) partitions(topic string) int {
	k.t.Helper()
	m, err := k.admin.Metadata(context.Background(), topic)
	if err != nil {
		k.t.Fatal(err)
	}
	return len(m.Topics[topic].Partitions)
}

func (k *kafkaCluster) setting(topic, key string) string {
	k.t.Helper()
	all, err := k.admin.DescribeTopicConfigs(context.Background(), topic)
	if err != nil {
		k.t.Fatal(err)
	}
	for _, c := range all[0].Configs {
		if c.Key == key {
			return c.MaybeValue()
		}
	}
	return ""
}

func (k *kafkaCluster) make(topic string, partitions int32) {
	k.t.Helper()
	if _, err := k.admin.CreateTopic(context.Background(), partitions, 1, nil, topic); err != nil {
		k.t.Fatal(err)
	}
}

func kafkaBroker(name, mechanism string, servers ...string) *v1alpha1.Broker {
	b := &v1alpha1.Broker{ObjectMeta: metav1.ObjectMeta{Name: name}}
	b.Spec.Kafka = &v1alpha1.KafkaBroker{}
	for _, s := range servers {
		b.Spec.Kafka.BootstrapServers = append(b.Spec.Kafka.BootstrapServers, v1alpha1.HostPort(s))
	}
	b.Spec.ResyncInterval = &metav1.Duration{Duration: 3 * time.Second}
	if mechanism != "" {
		b.Spec.Kafka.SASL = &v1alpha1.KafkaSASL{Mechanism: v1alpha1.SASLMechanism(mechanism)}
		b.Spec.Credentials = &v1alpha1.CredentialsSource{SecretRef: v1alpha1.SecretReference{Name: name + "-admin"}}
	}
	return b
}

// The whole life on a real cluster: topics made, grown, adopted, repaired, refused and deleted.
func TestKafka_Life(t *testing.T) {
	c := start(t, kafka.Driver)
	srv := testenv.Kafka(t)
	k := newKafkaCluster(t, srv.Servers[0], c.ns)
	b := kafkaBroker("kafka", "", srv.Servers...)
	c.create(b)
	c.ready(b)
	if b.Status.ServerID == "" || b.Status.ServerVersion == "" {
		t.Errorf("the cluster is %q, version %q", b.Status.ServerID, b.Status.ServerVersion)
	}
	queue := c.ns + ".orders"
	topo := orders("orders", "kafka")
	topo.Spec.Queue, topo.Spec.DeletionPolicy = queue, v1alpha1.DeletionDelete
	topo.Spec.Kafka = &v1alpha1.KafkaTopology{Partitions: 2, Config: map[string]string{"retention.ms": "86400000"}}
	c.create(topo)
	c.ready(topo)
	c.conditionIs(topo, v1alpha1.ConditionDrift, metav1.ConditionFalse, v1alpha1.ReasonInSync)
	if diff := cmp.Diff([]string{queue, queue + "-dlq", queue + "-hold-30s", queue + "-hold-5s"}, k.topics()); diff != "" {
		t.Errorf("topics (-want +got):\n%s", diff)
	}

	t.Run("partitions grow", func(t *testing.T) {
		topo.Spec.Kafka.Partitions = 4
		c.update(topo)
		c.ready(topo)
		if n := k.partitions(queue); n != 4 {
			t.Errorf("%d partitions", n)
		}
	})
	t.Run("drift is repaired, and said", func(t *testing.T) {
		value := "60000"
		if _, err := k.admin.AlterTopicConfigs(t.Context(), []kadm.AlterConfig{{Name: "retention.ms", Value: &value}}, queue); err != nil {
			t.Fatal(err)
		}
		if _, err := k.admin.DeleteTopics(t.Context(), queue+"-hold-5s"); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, time.Minute, func() error {
			if v, n := k.setting(queue, "retention.ms"), k.partitions(queue+"-hold-5s"); v != "86400000" || n != 4 {
				return fmt.Errorf("retention.ms is %s, the hold topic has %d partitions", v, n)
			}
			return nil
		})
		if note := c.event(topo, EventDrifted); !strings.Contains(note, queue) {
			t.Errorf("event: %s", note)
		}
		c.ready(topo)
	})
	t.Run("they never shrink", func(t *testing.T) {
		k.make(c.ns+".taken", 5)
		taken := orders("taken", "kafka")
		taken.Spec.Queue, taken.Spec.Kafka = c.ns+".taken", &v1alpha1.KafkaTopology{Partitions: 3}
		c.create(taken)
		message := c.stalled(taken, v1alpha1.ReasonImmutableField)
		if !strings.Contains(message, "it has 5, the manifest asks for 3") || !strings.Contains(message, "write kafka.partitions: 5") {
			t.Errorf("message: %s", message)
		}
		taken.Spec.Kafka.Partitions = 5
		c.update(taken)
		c.ready(taken)
		if k.partitions(c.ns+".taken-hold-5s") != 5 {
			t.Error("the adopted topic has no hold topic of as many partitions")
		}
	})
	t.Run("a setting that Kafka refuses", func(t *testing.T) {
		odd := orders("odd", "kafka")
		odd.Spec.Queue, odd.Spec.Kafka = c.ns+".odd", &v1alpha1.KafkaTopology{Config: map[string]string{"retention.weeks": "2"}}
		c.create(odd)
		if message := c.stalled(odd, v1alpha1.ReasonUnsupported); !strings.Contains(message, "retention.weeks") {
			t.Errorf("message: %s", message)
		}
	})
	t.Run("external is verified only", func(t *testing.T) {
		external := orders("clicks", "kafka")
		external.Spec.Queue, external.Spec.External, external.Spec.HoldQueues = c.ns+".clicks", true, nil
		c.create(external)
		c.waits(external, v1alpha1.ReasonExternalNotFound)
		if k.partitions(c.ns+".clicks") != 0 {
			t.Fatal("verifying made the topic")
		}
		k.make(c.ns+".clicks", 1)
		external.Spec.DeadLetter = nil // a change, so that it is looked at now
		c.update(external)
		c.ready(external)
		c.conditionIs(external, v1alpha1.ConditionDeclared, metav1.ConditionTrue, v1alpha1.ReasonVerified)
	})
	t.Run("a second reader has topics of its own", func(t *testing.T) {
		audit := orders("audit", "kafka")
		audit.Spec.Queue, audit.Spec.Source = c.ns+".audit", &v1alpha1.Source{Name: queue}
		c.create(audit)
		c.ready(audit)
		if k.partitions(c.ns+".audit-hold-5s") == 0 || k.partitions(queue) != 4 {
			t.Errorf("topics %v", k.topics())
		}
	})
	t.Run("two Brokers on one cluster share their claims", func(t *testing.T) {
		other := kafkaBroker("again", "", srv.Servers...)
		c.create(other)
		c.ready(other)
		if other.Status.ServerID != b.Status.ServerID {
			t.Errorf("ids %q and %q", other.Status.ServerID, b.Status.ServerID)
		}
		thief := orders("thief", "again")
		thief.Spec.Queue = queue
		c.create(thief)
		c.stalled(thief, v1alpha1.ReasonConflict)
		if err := c.client.Delete(t.Context(), thief); err != nil { // what two claim is not deleted
			t.Fatal(err)
		}
	})
	t.Run("deletion says how much went", func(t *testing.T) {
		for range 3 {
			if err := k.client.ProduceSync(t.Context(), &kgo.Record{Topic: queue, Value: []byte("x")}).FirstErr(); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.client.Delete(t.Context(), topo); err != nil {
			t.Fatal(err)
		}
		if note := c.event(topo, EventQueuesDeleted); !strings.Contains(note, "with 3 messages in them") {
			t.Errorf("event: %s", note)
		}
		for _, n := range k.topics() {
			if strings.HasPrefix(n, queue) {
				t.Errorf("topic %s is left", n)
			}
		}
	})
}

// The password changes on the cluster and in the Secret; a right that is missing is named.
func TestKafka_Case24_RotatedPassword(t *testing.T) {
	srv := testenv.SecureKafka(t)
	c := start(t, kafka.Driver)
	k := newKafkaCluster(t, srv.Addr(kafkaserver.Plain), c.ns)
	user := "u-" + c.ns
	password := func(p string) {
		t.Helper()
		resp, err := k.admin.AlterUserSCRAMs(t.Context(), nil, []kadm.UpsertSCRAM{{User: user, Mechanism: kadm.ScramSha512, Iterations: 4096, Password: p}})
		if err := errors.Join(err, resp.Error()); err != nil {
			t.Fatal(err)
		}
	}
	password("first-" + secretPassword)
	b := kafkaBroker("kafka", "SCRAM-SHA-512", srv.Addr(kafkaserver.SASLTLS))
	b.Spec.TLS = &v1alpha1.BrokerTLS{CASecretRef: &v1alpha1.SecretReference{Name: "ca"}}
	sec := secret("kafka-admin", map[string]string{"username": user, "password": "first-" + secretPassword})
	c.create(secret("ca", map[string]string{"ca.crt": pem(t, srv.Certificates.CA)}), sec, b)
	c.ready(b)
	hash := b.Status.SecretHash

	topo := orders("orders", "kafka")
	topo.Spec.Queue = c.ns + ".orders"
	c.create(topo)
	if message := c.stalled(topo, v1alpha1.ReasonAccessRefused); !strings.Contains(message, `the operation Describe on topic "`+c.ns) {
		t.Errorf("message: %s", message)
	}
	acl := kadm.NewACLs().AllowHosts().Allow("User:" + user).Operations(kadm.OpAll).ResourcePatternType(kadm.ACLPatternPrefixed).Topics(c.ns).Groups(c.ns)
	if _, err := k.admin.CreateACLs(t.Context(), acl); err != nil {
		t.Fatal(err)
	}
	c.ready(topo) // at the resync

	password("second-" + secretPassword)
	sec.StringData = map[string]string{"password": "second-" + secretPassword}
	c.update(sec)
	testenv.Eventually(t, patience, func() error {
		c.get(b)
		if b.Status.SecretHash == hash {
			return errors.New("the rotation is not noticed")
		}
		return nil
	})
	c.ready(b)
	late := orders("late", "kafka")
	late.Spec.Queue = c.ns + ".late"
	c.create(late)
	c.ready(late)

	sec.StringData = map[string]string{"password": "wrong-" + secretPassword}
	c.update(sec)
	c.stalled(b, v1alpha1.ReasonAuthenticationFailed)
}
