package main

import (
	"encoding/json"
	"fmt"
	"io"

	"sigs.k8s.io/yaml"

	"github.com/shove-dev/shove/runtime/config"
)

var writers = map[string]func(io.Writer, result) error{"yaml": writeYAML, "json": writeJSON}

// writeJSON prints one value with everything in it.
func writeJSON(w io.Writer, r result) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(r)
}

// writeYAML prints a document per Topology and one per workload; the latter is the file as the workload finds it.
func writeYAML(w io.Writer, r result) error {
	first := true
	document := func(title string, body []byte) error {
		separator := "---\n"
		if first {
			separator, first = "", false
		}
		_, err := fmt.Fprintf(w, "%s# %s\n%s", separator, title, body)
		return err
	}
	for _, t := range r.Topologies {
		b, err := yaml.Marshal(t)
		if err != nil {
			return fmt.Errorf("encode objects of Topology %q: %w", t.Name, err)
		}
		if err := document(fmt.Sprintf("Topology %s/%s: what is declared on Broker %s", t.Namespace, t.Name, t.Broker), b); err != nil {
			return err
		}
	}
	for _, c := range r.Workloads {
		b, err := config.Marshal(c.Config)
		if err != nil {
			return fmt.Errorf("encode RuntimeConfig of %s %q: %w", c.Kind, c.Name, err)
		}
		where := ""
		if c.Container != "" {
			where = fmt.Sprintf(", container %s", c.Container)
		}
		title := fmt.Sprintf("%s %s/%s%s: %s, from ConfigMap %s; credentials from the Secret of that name", c.Kind, c.Namespace, c.Name, where, config.DefaultPath, c.ConfigMap)
		if err := document(title, b); err != nil {
			return err
		}
	}
	return nil
}
