package runtime

import (
	"errors"

	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/runtime/metrics"
)

// reload takes a new configuration into use, whole or not at all: what cannot be used leaves the last good one in
// place.
func (r *Runtime) reload(next *config.RuntimeConfig, err error) {
	if err == nil {
		err = r.adopt(next)
	}
	r.mu.Lock()
	r.reloadErr = err
	r.mu.Unlock()
	if err != nil {
		r.metrics.Reloaded(metrics.Refused)
		r.log.Error("the new configuration is not used; the last good one stays in use", "error", err)
		return
	}
	r.mu.Lock()
	restart := r.restart
	r.mu.Unlock()
	if len(restart) > 0 {
		r.metrics.Reloaded(metrics.RestartRequired)
		r.log.Warn("a part of the new configuration needs a restart", "changes", restart)
	} else {
		r.metrics.Reloaded(metrics.Applied)
	}
	r.metrics.Generation(next.Generation)
	r.log.Info("configuration reloaded", "generation", next.Generation)
}

func (r *Runtime) adopt(next *config.RuntimeConfig) error {
	r.mu.Lock()
	current := r.config
	r.mu.Unlock()
	_, restart := config.Diff(current, next)
	merged := config.KeepFixed(current, next)
	all := make([]*settings, len(r.consumers))
	var errs []error
	for i, c := range r.consumers {
		s, err := r.settingsFor(merged, c)
		if err != nil {
			errs = append(errs, err)
		}
		all[i] = s
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for i, c := range r.consumers {
		c.apply(all[i])
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.config, r.restart = merged, nil
	for _, change := range restart {
		r.restart = append(r.restart, change.String())
	}
	return nil
}
