package controllers

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/broker/nats"
	"github.com/shove-dev/shove/controllers/render"
	"github.com/shove-dev/shove/embedded"
)

func embeddedBroker(name, size string) *v1alpha1.Broker {
	b := &v1alpha1.Broker{ObjectMeta: metav1.ObjectMeta{Name: name}}
	q := resource.MustParse(size)
	b.Spec.Embedded = &v1alpha1.EmbeddedBroker{Storage: v1alpha1.EmbeddedStorage{Size: &q}}
	return b
}

// embeddedStep is step for embedded brokers; servers are where they are found.
func embeddedStep(t *testing.T, servers ...string) *stepper {
	t.Helper()
	c := connect(t)
	return c.stepper(embeddedOptionsOf(c.ns, "shove-operator:v1", servers...))
}

func embeddedOptionsOf(ns, image string, servers ...string) Options {
	return Options{Drivers: []broker.Driver{nats.Driver}, Namespaces: []string{ns}, EmbeddedImage: image, EmbeddedServers: func(*v1alpha1.Broker) (out []v1alpha1.NATSServer) {
		for _, s := range servers {
			out = append(out, v1alpha1.NATSServer(s))
		}
		return out
	}}
}

func (s *stepper) set(b *v1alpha1.Broker) *appsv1.StatefulSet {
	s.t.Helper()
	o := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: render.EmbeddedName(b)}}
	s.get(o)
	return o
}

// up says that the pod is ready, as the controllers of a real cluster would.
func (s *stepper) up(b *v1alpha1.Broker, updated int32) {
	s.t.Helper()
	o := s.set(b)
	o.Status = appsv1.StatefulSetStatus{ObservedGeneration: o.Generation, Replicas: 1, ReadyReplicas: 1, AvailableReplicas: 1, UpdatedReplicas: updated}
	if err := s.client.Status().Update(context.Background(), o); err != nil {
		s.t.Fatal(err)
	}
}

func (s *stepper) passwordOf(b *v1alpha1.Broker) string {
	s.t.Helper()
	return string(secretOf(s, render.EmbeddedName(b)).Data["password"])
}

