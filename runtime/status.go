package runtime

import "time"

// State is what a consumer is doing.
type State string

const (
	StateConnecting   State = "connecting"
	StateConsuming    State = "consuming"
	StateReconnecting State = "reconnecting"
	StatePaused       State = "paused"
	StateDraining     State = "draining"
	StateStopped      State = "stopped"
)

// Status is what /status shows.
type Status struct {
	// Generation is that of the configuration in use.
	Generation string           `json:"generation"`
	Version    string           `json:"version"`
	Consumers  []ConsumerStatus `json:"consumers"`
	// ReloadError says why the newest configuration is not in use; empty: it is.
	ReloadError string `json:"reloadError,omitempty"`
	// RestartRequired names what changed in the configuration and takes effect with a restart only.
	RestartRequired []string `json:"restartRequired,omitempty"`
}

// ConsumerStatus is one consumer.
type ConsumerStatus struct {
	Topology   string    `json:"topology"`
	Group      string    `json:"group"`
	DeadLetter bool      `json:"deadLetter,omitempty"`
	State      State     `json:"state"`
	Since      time.Time `json:"since"`
	InFlight   int       `json:"inFlight"`
	// Reconnects counts the attempts to subscribe again since the process started.
	Reconnects int    `json:"reconnects"`
	LastError  string `json:"lastError,omitempty"`
}

// Ready says whether every consumer consumes or is paused on purpose.
func (s Status) Ready() bool {
	for _, c := range s.Consumers {
		if !c.State.ready() {
			return false
		}
	}
	return true
}

func (s State) ready() bool { return s == StateConsuming || s == StatePaused }
