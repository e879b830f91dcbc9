"""Caches: where read snapshots are kept beside the database."""
