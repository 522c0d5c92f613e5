package render

import (
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/topology"
)

// Refusal is why a Broker may not be used, as a condition's reason and message.
type Refusal struct {
	Reason  string
	Message string
}

func (r *Refusal) Error() string { return r.Message }

// Claims are the queues that a Topology claims: all that it declares, and the main queue of an external one.
func Claims(t topology.Topology) []topology.Queue {
	qs := t.Queues()
	if t.External { // only its dead-letter queue is declared
		qs = slices.DeleteFunc(qs, func(q topology.Queue) bool {
			return q.Role != topology.RoleMain && q.Role != topology.RoleDeadLetter
		})
	}
	return qs
}

// Access says whether a Topology of a namespace may claim its queues on a Broker; nil means that it may. labels are
// the namespace's own and matter with from: Selector only. Names are judged as logical ones.
func Access(b *v1alpha1.Broker, namespace string, labels map[string]string, queues []topology.Queue) *Refusal {
	own := namespace == b.Namespace
	if r := namespaceAllowed(b, namespace, labels); !own && r != nil {
		return r
	}
	patterns := queuePatterns(b, own)
	if patterns == nil {
		return nil
	}
	for _, q := range queues {
		if !slices.ContainsFunc(patterns, func(p string) bool {
			return matches(strings.ReplaceAll(p, "{namespace}", namespace), q.Name)
		}) {
			return &Refusal{v1alpha1.ReasonQueueNotAllowed, fmt.Sprintf(
				"queue %q matches none of the patterns that Broker %s/%s allows here (%s): choose another name, or ask its owner to extend allowedNamespaces.queues",
				q.Name, b.Namespace, b.Name, strings.Join(patterns, ", "))}
		}
	}
	return nil
}

func namespaceAllowed(b *v1alpha1.Broker, namespace string, set map[string]string) *Refusal {
	refused := &Refusal{v1alpha1.ReasonNamespaceNotAllowed, fmt.Sprintf(
		"Broker %s/%s does not allow namespace %q: ask its owner to extend allowedNamespaces", b.Namespace, b.Name, namespace)}
	a := b.Spec.AllowedNamespaces
	if a == nil {
		return refused
	}
	switch a.From {
	case v1alpha1.NamespacesAll:
		return nil
	case v1alpha1.NamespacesSelector:
		selector, err := metav1.LabelSelectorAsSelector(a.Selector)
		if err == nil && selector.Matches(labels.Set(set)) {
			return nil
		}
	}
	return refused
}

// queuePatterns are the patterns that bind; nil: none do.
func queuePatterns(b *v1alpha1.Broker, own bool) []string {
	a := b.Spec.AllowedNamespaces
	same := a == nil || a.From == "" || a.From == v1alpha1.NamespacesSame
	switch {
	case own && (a == nil || !same || len(a.Queues) == 0):
		return nil
	case a != nil && len(a.Queues) > 0:
		out := make([]string, len(a.Queues))
		for i, p := range a.Queues {
			out[i] = string(p)
		}
		return out
	case same:
		return nil
	default:
		return []string{"{namespace}.*"}
	}
}

// matches says whether name matches a pattern in which * stands for any characters, none included.
func matches(pattern, name string) bool {
	parts := strings.Split(pattern, "*")
	if len(parts) == 1 {
		return pattern == name
	}
	rest, ok := strings.CutPrefix(name, parts[0])
	if !ok {
		return false
	}
	last := parts[len(parts)-1]
	for _, p := range parts[1 : len(parts)-1] {
		i := strings.Index(rest, p)
		if i < 0 {
			return false
		}
		rest = rest[i+len(p):]
	}
	return strings.HasSuffix(rest, last)
}
