package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/internal/drivers"
)

func TestThePageIsCurrent(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "capabilities.md"))
	if err != nil {
		t.Fatal(err)
	}
	want, err := replace(string(page), drivers.Columns())
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, string(page)); d != "" {
		t.Errorf("make generate changes docs/capabilities.md (-drivers +page):\n%s", d)
	}
}

func TestTable(t *testing.T) {
	column := func(name string, c broker.Capabilities) drivers.Column {
		return drivers.Column{Name: name, Driver: broker.Driver{Capabilities: func(json.RawMessage) broker.Capabilities { return c }}}
	}
	got, err := table([]drivers.Column{column("a", broker.Capabilities{Durable: true}), column("b", broker.Capabilities{MaxHeaderBytes: 64 << 10, HoldLateness: 5e7})})
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"| capability | a | b | what \"no\" means |", "| `Durable` | yes | no | ", "| `MaxHeaderBytes` | no limit | 64 KiB | ", "| `HoldLateness` | – | 50ms | "} {
		if !strings.Contains(got, line) {
			t.Errorf("no line %q in\n%s", line, got)
		}
	}
	if _, err := replace("a page without marks", nil); err == nil {
		t.Error("a page without marks is accepted")
	}
}
