package render

import (
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	applyapps "k8s.io/client-go/applyconfigurations/apps/v1"
	applycore "k8s.io/client-go/applyconfigurations/core/v1"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/runtime/config"
)

// FieldOwner owns every field that the operator writes into a workload.
const FieldOwner = "shove-operator"

// Names inside a pod.
const (
	VolumeName     = "shove"
	AgentContainer = "shove-agent"
	// StatusPort is where library and agent serve /metrics, /healthz, /readyz and /status.
	StatusPort = 9464
)

// GraceMargin is added to the drain timeout: the runtime stops handlers, settles and closes its connection in it.
const GraceMargin = 5 * time.Second

// Injection is what a pod template gets.
type Injection struct {
	Target Target
	// UID of the workload: the patch applies to that object only, and never creates one.
	UID        types.UID
	ObjectName string // of ConfigMap and Secret
	Container  string // mode Library
	Agent      *Agent // mode Sidecar
	// GraceSeconds is the pod's termination grace period; nil leaves it to its owner.
	GraceSeconds *int64
}

// Agent is the sidecar.
type Agent struct {
	Image     string
	Resources *v1alpha1.SidecarResources
}

// NewInjection is what a plan puts into its workload, without a grace period. agentImage is used where the
// ConsumerGroup names none.
func NewInjection(p *Plan, uid types.UID, agentImage string) (Injection, *Finding) {
	in := Injection{Target: p.Target, UID: uid, ObjectName: p.Target.ObjectName(), Container: p.Container}
	if s := p.Sidecar; s != nil {
		in.Agent = &Agent{Image: s.Image, Resources: s.Resources}
		if in.Agent.Image == "" {
			in.Agent.Image = agentImage
		}
		if in.Agent.Image == "" {
			return in, &Finding{Condition: v1alpha1.ConditionInjected, Reason: v1alpha1.ReasonSidecarImageMissing, Blocks: true,
				Message: "mode is Sidecar and no image is known for the agent: set sidecar.image"}
		}
	}
	return in, nil
}

// GraceNeeded is the termination grace period, in seconds, that the longest drain of a plan needs; 0 without
// consumers.
func GraceNeeded(p *Plan) int64 {
	var longest time.Duration
	for _, c := range p.Consumers {
		longest = max(longest, c.Effective.DrainTimeout+GraceMargin)
	}
	return int64((longest + time.Second - 1) / time.Second)
}

// Patch is the server-side apply configuration of the injection.
func (in Injection) Patch() (runtime.ApplyConfiguration, error) {
	spec := applycore.PodSpec().WithVolumes(applycore.Volume().WithName(VolumeName).WithProjected(
		applycore.ProjectedVolumeSource().WithSources(
			applycore.VolumeProjection().WithConfigMap(applycore.ConfigMapProjection().WithName(in.ObjectName)),
			applycore.VolumeProjection().WithSecret(applycore.SecretProjection().WithName(in.ObjectName).WithOptional(true)))))
	if in.GraceSeconds != nil {
		spec = spec.WithTerminationGracePeriodSeconds(*in.GraceSeconds)
	}
	if in.Agent != nil {
		spec = spec.WithInitContainers(in.Agent.container())
	} else {
		spec = spec.WithContainers(configured(applycore.Container().WithName(in.Container)))
	}
	return in.workload(applycore.PodTemplateSpec().WithSpec(spec))
}

// AnnotationInjected marks a workload that carries an injection, so that one that is left over is found by its metadata.
const AnnotationInjected = "shove.dev/injected"

// Removal is the apply configuration that takes everything back that the operator owns in a workload.
func Removal(t Target, uid types.UID) (runtime.ApplyConfiguration, error) {
	return Injection{Target: t, UID: uid}.workload(nil)
}

