"""Suffix decoding: drafts from a tree of earlier text."""
