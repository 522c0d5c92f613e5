package render

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shove-dev/shove/api/v1alpha1"
	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/settle"
	"github.com/shove-dev/shove/topology"
)

// Options are a layer's options in the runtime's terms; what is not set stays unset. The error is a
// *topology.FieldError.
func Options(o *v1alpha1.ConsumerOptions) (config.Options, error) {
	if o == nil {
		return config.Options{}, nil
	}
	out := config.Options{
		Prefetch: toInt(o.Prefetch), Concurrency: toInt(o.Concurrency), MaxReconnectAttempts: toInt(o.MaxReconnectAttempts),
		HandlerTimeout: toDuration(o.HandlerTimeout), DrainTimeout: toDuration(o.DrainTimeout), ExactlyOnce: clone(o.ExactlyOnce),
		HandlerTimeoutOutcome: toText(o.HandlerTimeoutOutcome), RetryStrategy: toText(o.RetryStrategy),
	}
	var err error
	if out.MaxRetries, err = toUint("maxRetries", o.MaxRetries); err != nil {
		return config.Options{}, err
	}
	if out.CrashLimit, err = toUint("crashLimit", o.CrashLimit); err != nil {
		return config.Options{}, err
	}
	if out.MaxMessageSize, err = toBytes("maxMessageSize", o.MaxMessageSize); err != nil {
		return config.Options{}, err
	}
	if d := o.DeferLimit; d != nil {
		limit := config.DeferLimit{}
		n, err := toUint("deferLimit.maxDefers", d.MaxDefers)
		if err != nil {
			return config.Options{}, err
		}
		if n != nil {
			limit.MaxDefers = *n
		}
		if d.MaxAge != nil {
			limit.MaxAge = config.Duration(d.MaxAge.Duration)
		}
		out.DeferLimit = &limit
	}
	return out, nil
}

func clone[T any](v *T) *T {
	if v == nil {
		return nil
	}
	c := *v
	return &c
}

func toInt(v *int32) *int {
	if v == nil {
		return nil
	}
	n := int(*v)
	return &n
}

func toText[T ~string](v *T) *string {
	if v == nil {
		return nil
	}
	s := string(*v)
	return &s
}

func toDuration(v *metav1.Duration) *config.Duration {
	if v == nil {
		return nil
	}
	d := config.Duration(v.Duration)
	return &d
}

func toUint(field string, v *int32) (*uint32, error) {
	if v == nil {
		return nil, nil
	}
	if *v < 0 {
		return nil, &topology.FieldError{Field: field, Problem: fmt.Sprintf("%d: use 0 or more", *v)}
	}
	n := uint32(*v)
	return &n, nil
}

func toBytes(field string, q *resource.Quantity) (*int64, error) {
	if q == nil {
		return nil, nil
	}
	n, ok := q.AsInt64()
	if !ok || n < 1 || n > math.MaxInt32 {
		return nil, &topology.FieldError{Field: field, Problem: fmt.Sprintf("%s: use a whole number of bytes between 1 and 1Gi, such as 10Mi", q)}
	}
	return &n, nil
}

// Effective are the resolved options as they are shown in a ConsumerGroup's status, each with its layer. prefetch is
// what the broker's lease leaves of the wanted one (H11).
func Effective(e config.Effective, prefetch int) *v1alpha1.EffectiveOptions {
	option := func(name, value string) *v1alpha1.EffectiveOption {
		return &v1alpha1.EffectiveOption{Value: value, Layer: v1alpha1.OptionLayer(e.From[name])}
	}
	outcome := "Retry"
	switch e.TimeoutOutcome {
	case settle.VerdictDefer:
		outcome = "Defer"
	case settle.VerdictReject:
		outcome = "Reject"
	case settle.VerdictAck:
		outcome = "Ack"
	}
	strategy := "Republish"
	if e.Strategy == settle.InPlace {
		strategy = "InPlace"
	}
	reconnects := "unlimited"
	if e.MaxReconnectAttempts > 0 {
		reconnects = strconv.Itoa(e.MaxReconnectAttempts)
	}
	out := &v1alpha1.EffectiveOptions{
		Prefetch:              option("prefetch", strconv.Itoa(e.Prefetch)),
		Concurrency:           option("concurrency", strconv.Itoa(e.Concurrency)),
		MaxRetries:            option("maxRetries", strconv.FormatUint(uint64(e.MaxRetries), 10)),
		MaxReconnectAttempts:  option("maxReconnectAttempts", reconnects),
		HandlerTimeout:        option("handlerTimeout", duration(e.HandlerTimeout)),
		HandlerTimeoutOutcome: option("handlerTimeoutOutcome", outcome),
		RetryStrategy:         option("retryStrategy", strategy),
		MaxMessageSize:        option("maxMessageSize", resource.NewQuantity(e.MaxMessageSize, resource.BinarySI).String()),
		DrainTimeout:          option("drainTimeout", duration(e.DrainTimeout)),
		DeferLimit:            option("deferLimit", deferLimit(e.DeferLimit)),
		CrashLimit:            option("crashLimit", strconv.FormatUint(uint64(e.CrashLimit), 10)),
		ExactlyOnce:           option("exactlyOnce", strconv.FormatBool(e.ExactlyOnce)),
	}
	if prefetch < e.Prefetch {
		out.Prefetch = &v1alpha1.EffectiveOption{Value: strconv.Itoa(prefetch), Layer: v1alpha1.LayerBrokerLimit}
	}
	return out
}

func deferLimit(l config.DeferLimit) string {
	var parts []string
	if l.MaxDefers > 0 {
		parts = append(parts, "maxDefers="+strconv.FormatUint(uint64(l.MaxDefers), 10))
	}
	if l.MaxAge > 0 {
		parts = append(parts, "maxAge="+duration(time.Duration(l.MaxAge)))
	}
	if len(parts) == 0 {
		return "none"
	}
	return strings.Join(parts, ",")
}

// duration writes a duration as people do: 30s, 1m30s, 24h; not 24h0m0s.
func duration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
