"""Help for testing: conformance suites for stores, transports and caches, to be bound to one's own."""
