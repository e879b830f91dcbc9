"""Stores: where deliveries live and how progress is kept."""
