"""Tenants and their API keys: who a request comes from and what it may do."""
