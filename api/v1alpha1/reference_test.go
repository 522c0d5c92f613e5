package v1alpha1_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
)

// TestReferenceIsComplete: every field, condition and reason has its line in docs/reference.
func TestReferenceIsComplete(t *testing.T) {
	var all strings.Builder
	pages := map[string]string{}
	for kind := range crds(t) {
		text, err := os.ReadFile(filepath.Join("../../docs/reference", strings.ToLower(kind)+".md"))
		if err != nil {
			t.Fatal(err)
		}
		pages[kind] = string(text)
		all.Write(text)
	}
	for kind, crd := range crds(t) {
		root := crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties
		for _, part := range []string{"spec", "status"} {
			for _, field := range leaves(root[part], part) {
				if strings.HasPrefix(field, "spec.consumerDefaults.") {
					continue // described with the options of a ConsumerGroup
				}
				name := field[strings.LastIndex(field, ".")+1:]
				if !regexp.MustCompile("`[^`\n]*\\b" + name + "\\b").MatchString(pages[kind]) {
					t.Errorf("docs/reference does not describe the field %s of a %s", field, kind)
				}
			}
		}
	}
	for name, value := range constants(t, "conditions.go") {
		if (strings.HasPrefix(name, "Condition") || strings.HasPrefix(name, "Reason")) && !strings.Contains(all.String(), "`"+value+"`") {
			t.Errorf("docs/reference does not describe %s (%s)", value, name)
		}
	}
}

// leaves lists the paths of the fields of this API, without what is inside types of Kubernetes.
func leaves(s apiextensionsv1.JSONSchemaProps, path string) []string {
	if s.Items != nil && s.Items.Schema != nil {
		s = *s.Items.Schema
	}
	if len(s.Properties) == 0 || strings.HasSuffix(path, ".conditions") || strings.HasSuffix(path, ".selector") {
		return []string{path}
	}
	var out []string
	for name, p := range s.Properties {
		out = append(out, leaves(p, path+"."+name)...)
	}
	return out
}

// constants reads the string constants of a file of this package.
func constants(t *testing.T, file string) map[string]string {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, d := range parsed.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.CONST {
			continue
		}
		for _, s := range g.Specs {
			v := s.(*ast.ValueSpec)
			text, err := strconv.Unquote(v.Values[0].(*ast.BasicLit).Value)
			if err != nil {
				t.Fatal(err)
			}
			out[v.Names[0].Name] = text
		}
	}
	if len(out) < 20 {
		t.Fatalf("only %d constants in %s", len(out), file)
	}
	return out
}
