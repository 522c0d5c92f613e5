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
	Namespace          string
	OperatorImage      string
	Operator, Workload user
	// Broker is embedded, nats or rabbitmq: what the Broker is to be.
	Broker                   string
	BrokerURL, ManagementURL string
	// Images are those of the example's Deployments, by name.
	Images map[string]string
	// Resources are the manifests that the overlay starts from.
	Resources []string
}

// writeOperatorOverlay makes a folder for `kubectl apply -k` from a copy of config/.
func writeOperatorOverlay(root, dir string, data overlayData) error {
	if err := os.CopyFS(filepath.Join(dir, "config"), os.DirFS(filepath.Join(root, "config"))); err != nil {
		return fmt.Errorf("copy config: %w", err)
	}
	if err := fill("namespace.yaml.tmpl", filepath.Join(dir, "namespace.yaml"), data); err != nil {
		return err
	}
	return fill("operator.yaml.tmpl", filepath.Join(dir, "kustomization.yaml"), data)
}

// writeOrdersOverlay makes one from a copy of the example's manifests.
func writeOrdersOverlay(root, dir string, data overlayData) error {
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(root, "examples", "orders", "manifests"))); err != nil {
		return fmt.Errorf("copy the example's manifests: %w", err)
	}
	if data.Broker != "embedded" { // the Broker is another one; everything else stays as it is
		b, err := os.ReadFile(filepath.Join(root, "examples", "orders", "brokers", data.Broker+".yaml"))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, "broker.yaml"), b, 0o600)
		}
		if err != nil {
			return fmt.Errorf("take another Broker: %w", err)
		}
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return err
	}
	for _, f := range files {
		data.Resources = append(data.Resources, filepath.Base(f))
	}
	return fill("orders.yaml.tmpl", filepath.Join(dir, "kustomization.yaml"), data)
}

// fill writes a template of overlay/ into a file, which may hold passwords.
func fill(name, file string, data any) error {
	t, err := template.ParseFS(overlays, "overlay/"+name)
	if err != nil {
		return fmt.Errorf("overlay %s: %w", name, err)
	}
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("overlay %s: %w", name, err)
	}
	if err := t.Execute(f, data); err != nil {
		_ = f.Close()
		return fmt.Errorf("overlay %s: %w", name, err)
	}
	return f.Close()
}