func TestEmbedded_Renders(t *testing.T) {
	s := embeddedStep(t)
	b := embeddedBroker("shop", "1024Mi")
	s.create(b)
	after := s.broker(b)
	for kind, want := range map[string]string{
		v1alpha1.ConditionReady: "False/ServerStarting", v1alpha1.ConditionReconciling: "True/ServerStarting",
		v1alpha1.ConditionServerReady: "False/ServerStarting", v1alpha1.ConditionSingleReplica: "True/SingleReplica",
		v1alpha1.ConditionUpdateAvailable: "", v1alpha1.ConditionVolumeDiffers: "",
	} {
		if got := state(b, kind); got != want {
			t.Errorf("%s is %q, want %q%s", kind, got, want, describe(b))
		}
	}
	if after <= 0 || after > 2*lastBackoff {
		t.Errorf("looked at again in %s", after)
	}
	set := s.set(b)
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "shove-broker-shop"}}
	s.get(service)
	for _, o := range []client.Object{set, service, secretOf(s, "shove-broker-shop")} {
		if !metav1.IsControlledBy(o, b) {
			t.Errorf("%T is not the Broker's: %v", o, o.GetOwnerReferences())
		}
	}
	if got := set.Spec.VolumeClaimTemplates[0].Spec.Resources.Requests.Storage().String(); got != "1Gi" {
		t.Errorf("the volume has %s", got)
	}
	if set.Spec.UpdateStrategy.Type != appsv1.OnDeleteStatefulSetStrategyType || *set.Spec.Replicas != 1 ||
		set.Spec.PersistentVolumeClaimRetentionPolicy.WhenDeleted != appsv1.RetainPersistentVolumeClaimRetentionPolicyType {
		t.Errorf("StatefulSet: %+v", set.Spec)
	}
	pod := set.Spec.Template.Spec
	c := pod.Containers[0]
	if !*pod.SecurityContext.RunAsNonRoot || *pod.AutomountServiceAccountToken || !*c.SecurityContext.ReadOnlyRootFilesystem || *c.SecurityContext.AllowPrivilegeEscalation ||
		c.Resources.Limits.Memory().IsZero() || c.StartupProbe == nil || c.LivenessProbe == nil || c.ReadinessProbe == nil {
		t.Errorf("pod: %+v", pod)
	}
	if c.Image != "shove-operator:v1" || c.Args[0] != "embedded" || c.Args[len(c.Args)-1] != fmt.Sprintf("--max-bytes=%d", int64(1<<30)/10*9) {
		t.Errorf("runs %q %q", c.Image, c.Args)
	}
	if strings.Contains(fmt.Sprint(set, service), s.passwordOf(b)) || len(s.passwordOf(b)) < 20 {
		t.Error("the password is short, or in the objects")
	}
	if !strings.Contains(condition(b, v1alpha1.ConditionServerReady).Message, "there is no pod") {
		t.Errorf("says %q", condition(b, v1alpha1.ConditionServerReady).Message)
	}
	writes, password := s.writes.count(), s.passwordOf(b)
	for range 3 {
		s.broker(b)
	}
	if n := s.writes.count() - writes; n != 0 {
		t.Errorf("passes that changed nothing wrote %d times", n)
	}
	if s.passwordOf(b) != password {
		t.Error("the password was rotated")
	}
	// What somebody changes is put right.
	set.Spec.Template.Spec.Containers[0].Args = []string{"embedded"}
	service.Spec.Selector = map[string]string{"app": "another"}
	s.update(set)
	s.update(service)
	s.broker(b)
	if got := s.set(b).Spec.Template.Spec.Containers[0].Args; !cmp.Equal(got, c.Args) {
		t.Errorf("arguments %q", got)
	}
	if s.get(service); !cmp.Equal(service.Spec.Selector, render.EmbeddedSelector(b)) {
		t.Errorf("selector %v", service.Spec.Selector)
	}
}

