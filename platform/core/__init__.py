"""The vocabulary every other package shares; imports no torch at run time."""
