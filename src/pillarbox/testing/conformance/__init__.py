"""Conformance suites: a test class per port, a test per sentence of its contract. A binding has the fixture."""
