"""Clients' files: `/v1/files`, and their folder on disk."""
