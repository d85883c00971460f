"""Rotary position embedding (Su et al. 2021) with the half-split pairs of HF Llama."""

from .torch import Rotation, apply_rope, apply_rope_invariant

__all__ = ["Rotation", "apply_rope", "apply_rope_invariant"]
