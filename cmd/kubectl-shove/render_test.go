package main

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/shove-dev/shove/runtime/config"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var update = flag.Bool("update", false, "write the golden files anew")

// run runs the command as a person would.
func run(stdin string, args ...string) (stdout, stderr string, err error) {
	var out, errOut bytes.Buffer
	cmd := root(strings.NewReader(stdin), &out, &errOut)
	cmd.SetArgs(args)
	err = cmd.Execute()
	return out.String(), errOut.String(), err
}

// TestRenderGolden compares the output for testdata/*.yaml with testdata/golden/*. Each input is a whole world.
func TestRenderGolden(t *testing.T) {
	inputs, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(inputs) == 0 {
		t.Fatalf("no input: %v", err)
	}
	for _, input := range inputs {
		for _, format := range []string{"yaml", "json"} {
			name := strings.TrimSuffix(filepath.Base(input), ".yaml")
			t.Run(name+"/"+format, func(t *testing.T) {
				stdout, stderr, err := run("", "render", "-f", input, "-n", "shop", "--output", format)
				got := stdout + "--- standard error\n" + stderr
				if err != nil {
					got += "Error: " + err.Error() + "\n"
				}
				golden := filepath.Join("testdata", "golden", name+"."+format)
				if *update {
					if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
						t.Fatal(err)
					}
				}
				want, err := os.ReadFile(golden)
				if err != nil {
					t.Fatal(err)
				}
				if d := cmp.Diff(string(want), got); d != "" {
					t.Errorf("output (-golden +got), write it with -update:\n%s", d)
				}
			})
		}
	}
}

// TestRenderedFilesLoad: what is printed for a workload is a file that the runtime takes.
func TestRenderedFilesLoad(t *testing.T) {
	stdout, _, err := run("", "render", "-f", "testdata/orders.yaml", "-n", "shop")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, doc := range strings.Split(stdout, "---\n") {
		if !strings.Contains(doc, "kind: "+config.Kind) {
			continue
		}
		n++
		if _, warnings, err := config.Parse([]byte(doc)); err != nil || len(warnings) > 0 {
			t.Errorf("the runtime refuses it: %v %v\n%s", err, warnings, doc)
		}
	}
	if n != 2 {
		t.Errorf("%d files, want those of the worker and the publisher", n)
	}
}

func TestRenderReads(t *testing.T) {
	file, err := os.ReadFile("testdata/orders.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want, _, err := run("", "render", "-f", "testdata/orders.yaml", "-n", "shop")
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	for i, doc := range strings.Split(string(file), "---\n") {
		if err := os.WriteFile(filepath.Join(folder, string(rune('a'+i))+".yml"), []byte(doc), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, tc := range map[string]struct {
		stdin string
		args  []string
	}{
		"standard input": {string(file), []string{"-f", "-"}},
		"a folder":       {"", []string{"-f", folder}},
		"several files":  {"", []string{"-f", filepath.Join(folder, "a.yml"), "-f", filepath.Join(folder, "b.yml"), "-f", filepath.Join(folder, "c.yml"), "-f", filepath.Join(folder, "d.yml"), "-f", filepath.Join(folder, "e.yml")}},
	} {
		t.Run(name, func(t *testing.T) {
			got, _, err := run(tc.stdin, append([]string{"render", "-n", "shop"}, tc.args...)...)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("output (-one file +got):\n%s", d)
			}
		})
	}
}

func TestRenderRefuses(t *testing.T) {
	const topo = "apiVersion: shove.dev/v1alpha1\nkind: Topology\nmetadata: {name: orders}\nspec: {brokerRef: {name: rabbit}"
	for name, tc := range map[string]struct {
		stdin string
		args  []string
		want  []string
	}{
		"nothing to read":      {"", []string{"render"}, []string{"which manifests?"}},
		"a file that is not":   {"", []string{"render", "-f", "nowhere.yaml"}, []string{"nowhere.yaml"}},
		"an unknown format":    {topo + "}", []string{"render", "-f", "-", "-o", "xml"}, []string{`"xml"`, "yaml or json"}},
		"no object of ours":    {"apiVersion: v1\nkind: Secret\nmetadata: {name: a}", []string{"render", "-f", "-"}, []string{"no Topology and no ConsumerGroup"}},
		"not YAML":             {"a: [", []string{"render", "-f", "-"}, []string{"standard input, document 1", "not YAML"}},
		"no kind":              {"a: 1", []string{"render", "-f", "-"}, []string{"apiVersion and kind are needed"}},
		"an unknown field":     {topo + ", holdQueue: []}", []string{"render", "-f", "-"}, []string{"Topology default/orders", `unknown field "spec.holdQueue"`}},
		"another version":      {"apiVersion: shove.dev/v1\nkind: Topology\nmetadata: {name: a}", []string{"render", "-f", "-"}, []string{"this release knows version shove.dev/v1alpha1"}},
		"an unknown kind":      {"apiVersion: shove.dev/v1alpha1\nkind: Topologie\nmetadata: {name: a}", []string{"render", "-f", "-"}, []string{`kind "Topologie"`}},
		"no name":              {"apiVersion: shove.dev/v1alpha1\nkind: Topology\nspec: {}", []string{"render", "-f", "-"}, []string{"metadata.name is needed"}},
		"twice":                {topo + "}\n---\n" + topo + "}", []string{"render", "-f", "-"}, []string{"Topology default/orders is there twice"}},
		"a wrong value":        {topo + ", holdQueues: [{delay: fast}]}", []string{"render", "-f", "-"}, []string{"Topology"}},
		"all problems at once": {"a: 1\n---\nb: 1", []string{"render", "-f", "-"}, []string{"document 1", "document 2"}},
	} {
		t.Run(name, func(t *testing.T) {
			stdout, _, err := run(tc.stdin, tc.args...)
			if err == nil {
				t.Fatalf("no error; output:\n%s", stdout)
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the error does not say %q: %v", want, err)
				}
			}
			if stdout != "" {
				t.Errorf("something was printed all the same:\n%s", stdout)
			}
		})
	}
}

func FuzzManifests(f *testing.F) {
	for _, path := range []string{"testdata/orders.yaml", "testdata/mistakes.yaml"} {
		b, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(b))
	}
	f.Fuzz(func(_ *testing.T, manifest string) {
		_, _, _ = run(manifest, "render", "-f", "-") // it must not panic
	})
}
