"""Medusa heads: one head for each position after the next token."""
