"""Conformance suites. A class of tests each, one per sentence of a port's contract; a binding provides the fixture."""
