package charts

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/internal/kubelet"
	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/kubeenv"
)

// TestOperatorRunsFromTheChart applies what `helm template` prints to a real API server, runs the operator as the
// Deployment says with the token of its ServiceAccount, and takes the three kinds through their life. What the chart's
// rights do not allow, fails.
func TestOperatorRunsFromTheChart(t *testing.T) {
	t.Parallel()
	out, ok := render(t, "watchNamespaces={shop}", "image.repository=shove-operator", "image.tag=test",
		// pods are processes here and share this machine's ports, so each listens on its own address
		"extraEnv[0].name=POD_IP", "extraEnv[0].valueFrom.fieldRef.fieldPath=status.podIP",
		"extraArgs={--metrics-address=$(POD_IP):8080,--health-address=$(POD_IP):8081}")
	if !ok {
		t.Fatal(out)
	}
	vhost := testenv.RabbitMQ(t).Vhost(t)
	cfg := kubeenv.ControlPlane(t)
	c := newClient(t, cfg)
	removeCRDs(t, c)
	for _, ns := range []string{releaseNamespace, "shop"} {
		if err := c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}); err != nil {
			t.Fatal(err)
		}
	}
	apply := kubectlApply(t, cfg)
	apply(out)
	dir := runPods(t, cfg)
	for _, file := range []string{"topology.yaml", "consumergroup.yaml", "publisher.yaml", "worker.yaml"} {
		apply(inShop(t, c, file))
	}
	createBroker(t, c, vhost)

	waitReady(t, c, filepath.Join(dir, "pods"))
	checkUnlistedNamespaceIsClosed(t, cfg, c)
	removeAll(t, c)
	operatorLog := readLogs(t, filepath.Join(dir, "pods"), releaseNamespace+"_")
	for _, line := range strings.Split(operatorLog, "\n") {
		if strings.Contains(line, "forbidden") || strings.Contains(line, `"level":"error"`) {
			t.Errorf("the operator says: %s", line)
		}
	}
}

func newClient(t *testing.T, cfg *rest.Config) client.Client {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// removeCRDs takes away those that the control plane came with: here the chart brings them.
func removeCRDs(t *testing.T, c client.Client) {
	t.Helper()
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinitionList"})
	if err := c.List(t.Context(), list); err != nil {
		t.Fatal(err)
	}
	for i := range list.Items {
		if err := c.Delete(t.Context(), &list.Items[i]); err != nil {
			t.Fatal(err)
		}
	}
	testenv.Eventually(t, 30*time.Second, func() error {
		if err := c.List(t.Context(), list); err != nil {
			return err
		}
		if n := len(list.Items); n > 0 {
			return fmt.Errorf("%d definitions are left", n)
		}
		return nil
	})
}

// kubectlApply is `kubectl apply -f -` as an administrator; again where a kind that was applied just now is not served
// yet.
func kubectlApply(t *testing.T, cfg *rest.Config) func(manifests string) {
	t.Helper()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	conf := clientcmdapi.NewConfig()
	conf.Clusters["c"] = &clientcmdapi.Cluster{Server: cfg.Host, CertificateAuthorityData: cfg.CAData}
	conf.AuthInfos["u"] = &clientcmdapi.AuthInfo{ClientCertificateData: cfg.CertData, ClientKeyData: cfg.KeyData, Token: cfg.BearerToken}
	conf.Contexts["x"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	conf.CurrentContext = "x"
	if err := clientcmd.WriteToFile(*conf, kubeconfig); err != nil {
		t.Fatal(err)
	}
	kubectl := filepath.Join(testenv.KubeAssets(t), "kubectl")
	return func(manifests string) {
		t.Helper()
		testenv.Eventually(t, 20*time.Second, func() error {
			cmd := exec.CommandContext(t.Context(), kubectl, "--kubeconfig", kubeconfig, "apply", "-f", "-")
			cmd.Stdin = strings.NewReader(manifests)
			if out, err := cmd.CombinedOutput(); err != nil {
				return fmt.Errorf("kubectl apply: %w: %s", err, out)
			}
			return nil
		})
	}
}

// runPods builds the programs and runs the pods that name them until the test ends.
func runPods(t *testing.T, cfg *rest.Config) (dir string) {
	t.Helper()
	dir = t.TempDir()
	bin := filepath.Join(dir, "bin")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", bin+"/", "./cmd/operator", "./examples/orders/worker", "./examples/orders/publisher")
	build.Dir = testenv.RepositoryRoot(t)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v: %s", err, out)
	}
	node := kubelet.New(kubelet.Config{
		REST: cfg, Dir: filepath.Join(dir, "pods"),
		Images: func(image string) ([]string, bool) {
			name := map[string]string{"shove-operator:test": "operator", "orders-worker": "worker", "orders-publisher": "publisher"}[image]
			return []string{filepath.Join(bin, name)}, name != ""
		},
	})
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- node.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Errorf("the stand-in for kubelet: %v", err)
		}
	})
	return dir
}

// inShop is a manifest of the orders example, in the namespace shop and with the programs of this test as images.
func inShop(t *testing.T, c client.Client, file string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "examples", "orders", "manifests", file))
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for _, u := range decode(t, bytes.NewReader(b)) {
		u.SetNamespace("shop")
		if u.GetKind() == "Deployment" {
			d := &appsv1.Deployment{}
			convert(t, u, d)
			app := &d.Spec.Template.Spec.Containers[0]
			app.Image = d.Name
			app.Env = append(app.Env, corev1.EnvVar{Name: "POD_IP", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "status.podIP"}}},
				corev1.EnvVar{Name: "SHOVE_HTTP_ADDR", Value: "$(POD_IP):9464"})
			if u.Object, err = runtime.DefaultUnstructuredConverter.ToUnstructured(d); err != nil {
				t.Fatal(err)
			}
		}
		doc, err := yaml.Marshal(u.Object)
		if err != nil {
			t.Fatal(err)
		}
		out.WriteString("---\n" + string(doc))
	}
	return out.String()
}

