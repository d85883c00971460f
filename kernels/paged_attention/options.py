"""Options of a model's attention."""

from __future__ import annotations

from typing import NamedTuple


class AttentionOptions(NamedTuple):
    """Properties of a model's attention other than its heads."""

    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(D)."""
    soft_cap: float | None = None
    """Cap c of the scores: a score x becomes c · tanh(x / c)."""
    rotary_dim: int | None = None
    """Elements of a head that are rotated, from its first on; None: all."""
    interleaved: bool = False
    """True: adjacent elements are rotated as pairs; False: an element and the one half of the rotated elements after
    it."""
    shared: bool = False
    """True: keys are the values too, and the cache holds them once (latent attention)."""


DEFAULT_OPTIONS = AttentionOptions()
"""Options of Llama's attention."""
