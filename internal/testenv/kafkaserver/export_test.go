package kafkaserver

// For the tests, which are outside the package because they use testenv, which imports it.
var (
	Checksums   = checksums
	Download    = download
	JavaVersion = javaVersion
	Jars        = jars
	Verify      = verify
)

// Dir is the broker's folder.
func (s *Server) Dir() string { return s.dir }
