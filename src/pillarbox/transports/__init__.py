"""Transports: one file each. Import the one you need; none of them is loaded before."""
