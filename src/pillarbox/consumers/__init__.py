"""The other end: messages come in, and take effect once."""