// A server as the pod would run it: the Broker gets ready with the generated credentials, Topologies are declared, an
// operator of another version leaves the server alone and says that there is an update.
func TestEmbedded_ServesAndOutlivesTheOperator(t *testing.T) {
	s := embeddedStep(t)
	b := embeddedBroker("shop", "1Gi")
	s.create(b)
	s.broker(b)
	srv, err := embedded.Start(t.Context(), embedded.Options{Dir: filepath.Join(t.TempDir(), "store"), Users: []embedded.User{{Name: "shove", Password: s.passwordOf(b)}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := srv.Stop(ctx); err != nil {
			t.Error(err)
		}
	})
	s.deps.embedded.servers = func(*v1alpha1.Broker) []v1alpha1.NATSServer {
		return []v1alpha1.NATSServer{v1alpha1.NATSServer(srv.URL())}
	}
	s.up(b, 1)
	s.broker(b)
	if got := state(b, v1alpha1.ConditionReady); got != "True/Ready" || state(b, v1alpha1.ConditionServerReady) != "True/ServerReady" || state(b, v1alpha1.ConditionConnected) != "True/Connected" {
		t.Fatalf("Ready is %s%s", got, describe(b))
	}
	if b.Status.Kind != v1alpha1.BrokerEmbedded || b.Status.ServerID == "" || b.Status.SecretHash == "" {
		t.Errorf("status: %+v", b.Status)
	}
	topo := s.declared(orders("orders", "shop"))
	if got := state(topo, v1alpha1.ConditionReady); got != "True/Ready" {
		t.Fatalf("the Topology is %s%s", got, describe(topo))
	}
	s.broker(b) // counts it
	before := s.set(b)

	s.deps.embedded.image = "shove-operator:v2"
	writes := s.writes.count()
	s.broker(b)
	after := s.set(b)
	if after.UID != before.UID || after.Spec.UpdateStrategy.Type != appsv1.OnDeleteStatefulSetStrategyType || after.Spec.Template.Spec.Containers[0].Image != "shove-operator:v2" {
		t.Errorf("after an update of the operator: %+v", after.Spec)
	}
	if n := s.writes.count() - writes; n != 1 {
		t.Errorf("the new image took %d writes", n)
	}
	if got := state(b, v1alpha1.ConditionReady); got != "True/Ready" {
		t.Errorf("Ready is %s", got)
	}
	s.up(b, 0) // the pod is of the older template
	s.broker(b)
	if got := condition(b, v1alpha1.ConditionUpdateAvailable); got.Status != metav1.ConditionTrue || !strings.Contains(got.Message, "delete pod shove-broker-shop-0") {
		t.Errorf("UpdateAvailable: %+v", got)
	}
	if got := state(b, v1alpha1.ConditionReady); got != "True/Ready" {
		t.Errorf("Ready is %s although the server runs", got)
	}
	s.up(b, 1)
	s.broker(b)
	if got := state(b, v1alpha1.ConditionUpdateAvailable); got != "" {
		t.Errorf("after the update: %s", got)
	}
	s.deps.embedded.image = "" // an operator that is not told keeps what there is
	if s.broker(b); s.set(b).Spec.Template.Spec.Containers[0].Image != "shove-operator:v2" || state(b, v1alpha1.ConditionReady) != "True/Ready" {
		t.Errorf("without an image: %s", describe(b))
	}
}

func TestEmbedded_Users(t *testing.T) {
	s := embeddedStep(t)
	b := embeddedBroker("shop", "1Gi")
	s.create(b, secret("app", map[string]string{"username": "app", "password": secretPassword}), secret("own", map[string]string{"username": "boss", "password": "own-" + secretPassword}))
	s.broker(b)
	first := s.passwordOf(b)
	users := func() map[string]string {
		out := map[string]string{}
		for k, v := range secretOf(s, "shove-broker-shop").Data {
			out[k] = string(v)
		}
		return out
	}
	s.edit(b, func() {
		b.Spec.WorkloadCredentials = &v1alpha1.CredentialsSource{SecretRef: v1alpha1.SecretReference{Name: "app"}}
	})
	s.broker(b)
	if d := cmp.Diff(map[string]string{"username": "shove", "password": first, "workload-username": "app", "workload-password": secretPassword}, users()); d != "" {
		t.Errorf("with workloadCredentials (-want +got):\n%s", d)
	}
	if got := s.deps.brokersOfSecret(context.Background(), secretOf(s, "app")); len(got) != 1 {
		t.Errorf("a change of the workloads' Secret leads to %v", got)
	}
	s.edit(b, func() {
		b.Spec.Credentials = &v1alpha1.CredentialsSource{SecretRef: v1alpha1.SecretReference{Name: "own"}}
	})
	s.broker(b)
	if got := users(); got["username"] != "boss" || got["password"] != "own-"+secretPassword || got["workload-username"] != "app" {
		t.Errorf("with credentials: %d keys, user %q", len(got), got["username"])
	}
	s.edit(b, func() { b.Spec.Credentials, b.Spec.WorkloadCredentials = nil, nil })
	s.broker(b)
	if got := users(); got["username"] != "shove" || len(got["password"]) < 20 || strings.Contains(got["password"], secretPassword) || len(got) != 2 {
		t.Errorf("without them again: %d keys, user %q", len(got), got["username"])
	}
	second := s.passwordOf(b)
	for name, spoil := range map[string]func(){
		"deleted": func() { s.delete(secretOf(s, "shove-broker-shop")) },
		"emptied": func() { o := secretOf(s, "shove-broker-shop"); o.Data = nil; s.update(o) },
	} {
		spoil()
		s.broker(b)
		if got := s.passwordOf(b); len(got) < 20 || got == second {
			t.Errorf("%s: the password is %d long, new: %t", name, len(got), got != second)
		}
		second = s.passwordOf(b)
	}
	s.edit(b, func() {
		b.Spec.WorkloadCredentials = &v1alpha1.CredentialsSource{SecretRef: v1alpha1.SecretReference{Name: "nowhere"}}
	})
	if s.broker(b); state(b, v1alpha1.ConditionReady) != "False/SecretNotFound" || state(b, v1alpha1.ConditionServerReady) != "False/SecretNotFound" {
		t.Errorf("with a Secret that is missing:%s", describe(b))
	}
}

func TestEmbedded_SaysWhatIsWrong(t *testing.T) {
	s := embeddedStep(t)
	foreign := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "shove-broker-taken"}}
	foreign.Spec.Ports = []corev1.ServicePort{{Port: 1}}
	s.create(foreign, secret("shove-broker-mine", map[string]string{"username": "x", "password": secretPassword}))
	for name, want := range map[string]string{"taken": "False/ObjectNotOurs", "mine": "False/ObjectNotOurs"} {
		b := embeddedBroker(name, "1Gi")
		s.create(b)
		s.broker(b)
		if got := state(b, v1alpha1.ConditionReady); got != want || state(b, v1alpha1.ConditionStalled) == "" {
			t.Errorf("%s: %s%s", name, got, describe(b))
		}
	}
	s.deps.embedded.image = ""
	b := embeddedBroker("blank", "1Gi")
	s.create(b)
	if s.broker(b); state(b, v1alpha1.ConditionReady) != "False/ServerImageMissing" || !strings.Contains(condition(b, v1alpha1.ConditionReady).Message, "--embedded-image") {
		t.Errorf("without an image:%s", describe(b))
	}
	s.deps.embedded.image = "shove-operator:v1"
	s.broker(b)
	set := s.set(b)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: render.EmbeddedPod(b), Labels: render.EmbeddedSelector(b)}, Spec: *set.Spec.Template.Spec.DeepCopy()}
	pod.Spec.Containers[0].VolumeMounts, pod.Spec.Volumes = nil, nil
	s.create(pod)
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "nats", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: "Back-off 40s"}}}}
	if err := s.client.Status().Update(context.Background(), pod); err != nil {
		t.Fatal(err)
	}
	s.broker(b)
	if m := condition(b, v1alpha1.ConditionServerReady).Message; !strings.Contains(m, "ImagePullBackOff") || strings.Contains(m, "40s") {
		t.Errorf("says %q", m)
	}
}

