package render

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/intstr"
	applyapps "k8s.io/client-go/applyconfigurations/apps/v1"
	applycore "k8s.io/client-go/applyconfigurations/core/v1"
	applymeta "k8s.io/client-go/applyconfigurations/meta/v1"

	"github.com/shove-dev/shove/api/v1alpha1"
)

// What the operator and the server of an embedded broker agree on.
const (
	EmbeddedClientPort = 4222
	EmbeddedHealthPort = 8222
	// EmbeddedWorkloadPrefix is put before the keys of the workloads' user in the server's Secret.
	EmbeddedWorkloadPrefix = "workload-"

	embeddedData    = "data"
	embeddedDataDir = "/data"
	embeddedUsers   = "/etc/shove-embedded"
	// embeddedUser is the one of the image.
	embeddedUser = 65532
	// embeddedGrace is how long the server may take to say goodbye to its clients and write out what it has.
	embeddedGrace = 45
)

var (
	notLabel = regexp.MustCompile(`[^a-z0-9-]+`)
	label    = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`)
)

// maxEmbeddedName leaves room for what Kubernetes appends to the name of a StatefulSet in labels.
const maxEmbeddedName = 52

// EmbeddedName is the name of the StatefulSet, the Service and the Secret of an embedded broker. It is
// "shove-broker-{name}", with a hash where the Broker's name is too long for it or has dots.
func EmbeddedName(b *v1alpha1.Broker) string {
	const prefix = "shove-broker-"
	name := prefix + b.Name
	if len(name) <= maxEmbeddedName && label.MatchString(name) {
		return name
	}
	sum := shortHash([]byte(b.Name))
	short := notLabel.ReplaceAllString(b.Name, "-")
	short = short[:min(len(short), maxEmbeddedName-len(prefix)-1-len(sum))]
	return prefix + strings.Trim(short, "-") + "-" + sum
}

// EmbeddedPod is the server's pod, EmbeddedClaim its volume, which outlives the Broker.
func EmbeddedPod(b *v1alpha1.Broker) string { return EmbeddedName(b) + "-0" }

// EmbeddedClaim is the PersistentVolumeClaim that the StatefulSet makes.
func EmbeddedClaim(b *v1alpha1.Broker) string { return embeddedData + "-" + EmbeddedPod(b) }

// EmbeddedAddress is where clients in the cluster find the server.
func EmbeddedAddress(b *v1alpha1.Broker) v1alpha1.NATSServer {
	return v1alpha1.NATSServer(fmt.Sprintf("nats://%s.%s.svc:%d", EmbeddedName(b), b.Namespace, EmbeddedClientPort))
}

// OperatorCredentials are the ones of the Broker's spec, or the generated ones of an embedded broker. Nil: none.
func OperatorCredentials(b *v1alpha1.Broker) *v1alpha1.CredentialsSource {
	if b.Spec.Credentials == nil && b.Spec.Embedded != nil {
		return &v1alpha1.CredentialsSource{SecretRef: v1alpha1.SecretReference{Name: EmbeddedName(b)}}
	}
	return b.Spec.Credentials
}

// Embedded is what the rendered objects of an embedded broker depend on besides the Broker.
type Embedded struct {
	Broker *v1alpha1.Broker
	Image  string
	// Size is that of the volume: the spec's, or more where the volume has more already.
	Size resource.Quantity
	// Claim is the claim's template where the StatefulSet exists, which cannot change it. Nil: made from the spec.
	Claim *corev1.PersistentVolumeClaimSpec
}

// EmbeddedOwner owns the fields of the rendered objects of embedded brokers.
const EmbeddedOwner = FieldOwner + "-embedded"

// MaxBytes is what messages may take of a volume: the rest is for indexes and the file system itself.
func MaxBytes(size resource.Quantity) int64 { return size.Value() / 10 * 9 }

// EmbeddedSelector finds the pod and the claim of an embedded broker by their labels.
func EmbeddedSelector(b *v1alpha1.Broker) map[string]string {
	return map[string]string{"app.kubernetes.io/name": "shove-embedded", "app.kubernetes.io/instance": EmbeddedName(b)}
}

func (e Embedded) labels() map[string]string { return EmbeddedSelector(e.Broker) }

// Labels are those of the objects.
func (e Embedded) Labels() map[string]string {
	l := e.labels()
	l["app.kubernetes.io/managed-by"] = FieldOwner
	return l
}

func (e Embedded) owner() *applymeta.OwnerReferenceApplyConfiguration {
	return applymeta.OwnerReference().WithAPIVersion(v1alpha1.GroupVersion.String()).WithKind("Broker").
		WithName(e.Broker.Name).WithUID(e.Broker.UID).WithController(true).WithBlockOwnerDeletion(true)
}

// Service gives the server an address that stays when its pod is another one.
func (e Embedded) Service() *applycore.ServiceApplyConfiguration {
	return applycore.Service(EmbeddedName(e.Broker), e.Broker.Namespace).WithLabels(e.Labels()).WithOwnerReferences(e.owner()).
		WithSpec(applycore.ServiceSpec().WithType(corev1.ServiceTypeClusterIP).WithSelector(e.labels()).
			WithPorts(applycore.ServicePort().WithName("nats").WithPort(EmbeddedClientPort).WithTargetPort(intstr.FromString("nats")).WithProtocol(corev1.ProtocolTCP)))
}

// StatefulSet runs the server. Its pods are replaced by nobody but whoever deletes them (OnDelete), so that neither an
// update of the operator nor a change of the spec takes the server down.
func (e Embedded) StatefulSet() *applyapps.StatefulSetApplyConfiguration {
	name := EmbeddedName(e.Broker)
	return applyapps.StatefulSet(name, e.Broker.Namespace).WithLabels(e.Labels()).WithOwnerReferences(e.owner()).
		WithSpec(applyapps.StatefulSetSpec().WithReplicas(1).WithServiceName(name).
			WithSelector(applymeta.LabelSelector().WithMatchLabels(e.labels())).
			WithUpdateStrategy(applyapps.StatefulSetUpdateStrategy().WithType(appsv1.OnDeleteStatefulSetStrategyType)).
			WithPersistentVolumeClaimRetentionPolicy(applyapps.StatefulSetPersistentVolumeClaimRetentionPolicy().
				WithWhenDeleted(appsv1.RetainPersistentVolumeClaimRetentionPolicyType).WithWhenScaled(appsv1.RetainPersistentVolumeClaimRetentionPolicyType)).
			WithTemplate(applycore.PodTemplateSpec().WithLabels(e.Labels()).WithSpec(e.pod())).
			WithVolumeClaimTemplates(e.claim()))
}

func (e Embedded) claim() *applycore.PersistentVolumeClaimApplyConfiguration {
	storage := e.Broker.Spec.Embedded.Storage
	size, class := *storage.Size, storage.StorageClassName
	if e.Claim != nil {
		size, class = e.Claim.Resources.Requests[corev1.ResourceStorage], ""
		if c := e.Claim.StorageClassName; c != nil {
			class = *c
		}
	}
	spec := applycore.PersistentVolumeClaimSpec().WithAccessModes(corev1.ReadWriteOnce).
		WithResources(applycore.VolumeResourceRequirements().WithRequests(corev1.ResourceList{corev1.ResourceStorage: size}))
	if class != "" {
		spec.WithStorageClassName(class)
	}
	c := applycore.PersistentVolumeClaim(embeddedData, "").WithLabels(e.Labels()).WithSpec(spec)
	c.Namespace = nil
	return c
}

func (e Embedded) pod() *applycore.PodSpecApplyConfiguration {
	return applycore.PodSpec().
		WithAutomountServiceAccountToken(false).WithEnableServiceLinks(false).WithTerminationGracePeriodSeconds(embeddedGrace).
		WithSecurityContext(applycore.PodSecurityContext().WithRunAsNonRoot(true).WithRunAsUser(embeddedUser).WithRunAsGroup(embeddedUser).
			WithFSGroup(embeddedUser).WithFSGroupChangePolicy(corev1.FSGroupChangeOnRootMismatch).
			WithSeccompProfile(applycore.SeccompProfile().WithType(corev1.SeccompProfileTypeRuntimeDefault))).
		WithContainers(e.container()).
		WithVolumes(applycore.Volume().WithName("users").WithSecret(applycore.SecretVolumeSource().WithSecretName(EmbeddedName(e.Broker))))
}

func (e Embedded) container() *applycore.ContainerApplyConfiguration {
	probe := func(path string, period, failures int32) *applycore.ProbeApplyConfiguration {
		return applycore.Probe().WithHTTPGet(applycore.HTTPGetAction().WithPath(path).WithPort(intstr.FromString("health"))).
			WithPeriodSeconds(period).WithFailureThreshold(failures).WithTimeoutSeconds(3)
	}
	quantity := resource.MustParse
	return applycore.Container().WithName("nats").WithImage(e.Image).WithImagePullPolicy(corev1.PullIfNotPresent).
		WithArgs("embedded", "--store="+embeddedDataDir, "--users="+embeddedUsers,
			"--port="+strconv.Itoa(EmbeddedClientPort), "--health-port="+strconv.Itoa(EmbeddedHealthPort), "--max-bytes="+strconv.FormatInt(MaxBytes(e.Size), 10)).
		WithEnv(applycore.EnvVar().WithName("GOMEMLIMIT").WithValue("440MiB")).
		WithPorts(
			applycore.ContainerPort().WithName("nats").WithContainerPort(EmbeddedClientPort).WithProtocol(corev1.ProtocolTCP),
			applycore.ContainerPort().WithName("health").WithContainerPort(EmbeddedHealthPort).WithProtocol(corev1.ProtocolTCP)).
		// Recovering a large store takes its time, during which it must not be killed.
		WithStartupProbe(probe("/healthz", 2, 150)).
		WithLivenessProbe(probe("/healthz", 10, 6)).
		WithReadinessProbe(probe("/readyz", 5, 2)).
		WithResources(applycore.ResourceRequirements().
			WithRequests(corev1.ResourceList{corev1.ResourceCPU: quantity("50m"), corev1.ResourceMemory: quantity("128Mi")}).
			WithLimits(corev1.ResourceList{corev1.ResourceMemory: quantity("512Mi")})).
		WithSecurityContext(applycore.SecurityContext().WithAllowPrivilegeEscalation(false).WithReadOnlyRootFilesystem(true).
			WithCapabilities(applycore.Capabilities().WithDrop("ALL"))).
		WithVolumeMounts(
			applycore.VolumeMount().WithName(embeddedData).WithMountPath(embeddedDataDir),
			applycore.VolumeMount().WithName("users").WithMountPath(embeddedUsers).WithReadOnly(true))
}
