"""The operators' console: a page at `/console`, and the live statistics that it shows."""
