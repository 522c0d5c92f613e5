// Package brokertest is the promise of the product as a test: every backend runs it, and a message has the same fate on
// all of them. Run is the entry point:
//
//	func TestConformance(t *testing.T) { brokertest.Run(t, backend) }
//
// A subtest is named by the rule of the delivery semantics that it proves (TestConformance/A4), below the backend's
// variant where it has some (TestConformance/quorum/A4). Subtests below "seam" and "faults" hold a backend to its
// contract with the runtime and to what it must survive.
//
// Nothing is skipped. What a broker cannot do is false in its broker.Capabilities, which is reviewed and documented;
// a rule excused by it passes and logs "brokertest: exempt <RULE>: <reason>". A fault that a backend's tests cannot
// bring about is a missing function in Faults, and a rule that needs it fails.
package brokertest
