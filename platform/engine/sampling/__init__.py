"""Sampling: from logits to tokens, with all sampling parameters."""
