package controllers

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/internal/testenv"
)

func TestCredentialsStayWhereTheyBelong(t *testing.T) {
	s := &shop{cluster: connect(t), pods: &fakePods{reports: map[string]PodReport{}}, driver: rabbitInMemory()}
	elsewhere := connect(t).ns
	s.create(secret("rabbit-admin", map[string]string{"username": "admin", "password": secretPassword}),
		secret("rabbit-app", map[string]string{"username": "app", "password": "app-word", "note": "not for pods"}))
	s.open(elsewhere)
	b := rabbitBroker("rabbit", "amqp://rabbit.shop.svc:5672/", "http://rabbit.shop.svc:15672")
	b.Spec.AllowedNamespaces = &v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesAll}
	s.create(b)

	far := &shop{cluster: &cluster{t: t, cfg: s.cfg, client: s.client, ns: elsewhere}, pods: s.pods}
	topo := orders("orders", "rabbit")
	topo.Spec.BrokerRef.Namespace = s.ns
	g := group("worker", "orders", "worker")
	far.create(topo, deployment("worker"), g)
	far.stalled(g, v1alpha1.ReasonWorkloadCredentialsMissing)
	far.noSecrets()

	s.patch(b, func() {
		b.Spec.WorkloadCredentials = &v1alpha1.CredentialsSource{SecretRef: v1alpha1.SecretReference{Name: "rabbit-app"}}
	})
	far.ready(g)
	prefix := s.ns + ".rabbit."
	far.secretIs("worker.deployment.shove", map[string]string{prefix + "username": "app", prefix + "password": "app-word"})
	cfg := far.file("worker.deployment.shove", consumes("orders"))
	if text := string(cfg.Brokers[0].Endpoint); strings.Contains(text, "15672") || strings.Contains(text, "management") {
		t.Errorf("the management URL left its namespace: %s", text)
	}
	if got := cfg.Brokers[0].CredentialFile("username"); got != "/etc/shove/"+prefix+"username" {
		t.Errorf("credentials are read from %q", got)
	}

	// The group's own win.
	far.create(secret("mine", map[string]string{"username": "me", "password": "my-word"}))
	far.patch(g, func() {
		g.Spec.Credentials = &v1alpha1.CredentialsSource{SecretRef: v1alpha1.SecretReference{Name: "mine"}}
	})
	far.secretIs("worker.deployment.shove", map[string]string{prefix + "username": "me", prefix + "password": "my-word"})

	// A Secret that is gone leaves pods what they have, and says so.
	if err := s.client.Delete(context.Background(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: elsewhere, Name: "mine"}}); err != nil {
		t.Fatal(err)
	}
	far.stalled(g, v1alpha1.ReasonSecretNotFound)
	far.secretIs("worker.deployment.shove", map[string]string{prefix + "username": "me", prefix + "password": "my-word"})
	far.file("worker.deployment.shove", consumes("orders"))

	// A namespace that is not allowed any more loses them.
	far.patch(g, func() { g.Spec.Credentials = nil })
	far.ready(g)
	s.patch(b, func() { b.Spec.AllowedNamespaces = nil })
	far.stalled(g, v1alpha1.ReasonNamespaceNotAllowed)
	far.secretIs("worker.deployment.shove", map[string]string{})
}

func (s *shop) secretIs(name string, want map[string]string) {
	s.t.Helper()
	testenv.Eventually(s.t, patience, func() error {
		var sec corev1.Secret
		if err := s.client.Get(context.Background(), types.NamespacedName{Namespace: s.ns, Name: name}, &sec); err != nil {
			return err
		}
		have := map[string]string{}
		for k, v := range sec.Data {
			have[k] = string(v)
		}
		if !maps.Equal(have, want) {
			return fmt.Errorf("Secret %s has the keys %v, want %v", name, sortedKeys(have), sortedKeys(want))
		}
		return nil
	})
}

func (s *shop) noSecrets() {
	s.t.Helper()
	var list corev1.SecretList
	if err := s.client.List(context.Background(), &list, client.InNamespace(s.ns)); err != nil {
		s.t.Fatal(err)
	}
	for _, o := range list.Items {
		if len(o.Data) > 0 {
			s.t.Errorf("Secret %s has keys %v", o.Name, sortedKeys(o.Data))
		}
	}
}

// TestNothingOfTheInjectionShowsASecret reads everything that people may read.
func TestNothingOfTheInjectionShowsASecret(t *testing.T) {
	s := openShop(t)
	d, g := deployment("worker"), group("worker", "orders", "worker")
	s.create(d, g)
	s.ready(g)
	s.event(g, v1alpha1.ReasonReady)
	for _, list := range []client.ObjectList{&corev1.ConfigMapList{}, &appsv1.DeploymentList{}, &v1alpha1.ConsumerGroupList{}, &eventsv1.EventList{}} {
		if err := s.client.List(context.Background(), list, client.InNamespace(s.ns)); err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(list)
		if err != nil {
			t.Fatal(err)
		}
		for _, secret := range []string{secretPassword, base64.StdEncoding.EncodeToString([]byte(secretPassword))} {
			if strings.Contains(string(text), secret) {
				t.Errorf("%T shows a secret", list)
			}
		}
	}
}

// TestTheRightsSuffice runs the operator with the rights of the generated role and no others.
func TestTheRightsSuffice(t *testing.T) {
	s := &shop{cluster: connect(t), pods: &fakePods{reports: map[string]PodReport{}}, driver: rabbitInMemory()}
	user := "operator-of-" + s.ns
	role, err := os.ReadFile("../config/rbac/role.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for i, doc := range strings.Split(strings.TrimPrefix(string(role), "---\n"), "---\n") {
		var r rbacv1.Role // a ClusterRole has the same rules
		if err := yaml.UnmarshalStrict([]byte(doc), &r); err != nil {
			t.Fatal(err)
		}
		name := fmt.Sprintf("operator-%d", i)
		s.create(&rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: r.Rules},
			&rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
				Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}}})
	}
	s.cfg = rest.CopyConfig(s.cfg)
	s.cfg.Impersonate.UserName = user
	s.create(secret("rabbit-admin", map[string]string{"username": "admin", "password": secretPassword}))
	s.open()
	d, g := deployment("worker"), group("worker", "orders", "worker")
	topo := orders("orders", "rabbit")
	topo.Spec.DeletionPolicy = v1alpha1.DeletionDelete
	topo.Spec.Publishers = []v1alpha1.WorkloadReference{{Kind: v1alpha1.WorkloadDeployment, Name: "worker"}}
	s.create(rabbitBroker("rabbit", "amqp://rabbit/", ""), topo, d, g)
	before := d.DeepCopy()
	s.ready(g)
	s.conditionIs(topo, v1alpha1.ConditionInjected, metaTrue, "")
	p := s.pod("worker-1", d, time.Now())
	s.pods.set(p.Name, PodReport{Generation: g.Status.ConfigGeneration})
	s.conditionIs(g, v1alpha1.ConditionConfigDelivered, metaTrue, "")
	s.patch(g, func() { g.Spec.Prefetch = ptr(int32(7)) })
	testenv.Eventually(t, patience, func() error {
		s.get(p)
		if p.Annotations[v1alpha1.AnnotationConfigGeneration] == "" {
			return errors.New("the pod is not annotated")
		}
		return nil
	})
	s.event(g, v1alpha1.ReasonReady)
	for _, o := range []client.Object{g, topo} {
		if err := s.client.Delete(context.Background(), o); err != nil {
			t.Fatal(err)
		}
	}
	s.taken(before, d)
}