func (s *stepper) claim(b *v1alpha1.Broker, class, size string) *corev1.PersistentVolumeClaim {
	s.t.Helper()
	pvc := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: render.EmbeddedClaim(b), Labels: render.EmbeddedSelector(b)}}
	pvc.Spec = corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: &class, VolumeName: "pv-" + b.Name,
		Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}}}
	s.create(pvc)
	pvc.Status = corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}}
	if err := s.client.Status().Update(context.Background(), pvc); err != nil {
		s.t.Fatal(err)
	}
	return pvc
}

func (c *cluster) storageClass(growing bool) string {
	c.t.Helper()
	class := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"}, Provisioner: "none", AllowVolumeExpansion: &growing}
	if err := c.client.Create(context.Background(), class); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = c.client.Delete(context.Background(), class) })
	return class.Name
}

func TestEmbedded_Volume(t *testing.T) {
	s := embeddedStep(t)
	for _, tc := range []struct {
		name, class, has, asks string
		named                  string // storageClassName of the spec
		want, says, becomes    string
	}{
		{name: "equal", class: s.storageClass(false), has: "1Gi", asks: "1Gi", becomes: "1Gi"},
		{name: "shrink", class: s.storageClass(true), has: "2Gi", asks: "1Gi", want: "True/VolumeCannotShrink", says: "write 2Gi", becomes: "2Gi"},
		{name: "grow", class: s.storageClass(true), has: "1Gi", asks: "2Gi", want: "True/VolumeGrowing", says: "2Gi", becomes: "2Gi"},
		{name: "grow-refused", class: s.storageClass(false), has: "1Gi", asks: "2Gi", want: "True/VolumeGrowthRefused", says: "cannot be made 2Gi", becomes: "1Gi"},
		{name: "class", class: s.storageClass(false), has: "1Gi", asks: "1Gi", named: "another", want: "True/StorageClassFixed", says: "chosen when", becomes: "1Gi"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := embeddedBroker(tc.name, tc.has)
			b.Spec.Embedded.Storage.StorageClassName = tc.named
			s.create(b)
			s.broker(b)
			pvc := s.claim(b, tc.class, tc.has)
			asks := resource.MustParse(tc.asks)
			s.edit(b, func() { b.Spec.Embedded.Storage.Size = &asks })
			s.broker(b)
			if got := state(b, v1alpha1.ConditionVolumeDiffers); got != tc.want || !strings.Contains(condition(b, v1alpha1.ConditionVolumeDiffers).Message, tc.says) {
				t.Errorf("VolumeDiffers is %q, want %q with %q%s", got, tc.want, tc.says, describe(b))
			}
			if s.get(pvc); pvc.Spec.Resources.Requests.Storage().String() != tc.becomes {
				t.Errorf("the claim asks for %s, want %s", pvc.Spec.Resources.Requests.Storage(), tc.becomes)
			}
			s.broker(b) // a grown claim is the one that counts from now on
			size := resource.MustParse(tc.becomes)
			if tc.want == "True/VolumeGrowthRefused" {
				size = asks
			}
			args := s.set(b).Spec.Template.Spec.Containers[0].Args
			if got := args[len(args)-1]; got != fmt.Sprintf("--max-bytes=%d", render.MaxBytes(size)) {
				t.Errorf("runs with %s", got)
			}
			if got := s.set(b).Spec.VolumeClaimTemplates[0].Spec.Resources.Requests.Storage().String(); got != tc.has {
				t.Errorf("the template of the claim became %s", got)
			}
			writes := s.writes.count()
			if s.broker(b); tc.want != "True/VolumeGrowthRefused" && s.writes.count() != writes {
				t.Error("one more pass wrote")
			}
		})
	}
}