// createBroker makes the Broker of the example with the server of this test.
func createBroker(t *testing.T, c client.Client, vhost testenv.RabbitMQVhost) {
	t.Helper()
	withoutUser := func(text string) (string, *url.Userinfo) {
		u, err := url.Parse(text)
		if err != nil {
			t.Fatal("the server's URL does not parse")
		}
		user := u.User
		u.User = nil
		return u.String(), user
	}
	amqp, user := withoutUser(vhost.URL)
	management, _ := withoutUser(vhost.ManagementURL)
	password, _ := user.Password()
	for _, obj := range []client.Object{
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "rabbit-admin"}, StringData: map[string]string{"username": user.Username(), "password": password}},
		&v1alpha1.Broker{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "shop"}, Spec: v1alpha1.BrokerSpec{
			RabbitMQ:    &v1alpha1.RabbitMQBroker{URL: amqp, Management: &v1alpha1.RabbitMQManagement{URL: management}},
			Credentials: &v1alpha1.CredentialsSource{SecretRef: v1alpha1.SecretReference{Name: "rabbit-admin"}},
		}},
	} {
		if err := c.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
}

// theThree are the example's custom resources, the ones that others refer to last.
func theThree() []client.Object {
	return []client.Object{
		&v1alpha1.ConsumerGroup{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "orders-worker"}},
		&v1alpha1.Topology{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "orders"}},
		&v1alpha1.Broker{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "shop"}},
	}
}

// waitReady waits until all three are Ready and every pod reports its configuration.
func waitReady(t *testing.T, c client.Client, pods string) {
	t.Helper()
	err := testenv.Poll(90*time.Second, func() error {
		for _, obj := range theThree() {
			if err := c.Get(t.Context(), client.ObjectKeyFromObject(obj), obj); err != nil {
				return err
			}
			conditions := obj.(interface{ GetConditions() []metav1.Condition }).GetConditions()
			for _, want := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionConfigDelivered} {
				if _, isGroup := obj.(*v1alpha1.ConsumerGroup); want == v1alpha1.ConditionConfigDelivered && !isGroup {
					continue
				}
				if !meta.IsStatusConditionTrue(conditions, want) {
					return fmt.Errorf("%T %s is not %s: %+v", obj, obj.GetName(), want, conditions)
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, readLogs(t, pods, ""))
	}
}

// checkUnlistedNamespaceIsClosed asks, with a token of the operator's ServiceAccount, for Secrets outside the listed
// namespaces: without this a server that allows everything would pass the test.
func checkUnlistedNamespaceIsClosed(t *testing.T, cfg *rest.Config, c client.Client) {
	t.Helper()
	sa := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: releaseNamespace, Name: "shove-operator"}}
	token := &authenticationv1.TokenRequest{}
	if err := c.SubResource("token").Create(t.Context(), sa, token); err != nil {
		t.Fatal(err)
	}
	own := rest.AnonymousClientConfig(cfg)
	own.BearerToken = token.Status.Token
	operator := newClient(t, own)
	var statusErr *apierrors.StatusError
	err := operator.List(t.Context(), &corev1.SecretList{}, client.InNamespace("default"))
	if !errors.As(err, &statusErr) || statusErr.Status().Code != http.StatusForbidden {
		t.Errorf("Secrets of a namespace that is not listed: got %v, want 403", err)
	}
	if err := operator.List(t.Context(), &corev1.SecretList{}, client.InNamespace("shop")); err != nil {
		t.Errorf("Secrets of a listed namespace: %v", err)
	}
}

// removeAll deletes the three and waits until they are gone and the workloads are as they were.
func removeAll(t *testing.T, c client.Client) {
	t.Helper()
	for _, obj := range theThree() {
		if err := c.Delete(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
	testenv.Eventually(t, 60*time.Second, func() error {
		for _, obj := range theThree() {
			if err := c.Get(t.Context(), client.ObjectKeyFromObject(obj), obj); !apierrors.IsNotFound(err) {
				return fmt.Errorf("%T %s is still there (%v), finalizers %v", obj, obj.GetName(), err, obj.GetFinalizers())
			}
		}
		for _, name := range []string{"orders-worker", "orders-publisher"} {
			d := &appsv1.Deployment{}
			if err := c.Get(t.Context(), client.ObjectKey{Namespace: "shop", Name: name}, d); err != nil {
				return err
			}
			if n := len(d.Spec.Template.Spec.Volumes); n > 0 {
				return fmt.Errorf("Deployment %s still has %d volumes", name, n)
			}
		}
		for _, list := range []client.ObjectList{&corev1.ConfigMapList{}, &corev1.SecretList{}} {
			if err := c.List(t.Context(), list, client.InNamespace("shop")); err != nil {
				return err
			}
			if err := meta.EachListItem(list, func(o runtime.Object) error {
				if name := o.(client.Object).GetName(); strings.HasSuffix(name, "shove") {
					return fmt.Errorf("%T %s is still there", o, name)
				}
				return nil
			}); err != nil {
				return err
			}
		}
		return nil
	})
}

// readLogs is what the pods whose folder begins with prefix wrote.
func readLogs(t *testing.T, dir, prefix string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, prefix+"*", "*.log"))
	if err != nil || len(files) == 0 {
		t.Fatalf("logs of pods: found %d, %v", len(files), err)
	}
	var out strings.Builder
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&out, "%s\n%s\n", f, b)
	}
	return out.String()
}
