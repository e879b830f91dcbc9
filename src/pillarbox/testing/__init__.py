"""Test support: conformance suites for stores, transports and caches, a pytest plugin, and faults."""
