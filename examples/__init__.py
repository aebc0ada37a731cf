"""Worked examples: tenants, their data, the adapters trained on it and a tour of a running server."""
