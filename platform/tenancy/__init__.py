"""Tenants: who they are, what they may do, what they have used."""
