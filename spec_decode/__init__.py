"""Speculative decoding: proposers, verification rules and the controller of draft lengths."""
