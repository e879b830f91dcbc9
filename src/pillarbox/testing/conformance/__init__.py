"""Conformance suites. Each is a class of tests, one per sentence of a port's contract; a binding provides the fixture."""
