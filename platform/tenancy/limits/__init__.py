"""Limits of tenants and keys: rates, concurrent requests, token budgets."""
