package kubelet

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// mounts are where the paths that a container sees really are; the longest path first.
type mounts []mount

type mount struct {
	path string // in the container
	dir  string // on this machine
}

func mountsOf(r *runner, c *corev1.Container) mounts {
	var m mounts
	for _, v := range c.VolumeMounts {
		dir := r.volumeDir(v.Name)
		if v.SubPath != "" {
			dir += "/" + v.SubPath
		}
		m = append(m, mount{strings.TrimRight(v.MountPath, "/"), dir})
	}
	slices.SortFunc(m, func(a, b mount) int { return len(b.path) - len(a.path) })
	return m
}

// replace puts real paths in the place of mounted ones.
func (m mounts) replace(s string) string {
	if len(m) == 0 || !strings.Contains(s, "/") {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); {
		if dir, n := m.at(s, i); n > 0 {
			b.WriteString(dir)
			i += n
			continue
		}
		b.WriteByte(s[i])
		i++
	}
	return b.String()
}

// at is the mount whose path begins at s[i] and ends there as a path: not /etc/shove in /etc/shove-other or in
// /my/etc/shove.
func (m mounts) at(s string, i int) (dir string, n int) {
	if i > 0 && pathByte(s[i-1]) {
		return "", 0
	}
	for _, v := range m {
		if v.path == "" || !strings.HasPrefix(s[i:], v.path) {
			continue
		}
		end := i + len(v.path)
		if end == len(s) || s[end] == '/' || !pathByte(s[end]) {
			return v.dir, len(v.path)
		}
	}
	return "", 0
}

func pathByte(c byte) bool {
	return c == '/' || c == '.' || c == '-' || c == '_' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
}

// localise replaces mounted paths in files that are text.
func (r *runner) localise(files map[string]file) map[string]file {
	var all mounts
	for _, c := range r.containers() {
		all = append(all, mountsOf(r, c)...)
	}
	out := make(map[string]file, len(files))
	for name, f := range files {
		if f.text {
			f.content = []byte(all.replace(string(f.content)))
		}
		out[name] = f
	}
	return out
}

// environment resolves a container's variables. The error is a *notYet where an object is missing.
func (k *Kubelet) environment(ctx context.Context, p *corev1.Pod, r *runner, c *corev1.Container) ([]string, error) {
	vars := map[string]string{}
	var names []string
	set := func(name, value string) {
		if _, known := vars[name]; !known {
			names = append(names, name)
		}
		vars[name] = value
	}
	for _, base := range []string{"PATH", "HOME", "TMPDIR", "LANG"} {
		if v, ok := os.LookupEnv(base); ok {
			set(base, v)
		}
	}
	set("HOSTNAME", p.Name)
	facts := map[string]string{"POD_IP": r.ip, "POD_NAME": p.Name, "POD_NAMESPACE": p.Namespace}
	for _, e := range k.cfg.Env {
		name, value, _ := strings.Cut(e, "=")
		set(name, expand(value, facts))
	}
	for _, from := range c.EnvFrom {
		data, err := k.envFrom(ctx, p.Namespace, from)
		if err != nil {
			return nil, err
		}
		for key, v := range data {
			set(from.Prefix+key, v)
		}
	}
	for _, e := range c.Env {
		value := expand(e.Value, vars)
		if e.ValueFrom != nil {
			v, ok, err := k.envValue(ctx, p, r, e.ValueFrom)
			if err != nil {
				return nil, fmt.Errorf("variable %s: %w", e.Name, err)
			}
			if !ok {
				continue
			}
			value = v
		}
		set(e.Name, value)
	}
	m := mountsOf(r, c)
	out := make([]string, len(names))
	for i, name := range names {
		value := vars[name]
		if name != "PATH" && name != "HOME" {
			value = m.replace(value)
		}
		out[i] = name + "=" + value
	}
	return out, nil
}

func (k *Kubelet) envFrom(ctx context.Context, ns string, from corev1.EnvFromSource) (map[string]string, error) {
	files := map[string]file{}
	var err error
	switch {
	case from.ConfigMapRef != nil:
		err = k.addConfigMap(ctx, ns, from.ConfigMapRef.Name, nil, isTrue(from.ConfigMapRef.Optional), 0, files)
	case from.SecretRef != nil:
		err = k.addSecret(ctx, ns, from.SecretRef.Name, nil, isTrue(from.SecretRef.Optional), 0, files)
	}
	out := map[string]string{}
	for key, f := range files {
		out[key] = string(f.content)
	}
	return out, err
}

func (k *Kubelet) envValue(ctx context.Context, p *corev1.Pod, r *runner, from *corev1.EnvVarSource) (value string, ok bool, err error) {
	files := map[string]file{}
	switch {
	case from.FieldRef != nil:
		v, err := fieldValue(p, r, from.FieldRef.FieldPath)
		return v, true, err
	case from.ConfigMapKeyRef != nil:
		s := from.ConfigMapKeyRef
		err = k.addConfigMap(ctx, p.Namespace, s.Name, []corev1.KeyToPath{{Key: s.Key, Path: "v"}}, isTrue(s.Optional), 0, files)
	case from.SecretKeyRef != nil:
		s := from.SecretKeyRef
		err = k.addSecret(ctx, p.Namespace, s.Name, []corev1.KeyToPath{{Key: s.Key, Path: "v"}}, isTrue(s.Optional), 0, files)
	default:
		return "", false, fmt.Errorf("the stand-in for kubelet has no values of this type")
	}
	f, ok := files["v"]
	return string(f.content), ok, err
}

var mapField = regexp.MustCompile(`^metadata\.(labels|annotations)\['(.+)'\]$`)

// fieldValue is a field of the pod as the downward API gives it.
func fieldValue(p *corev1.Pod, r *runner, path string) (string, error) {
	switch path {
	case "metadata.name":
		return p.Name, nil
	case "metadata.namespace":
		return p.Namespace, nil
	case "metadata.uid":
		return string(p.UID), nil
	case "metadata.labels":
		return mapText(p.Labels), nil
	case "metadata.annotations":
		return mapText(p.Annotations), nil
	case "spec.nodeName":
		return p.Spec.NodeName, nil
	case "spec.serviceAccountName":
		return p.Spec.ServiceAccountName, nil
	case "status.podIP", "status.podIPs":
		return r.ip, nil
	case "status.hostIP", "status.hostIPs":
		return "127.0.0.1", nil
	}
	if m := mapField.FindStringSubmatch(path); m != nil {
		if m[1] == "labels" {
			return p.Labels[m[2]], nil
		}
		return p.Annotations[m[2]], nil
	}
	return "", fmt.Errorf("the stand-in for kubelet does not know the field %q", path)
}

func mapText(m map[string]string) string {
	lines := make([]string, 0, len(m))
	for key, v := range m {
		lines = append(lines, fmt.Sprintf("%s=%q", key, v))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

var reference = regexp.MustCompile(`\$(\$\([A-Za-z0-9_.-]+\))|\$\(([A-Za-z0-9_.-]+)\)`)

// expand replaces $(NAME) by variables that are known; $$(NAME) stands for itself.
func expand(s string, vars map[string]string) string {
	return reference.ReplaceAllStringFunc(s, func(m string) string {
		g := reference.FindStringSubmatch(m)
		if g[1] != "" {
			return g[1]
		}
		if v, ok := vars[g[2]]; ok {
			return v
		}
		return m
	})
}

// expandAll expands each of some arguments.
func expandAll(args []string, vars map[string]string) []string {
	out := make([]string, len(args))
	for i, a := range args {
		out[i] = expand(a, vars)
	}
	return out
}