// The whole operator: a deleted Broker goes at once, nothing waits for the operator, and an event names the volume.
func TestEmbedded_DeletionLeavesTheVolume(t *testing.T) {
	c := connect(t)
	c.run(embeddedOptionsOf(c.ns, "shove-operator:v1", "nats://127.0.0.1:1"))
	b := embeddedBroker("shop", "1Gi")
	c.create(b)
	c.waits(b, v1alpha1.ReasonServerStarting)
	(&stepper{cluster: c}).claim(b, c.storageClass(false), "1Gi")
	if len(b.Finalizers) != 0 {
		t.Errorf("finalizers: %v", b.Finalizers)
	}
	if err := c.client.Delete(context.Background(), b); err != nil {
		t.Fatal(err)
	}
	if note := c.event(b, EventVolumeLeft); !strings.Contains(note, `"data-shove-broker-shop-0"`) {
		t.Errorf("event: %s", note)
	}
	if err := c.client.Get(context.Background(), client.ObjectKeyFromObject(b), b); !apierrors.IsNotFound(err) {
		t.Errorf("the Broker is still there: %v", err)
	}
}

func TestEmbedded_BrokerThatCannotBecomeOne(t *testing.T) {
	c := connect(t)
	b := embeddedBroker("shop", "1Gi")
	c.create(b)
	b.Spec.Embedded, b.Spec.NATS = nil, &v1alpha1.NATSBroker{Servers: []v1alpha1.NATSServer{"nats://nats:4222"}}
	if err := c.client.Update(context.Background(), b); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "create another Broker") {
		t.Errorf("embedded was taken away: %v", err)
	}
}
