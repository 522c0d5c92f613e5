package runtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shove-dev/shove/broker"
	"github.com/shove-dev/shove/runtime/config"
	"github.com/shove-dev/shove/runtime/metrics"
	"github.com/shove-dev/shove/topology"
)

// Runtime consumes, drains dead letters and publishes for one process. Make it with New, then Run it once.
type Runtime struct {
	drivers    map[topology.Kind]broker.Driver
	config     *config.RuntimeConfig
	configPath string
	bindings   []binding
	log        *slog.Logger
	registerer prometheus.Registerer
	metrics    *metrics.Metrics
	httpAddr   string
	pod        string
	declare    bool
	values     context.Context
	onError    OnError

	// clientsMu is held while connecting, so nothing else may wait for it.
	clientsMu sync.Mutex
	clients   map[string]*sharedClient // by broker name

	mu        sync.Mutex
	consumers []*consumer
	reloadErr error
	restart   []string
	closed    bool // Run is over: nothing is connected any more

	targets publishTargets
	audits  []*auditor // set by New

	failure chan error // a panic outside a handler
}

// New puts a Runtime together. It reads the configuration and checks it against the handlers, and connects to nothing.
func New(opts ...Option) (*Runtime, error) {
	r := &Runtime{
		drivers: map[topology.Kind]broker.Driver{}, clients: map[string]*sharedClient{}, log: slog.Default(),
		registerer: prometheus.DefaultRegisterer, httpAddr: defaultHTTPAddr(), values: context.Background(), failure: make(chan error, 1),
	}
	for _, o := range opts {
		if err := o(r); err != nil {
			return nil, err
		}
	}
	if r.pod == "" {
		r.pod = podName()
	}
	if err := r.loadConfig(); err != nil {
		return nil, err
	}
	m, err := metrics.New(r.registerer)
	if err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	r.metrics = m
	m.Generation(r.config.Generation)
	for _, k := range r.config.Consumers {
		if !slices.ContainsFunc(r.bindings, func(b binding) bool { return b.topology == k.Topology && b.role == broker.ReadMain }) {
			return nil, fmt.Errorf("consumer %q: no handler is bound to topology %q: add runtime.Handle(%q, …)", k.Group, k.Topology, k.Topology)
		}
	}
	for _, b := range r.bindings {
		c, err := r.newConsumer(b)
		if err != nil {
			return nil, err
		}
		if c != nil {
			r.consumers = append(r.consumers, c)
		}
	}
	return r, nil
}

// DefaultHTTPAddr is where the endpoints are served unless the option HTTPAddr or, below it, the environment variable
// EnvHTTPAddr says otherwise.
const (
	DefaultHTTPAddr = ":9464"
	EnvHTTPAddr     = "SHOVE_HTTP_ADDR"
)

func defaultHTTPAddr() string {
	if addr, ok := os.LookupEnv(EnvHTTPAddr); ok {
		return addr
	}
	return DefaultHTTPAddr
}

func podName() string {
	if name := os.Getenv("POD_NAME"); name != "" {
		return name
	}
	name, err := os.Hostname()
	if err != nil {
		return "unknown"
	}
	return name
}

func (r *Runtime) loadConfig() error {
	if r.config != nil {
		return r.config.Validate()
	}
	if r.configPath == "" {
		r.configPath = os.Getenv(config.EnvPath)
	}
	if r.configPath == "" {
		return fmt.Errorf("no configuration: set %s to the path of a RuntimeConfig, or use the option ConfigFile or Config", config.EnvPath)
	}
	c, warnings, err := config.Load(r.configPath)
	if err != nil {
		return err
	}
	for _, w := range warnings {
		r.log.Warn("configuration has something this runtime does not know; it is ignored", "field", w)
	}
	r.config = c
	return nil
}

// newConsumer makes the consumer of a binding. It is nil for a handler without a consumer in the configuration.
func (r *Runtime) newConsumer(b binding) (*consumer, error) {
	group, ok := r.groupOf(r.config, b.topology)
	if !ok {
		r.log.Warn("a handler is bound to a topology that no consumer of the configuration names: it gets no messages", "topology", b.topology)
		return nil, nil
	}
	call, err := b.make(b.codec)
	if err != nil {
		return nil, fmt.Errorf("handler of %q: %w", b.topology, err)
	}
	c := &consumer{
		rt: r, topology: b.topology, group: group, role: b.role, call: call, code: b.options, values: r.values,
		changed: make(chan struct{}, 1), queue: newTaskQueue(),
		log: r.log.With("topology", b.topology, "group", group),
	}
	if b.role == broker.ReadDeadLetter {
		c.log = c.log.With("deadLetter", true)
	}
	set, err := r.settingsFor(r.config, c)
	if err != nil {
		return nil, err
	}
	c.caps = r.drivers[set.broker.Kind].Capabilities(set.decl.Options)
	c.meter = r.metrics.Consumer(b.topology, group)
	c.settings.Store(set)
	for _, w := range set.decl.Topology.Warnings() {
		c.log.Warn(w.Text())
	}
	return c, nil
}

