"""Verification: accepted drafts, and the token after them."""
