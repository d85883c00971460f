"""The steps. A released one never changes."""
