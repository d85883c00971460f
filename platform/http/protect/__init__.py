"""Bounds on clients' connections, typed errors, and the limits of tenants around each request."""
