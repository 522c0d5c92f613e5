package main

import (
	"embed"
	"fmt"
	"os"
	"path/filepath"
	"text/template"
)

//go:embed overlay
var overlays embed.FS

// overlayData fills the templates in overlay/.
type overlayData struct {
	Namespace                string
	OperatorImage            string
	Operator, Workload       user
	BrokerURL, ManagementURL string
	// Images are those of the example's Deployments, by name.
	Images map[string]string
	// Resources are the manifests that the overlay starts from.
	Resources []string
}

// writeOverlays makes two folders for `kubectl apply -k`: dir/operator, from config/, and dir/orders, from
// examples/orders/manifests. Both are copies of the repository's files with a kustomization beside them.
func writeOverlays(root, dir string, data overlayData) error {
	operator, orders := filepath.Join(dir, "operator"), filepath.Join(dir, "orders")
	if err := os.CopyFS(filepath.Join(operator, "config"), os.DirFS(filepath.Join(root, "config"))); err != nil {
		return fmt.Errorf("copy config: %w", err)
	}
	manifests := os.DirFS(filepath.Join(root, "examples", "orders", "manifests"))
	if err := os.CopyFS(orders, manifests); err != nil {
		return fmt.Errorf("copy the example's manifests: %w", err)
	}
	files, err := filepath.Glob(filepath.Join(orders, "*.yaml"))
	if err != nil {
		return err
	}
	for _, f := range files {
		data.Resources = append(data.Resources, filepath.Base(f))
	}
	templates, err := template.ParseFS(overlays, "overlay/*.tmpl")
	if err != nil {
		return fmt.Errorf("overlay: %w", err)
	}
	for name, file := range map[string]string{
		"operator.yaml.tmpl":  filepath.Join(operator, "kustomization.yaml"),
		"namespace.yaml.tmpl": filepath.Join(operator, "namespace.yaml"),
		"orders.yaml.tmpl":    filepath.Join(orders, "kustomization.yaml"),
	} {
		if err := fill(templates.Lookup(name), file, data); err != nil {
			return fmt.Errorf("overlay %s: %w", name, err)
		}
	}
	return nil
}

func fill(t *template.Template, file string, data overlayData) error {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600) // it may hold passwords
	if err != nil {
		return err
	}
	if err := t.Execute(f, data); err != nil {
		_ = f.Close()
		return err
	}
	return f.Close()
}
