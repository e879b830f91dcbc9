"""Orders over HTTP, with an outbox. See README.md."""
