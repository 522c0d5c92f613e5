package render

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/shove-dev/shove/api/v1alpha1"
)

func embeddedIn(namespace, name string) *v1alpha1.Broker {
	b := &v1alpha1.Broker{}
	b.Namespace, b.Name = namespace, name
	b.Spec.Embedded = &v1alpha1.EmbeddedBroker{}
	return b
}

func TestEmbeddedName(t *testing.T) {
	seen := map[string]string{}
	for _, name := range []string{"shop", "1st", "a.b", "a-b", "a", strings.Repeat("x", 39), strings.Repeat("x", 40), strings.Repeat("x", 41), strings.Repeat("a.", 126) + "a"} {
		got := EmbeddedName(embeddedIn("shop", name))
		if errs := validation.IsDNS1035Label(got); len(errs) > 0 || len(got) > maxEmbeddedName {
			t.Errorf("%q becomes %q: %v", name, got, errs)
		}
		if other, ok := seen[got]; ok {
			t.Errorf("%q and %q are both %q", name, other, got)
		}
		seen[got] = name
	}
	if got := EmbeddedName(embeddedIn("shop", "main")); got != "shove-broker-main" {
		t.Errorf("a plain name becomes %q", got)
	}
}

func TestEmbeddedEndpoint(t *testing.T) {
	got, err := WorkloadEndpoint(embeddedIn("shop", "main"))
	if err != nil || string(got) != `{"servers":["nats://shove-broker-main.shop.svc:4222"]}` {
		t.Errorf("%s, %v", got, err)
	}
}

// The generated credentials are the operator's: they serve workloads of the Broker's namespace and nobody else.
func TestEmbeddedCredentials(t *testing.T) {
	b := embeddedIn("shop", "main")
	c, f := credentialsFor(nil, b, "shop")
	if f != nil || c.Secret == nil || *c.Secret != (types.NamespacedName{Namespace: "shop", Name: "shove-broker-main"}) {
		t.Errorf("at home: %v, %v", c.Secret, f)
	}
	if _, f = credentialsFor(nil, b, "elsewhere"); f == nil || f.Reason != v1alpha1.ReasonWorkloadCredentialsMissing {
		t.Errorf("elsewhere: %v", f)
	}
	b.Spec.WorkloadCredentials = &v1alpha1.CredentialsSource{SecretRef: v1alpha1.SecretReference{Name: "app"}}
	for _, ns := range []string{"shop", "elsewhere"} {
		if c, f = credentialsFor(nil, b, ns); f != nil || c.Secret.Name != "app" || c.Secret.Namespace != "shop" {
			t.Errorf("in %s with workloadCredentials: %v, %v", ns, c.Secret, f)
		}
	}
}
