"""Route plans of many tenants: commands, events, a read model and queries. See README.md."""
