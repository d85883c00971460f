"""The layers model families are built from."""
