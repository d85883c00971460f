"""The OpenAI-compatible HTTP server and its administration routes."""
