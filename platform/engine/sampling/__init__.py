"""Sampling: from logits to tokens, with all that requests ask of logits."""