func (in Injection) workload(template *applycore.PodTemplateSpecApplyConfiguration) (runtime.ApplyConfiguration, error) {
	t := in.Target
	switch v1alpha1.WorkloadKind(t.Kind) {
	case v1alpha1.WorkloadDeployment:
		w := applyapps.Deployment(t.Name, t.Namespace).WithUID(in.UID)
		if template != nil {
			w = w.WithAnnotations(map[string]string{AnnotationInjected: in.ObjectName}).
				WithSpec(applyapps.DeploymentSpec().WithTemplate(template))
		}
		return w, nil
	case v1alpha1.WorkloadStatefulSet:
		w := applyapps.StatefulSet(t.Name, t.Namespace).WithUID(in.UID)
		if template != nil {
			w = w.WithAnnotations(map[string]string{AnnotationInjected: in.ObjectName}).
				WithSpec(applyapps.StatefulSetSpec().WithTemplate(template))
		}
		return w, nil
	default:
		return nil, fmt.Errorf("inject into %s: kind is neither Deployment nor StatefulSet", t)
	}
}

// configured gives a container the mounted configuration and the variable that names it.
func configured(c *applycore.ContainerApplyConfiguration) *applycore.ContainerApplyConfiguration {
	return c.
		WithEnv(applycore.EnvVar().WithName(config.EnvPath).WithValue(config.DefaultPath)).
		WithVolumeMounts(applycore.VolumeMount().WithName(VolumeName).WithMountPath(MountPath).WithReadOnly(true))
}

// container is the agent as a native sidecar: it starts before the application's containers and ends after them, so
// its drain begins in the preStop hook.
func (a Agent) container() *applycore.ContainerApplyConfiguration {
	probe := func(path string) *applycore.ProbeApplyConfiguration {
		return applycore.Probe().WithHTTPGet(applycore.HTTPGetAction().WithPath(path).WithPort(intstr.FromInt32(StatusPort)))
	}
	c := configured(applycore.Container().WithName(AgentContainer)).
		WithImage(a.Image).
		WithRestartPolicy(corev1.ContainerRestartPolicyAlways).
		WithPorts(applycore.ContainerPort().WithName("shove-status").WithContainerPort(StatusPort).WithProtocol(corev1.ProtocolTCP)).
		WithReadinessProbe(probe("/readyz")).
		WithLivenessProbe(probe("/healthz")).
		WithLifecycle(applycore.Lifecycle().WithPreStop(applycore.LifecycleHandler().
			WithExec(applycore.ExecAction().WithCommand("/shove-agent", "drain")))).
		WithSecurityContext(applycore.SecurityContext().
			WithAllowPrivilegeEscalation(false).WithReadOnlyRootFilesystem(true).WithRunAsNonRoot(true).
			WithCapabilities(applycore.Capabilities().WithDrop("ALL")).
			WithSeccompProfile(applycore.SeccompProfile().WithType(corev1.SeccompProfileTypeRuntimeDefault)))
	if r := a.Resources; r != nil {
		resources := applycore.ResourceRequirements()
		if len(r.Limits) > 0 {
			resources = resources.WithLimits(resourceList(r.Limits))
		}
		if len(r.Requests) > 0 {
			resources = resources.WithRequests(resourceList(r.Requests))
		}
		c = c.WithResources(resources)
	}
	return c
}

// SamePatch says whether two apply configurations say the same, apart from the UID, which extracted ones lack.
func SamePatch(a, b runtime.ApplyConfiguration) (bool, error) {
	x, err := plain(a)
	if err != nil {
		return false, err
	}
	y, err := plain(b)
	if err != nil {
		return false, err
	}
	return string(x) == string(y), nil
}

// plain is the canonical JSON of an apply configuration without its UID: maps are sorted by encoding/json.
func plain(a runtime.ApplyConfiguration) ([]byte, error) {
	b, err := json.Marshal(a)
	if err != nil {
		return nil, fmt.Errorf("encode apply configuration: %w", err)
	}
	m := map[string]any{}
	if err := json.Unmarshal(b, &m); err != nil {
		return nil, fmt.Errorf("decode apply configuration: %w", err)
	}
	if meta, ok := m["metadata"].(map[string]any); ok {
		delete(meta, "uid")
	}
	return json.Marshal(m)
}

func resourceList(in map[string]resource.Quantity) corev1.ResourceList {
	out := corev1.ResourceList{}
	for name, q := range in {
		out[corev1.ResourceName(name)] = q
	}
	return out
}
