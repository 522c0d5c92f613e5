package kubelet

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
)

// file is one file of a volume.
type file struct {
	content []byte
	mode    os.FileMode
	text    bool // paths in it are replaced
}

// notYet is something that a pod waits for.
type notYet struct{ what string }

func (e *notYet) Error() string { return e.what }

// mountVolumes brings every volume of a pod up to date.
func (k *Kubelet) mountVolumes(ctx context.Context, p *corev1.Pod, r *runner) error {
	for _, v := range p.Spec.Volumes {
		dir := r.volumeDir(v.Name)
		if v.PersistentVolumeClaim != nil {
			if err := k.mountClaim(ctx, p, v.PersistentVolumeClaim.ClaimName, dir); err != nil {
				return fmt.Errorf("volume %q: %w", v.Name, err)
			}
			continue
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("volume %q: %w", v.Name, err)
		}
		files, err := k.volumeFiles(ctx, p, r, v)
		if err != nil {
			return fmt.Errorf("volume %q: %w", v.Name, err)
		}
		if files == nil { // an emptyDir belongs to the containers
			continue
		}
		if err := k.resolveServices(ctx, files); err != nil {
			return fmt.Errorf("volume %q: %w", v.Name, err)
		}
		if err := writeVolume(dir, r.localise(files)); err != nil {
			return fmt.Errorf("volume %q: %w", v.Name, err)
		}
	}
	return nil
}

// volumeFiles are a volume's files by their path in it; nil for an emptyDir.
func (k *Kubelet) volumeFiles(ctx context.Context, p *corev1.Pod, r *runner, v corev1.Volume) (map[string]file, error) {
	files := map[string]file{}
	switch {
	case v.EmptyDir != nil:
		return nil, nil
	case v.ConfigMap != nil:
		s := v.ConfigMap
		return files, k.addConfigMap(ctx, p.Namespace, s.Name, s.Items, isTrue(s.Optional), mode(s.DefaultMode), files)
	case v.Secret != nil:
		s := v.Secret
		return files, k.addSecret(ctx, p.Namespace, s.SecretName, s.Items, isTrue(s.Optional), mode(s.DefaultMode), files)
	case v.DownwardAPI != nil:
		return files, addDownward(p, r, v.DownwardAPI.Items, mode(v.DownwardAPI.DefaultMode), files)
	case v.Projected != nil:
		m := mode(v.Projected.DefaultMode)
		for _, s := range v.Projected.Sources {
			if err := k.addProjection(ctx, p, r, s, m, files); err != nil {
				return nil, err
			}
		}
		return files, nil
	default:
		return nil, fmt.Errorf("the stand-in for kubelet has no volumes of this type")
	}
}

func (k *Kubelet) addProjection(ctx context.Context, p *corev1.Pod, r *runner, s corev1.VolumeProjection, m os.FileMode, files map[string]file) error {
	switch {
	case s.ConfigMap != nil:
		return k.addConfigMap(ctx, p.Namespace, s.ConfigMap.Name, s.ConfigMap.Items, isTrue(s.ConfigMap.Optional), m, files)
	case s.Secret != nil:
		return k.addSecret(ctx, p.Namespace, s.Secret.Name, s.Secret.Items, isTrue(s.Secret.Optional), m, files)
	case s.DownwardAPI != nil:
		return addDownward(p, r, s.DownwardAPI.Items, m, files)
	case s.ServiceAccountToken != nil:
		t := s.ServiceAccountToken
		var audiences []string
		if t.Audience != "" {
			audiences = []string{t.Audience}
		}
		token, err := k.token(ctx, p, audiences, t.ExpirationSeconds)
		if err != nil {
			return err
		}
		files[t.Path] = file{content: []byte(token), mode: 0o600}
		return nil
	default:
		return fmt.Errorf("the stand-in for kubelet has no projections of this type")
	}
}

func (k *Kubelet) addConfigMap(ctx context.Context, ns, name string, items []corev1.KeyToPath, optional bool, m os.FileMode, files map[string]file) error {
	var c corev1.ConfigMap
	if err := k.live.Get(ctx, types.NamespacedName{Namespace: ns, Name: name}, &c); err != nil {
		return missing(err, optional, "ConfigMap", name)
	}
	data := map[string]file{}
	for key, v := range c.Data {
		data[key] = file{content: []byte(v), mode: m, text: true}
	}
	for key, v := range c.BinaryData {
		data[key] = file{content: v, mode: m}
	}
	return addItems(files, data, items, optional, "ConfigMap "+name)
}

func (k *Kubelet) addSecret(ctx context.Context, ns, name string, items []corev1.KeyToPath, optional bool, m os.FileMode, files map[string]file) error {
	var s corev1.Secret
	if err := k.live.Get(ctx, types.NamespacedName{Namespace: ns, Name: name}, &s); err != nil {
		return missing(err, optional, "Secret", name)
	}
	data := map[string]file{}
	for key, v := range s.Data {
		data[key] = file{content: v, mode: m}
	}
	return addItems(files, data, items, optional, "Secret "+name)
}

