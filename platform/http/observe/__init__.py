"""Metrics, health, traces, and one line in the log for each request."""