func (r *Runtime) groupOf(cfg *config.RuntimeConfig, topology string) (string, bool) {
	i := slices.IndexFunc(cfg.Consumers, func(k config.Consumer) bool { return k.Topology == topology })
	if i < 0 {
		return "", false
	}
	return cfg.Consumers[i].Group, true
}

// settingsFor resolves what a consumer runs with from a configuration.
func (r *Runtime) settingsFor(cfg *config.RuntimeConfig, c *consumer) (*settings, error) {
	fail := func(err error) (*settings, error) { return nil, fmt.Errorf("consumer of %q: %w", c.topology, err) }
	i := slices.IndexFunc(cfg.Consumers, func(k config.Consumer) bool { return k.Topology == c.topology })
	t, ok := cfg.Topology(c.topology)
	if i < 0 || !ok {
		return fail(errors.New("it is not in the configuration any more"))
	}
	b, ok := cfg.Broker(t.Broker)
	if !ok {
		return fail(fmt.Errorf("no broker is called %q", t.Broker))
	}
	driver, ok := r.drivers[b.Kind]
	if !ok {
		return fail(fmt.Errorf("no driver for %s: add runtime.Drivers(%s.Driver)", b.Kind, b.Kind))
	}
	decl, err := t.Declaration()
	if err != nil {
		return fail(err)
	}
	if c.role == broker.ReadDeadLetter && decl.Topology.DeadLetter == "" {
		return fail(errors.New("a dead handler is bound, but the topology has no dead-letter queue: add deadLetter to it"))
	}
	caps := driver.Capabilities(decl.Options)
	if decl.Topology.Sequenced != nil && !caps.Sequenced {
		return fail(fmt.Errorf("sequenced topologies: %w on %s", broker.ErrUnsupported, b.Kind))
	}
	k := cfg.Consumers[i]
	options, err := config.Resolve(config.Traits{External: t.External, CrashLimitDefault: caps.CrashLimitDefault, TimeoutLeavesPending: caps.TimeoutLeavesPending},
		config.Layer{Name: config.LayerConsumerGroup, Options: k.Options}, config.Layer{Name: config.LayerCode, Options: c.code},
		config.Layer{Name: config.LayerBroker, Options: b.ConsumerDefaults})
	if err != nil {
		return fail(err)
	}
	if options.TimeoutOutcome != 0 && options.TimeoutOutcome == Defer.Verdict && len(decl.Topology.Holds) == 0 {
		return fail(errors.New("handlerTimeoutOutcome Defer needs a hold queue: add holdQueues to the topology, or choose Retry"))
	}
	s := &settings{options: options, policy: options.Policy(decl.Topology), decl: decl, broker: b, paused: k.Paused, prefetch: options.Prefetch, lease: options.HandlerTimeout}
	if driver.LeaseLimit != nil {
		limit, err := driver.LeaseLimit(b.Endpoint)
		if err != nil {
			return fail(err)
		}
		s.prefetch = broker.EffectivePrefetch(options.Prefetch, options.Concurrency, options.HandlerTimeout, limit)
	}
	return s, nil
}

func (r *Runtime) connection(b config.Broker) (broker.Config, error) {
	cfg := broker.Config{Endpoint: b.Endpoint, Name: "shove " + r.pod, Logger: r.log.With("broker", b.Name)}
	if b.CredentialsDir != "" {
		cfg.Credentials = func(context.Context) (broker.Credentials, error) { return config.ReadCredentials(b) }
	}
	if b.TLS != nil {
		cfg.TLS = config.TLSLoader(b.TLS)
	}
	return cfg, nil
}

// spawn starts a goroutine of ours. A panic in it is a bug of shove, not of a handler: it ends the process with an
// error instead of killing it with every message in flight (N2).
func (r *Runtime) spawn(wg *sync.WaitGroup, f func()) {
	if wg == nil {
		wg = new(sync.WaitGroup)
	}
	wg.Go(func() {
		defer func() {
			if p := recover(); p != nil {
				r.log.Error("panic outside a handler", "panic", p, "stack", string(debug.Stack()))
				select {
				case r.failure <- &PanicError{Value: p}:
				default:
				}
			}
		}()
		f()
	})
}

// Status is the state of everything that runs.
func (r *Runtime) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := Status{Generation: r.config.Generation, Version: Version, RestartRequired: r.restart}
	if r.reloadErr != nil {
		s.ReloadError = r.reloadErr.Error()
	}
	for _, c := range r.consumers {
		state, since, reconnects, err := c.state.get()
		cs := ConsumerStatus{Topology: c.topology, Group: c.group, DeadLetter: c.role == broker.ReadDeadLetter, State: state, Since: since, Reconnects: reconnects, InFlight: int(c.inFlight.Load())}
		if err != nil {
			cs.LastError = err.Error()
		}
		s.Consumers = append(s.Consumers, cs)
	}
	return s
}

// Ready says whether every consumer consumes, and every handler has a consumer.
func (r *Runtime) Ready() bool {
	r.mu.Lock()
	bound := len(r.consumers) == len(r.bindings)
	r.mu.Unlock()
	return bound && r.Status().Ready()
}

// Version is the version of shove that is linked in. It is set at build time.
var Version = "dev"