// missing is nil for an optional object that is not there.
func missing(err error, optional bool, kind, name string) error {
	switch {
	case !apierrors.IsNotFound(err):
		return err
	case optional:
		return nil
	default:
		return &notYet{fmt.Sprintf("%s %q does not exist", kind, name)}
	}
}

func addItems(files, data map[string]file, items []corev1.KeyToPath, optional bool, from string) error {
	if len(items) == 0 {
		maps.Copy(files, data)
		return nil
	}
	for _, i := range items {
		f, ok := data[i.Key]
		switch {
		case ok:
			if i.Mode != nil {
				f.mode = mode(i.Mode)
			}
			files[i.Path] = f
		case !optional:
			return &notYet{fmt.Sprintf("%s has no key %q", from, i.Key)}
		}
	}
	return nil
}

func addDownward(p *corev1.Pod, r *runner, items []corev1.DownwardAPIVolumeFile, m os.FileMode, files map[string]file) error {
	for _, i := range items {
		if i.FieldRef == nil {
			return fmt.Errorf("the stand-in for kubelet knows no resourceFieldRef")
		}
		v, err := fieldValue(p, r, i.FieldRef.FieldPath)
		if err != nil {
			return err
		}
		f := file{content: []byte(v), mode: m}
		if i.Mode != nil {
			f.mode = mode(i.Mode)
		}
		files[i.Path] = f
	}
	return nil
}

// token asks the API server for a token of the pod's ServiceAccount.
func (k *Kubelet) token(ctx context.Context, p *corev1.Pod, audiences []string, seconds *int64) (string, error) {
	name := p.Spec.ServiceAccountName
	if name == "" {
		name = "default"
	}
	req := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: audiences, ExpirationSeconds: seconds,
		BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: p.Name, UID: p.UID}}}
	sa := &corev1.ServiceAccount{}
	sa.Namespace, sa.Name = p.Namespace, name
	if err := k.client.SubResource("token").Create(ctx, sa, req); err != nil {
		if apierrors.IsNotFound(err) {
			return "", &notYet{fmt.Sprintf("ServiceAccount %q does not exist", name)}
		}
		return "", fmt.Errorf("token of ServiceAccount %q: %w", name, err)
	}
	return req.Status.Token, nil
}

func isTrue(b *bool) bool { return b != nil && *b }

func mode(m *int32) os.FileMode {
	if m == nil {
		return 0o644
	}
	return os.FileMode(*m) & 0o777 //nolint:gosec // three octal digits
}

const dataLink = "..data"

// writeVolume makes the files appear all at once, as kubelet does: they are written into a new folder, the link
// ..data is swapped to it by a rename, and the names that people see are links through ..data. Nothing happens when
// nothing changed.
func writeVolume(dir string, files map[string]file) error {
	if same, err := unchanged(dir, files); err != nil || same {
		return err
	}
	fresh, err := os.MkdirTemp(dir, "..2")
	if err != nil {
		return err
	}
	if err := os.Chmod(fresh, 0o755); err != nil { //nolint:gosec // as kubelet does
		return err
	}
	for name, f := range files {
		path := filepath.Join(fresh, filepath.Clean("/"+name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, f.content, f.mode); err != nil {
			return err
		}
	}
	link := filepath.Join(dir, dataLink)
	before, _ := os.Readlink(link)
	tmp := filepath.Join(dir, "..data_tmp")
	_ = os.Remove(tmp)
	if err := os.Symlink(filepath.Base(fresh), tmp); err != nil {
		return err
	}
	if err := os.Rename(tmp, link); err != nil {
		return err
	}
	if err := linkNames(dir, files); err != nil {
		return err
	}
	if before != "" {
		return os.RemoveAll(filepath.Join(dir, before))
	}
	return nil
}

// linkNames makes the names that people see, and removes those that are no more.
func linkNames(dir string, files map[string]file) error {
	want := map[string]bool{}
	for name := range files {
		top, _, _ := strings.Cut(strings.TrimPrefix(filepath.Clean("/"+name), "/"), "/")
		want[top] = true
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), "..") && !want[e.Name()] {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	for _, top := range slices.Sorted(maps.Keys(want)) {
		path := filepath.Join(dir, top)
		if _, err := os.Lstat(path); err == nil {
			continue
		}
		if err := os.Symlink(filepath.Join(dataLink, top), path); err != nil {
			return err
		}
	}
	return nil
}

// unchanged says whether a volume holds exactly these files already.
func unchanged(dir string, files map[string]file) (bool, error) {
	root, err := os.Readlink(filepath.Join(dir, dataLink))
	if err != nil {
		return false, nil // the first time
	}
	root = filepath.Join(dir, root)
	found := 0
	err = filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if f, ok := files[name]; ok && string(f.content) == string(b) {
			found++
			return nil
		}
		found = -1 << 30
		return nil
	})
	return found == len(files), err
}
