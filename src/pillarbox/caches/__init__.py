"""Caches for snapshots of rows."""
