"""Consumers: each message takes effect once."""
