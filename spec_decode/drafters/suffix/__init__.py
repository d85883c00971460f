"""Suffix decoding: drafts from a tree of what was generated before."""
