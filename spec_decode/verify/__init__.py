"""Verification: which drafts are accepted, and which token follows them."""
