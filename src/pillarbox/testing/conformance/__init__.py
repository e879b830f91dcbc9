"""Conformance suites: one test class per port, one test per sentence of its contract. A binding provides the
fixture.
"""
