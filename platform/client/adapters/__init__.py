"""Adapters as users name, load and unload them; `sources` finds their files."""
