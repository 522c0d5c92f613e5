// Package docs holds the documentation. Its tests keep what is said here true.
package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/shove-dev/shove/api/v1alpha1"
)

// pages are all Markdown files of the repository, by path from here.
func pages(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") && d.Name() != "..":
			return fs.SkipDir
		case filepath.Ext(path) == ".md":
			b, err := os.ReadFile(path)
			out[path] = string(b)
			return err
		}
		return nil
	})
	if err != nil || len(out) < 5 {
		t.Fatalf("found %d pages, %v", len(out), err)
	}
	return out
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.+)$`)
	notSlug = regexp.MustCompile(`[^a-z0-9 _-]`)
)

// slugs are the anchors that GitHub gives a page's headings.
func slugs(page string) map[string]bool {
	out := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(page, -1) {
		out[strings.ReplaceAll(notSlug.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-")] = true
	}
	return out
}

func TestLinksLeadSomewhere(t *testing.T) {
	all := pages(t)
	for path, text := range all {
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			target, anchor, _ := strings.Cut(m[1], "#")
			if strings.Contains(m[1], "://") {
				continue
			}
			file := path
			if target != "" {
				file = filepath.Join(filepath.Dir(path), target)
			}
			if _, err := os.Stat(file); err != nil {
				t.Errorf("%s: %s: %v", path, m[1], err)
				continue
			}
			if page, ok := all[file]; ok && anchor != "" && !slugs(page)[anchor] {
				t.Errorf("%s: %s: no such heading", path, m[1])
			}
		}
	}
}

var block = regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$")

// TestManifestsAreOnesThatTheAPIKnows reads every manifest of our kinds in the documentation, without tolerance for unknown
// fields.
func TestManifestsAreOnesThatTheAPIKnows(t *testing.T) {
	found := 0
	for path, text := range pages(t) {
		for _, m := range block.FindAllStringSubmatch(text, -1) {
			for _, doc := range strings.Split(m[1], "\n---\n") {
				if !strings.Contains(doc, "apiVersion: "+v1alpha1.GroupVersion.String()) {
					continue
				}
				var kind struct{ Kind string }
				if err := yaml.Unmarshal([]byte(doc), &kind); err != nil {
					t.Errorf("%s: %v", path, err)
					continue
				}
				into, ok := map[string]any{"Broker": &v1alpha1.Broker{}, "Topology": &v1alpha1.Topology{}, "ConsumerGroup": &v1alpha1.ConsumerGroup{}}[kind.Kind]
				if !ok {
					t.Errorf("%s: there is no kind %q", path, kind.Kind)
					continue
				}
				if err := yaml.UnmarshalStrict([]byte(doc), into); err != nil {
					t.Errorf("%s: %v", path, err)
				}
				found++
			}
		}
	}
	if found < 3 {
		t.Errorf("found %d manifests", found)
	}
}
