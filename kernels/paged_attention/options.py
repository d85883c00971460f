"""Options of a model's attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np


class Chunks(NamedTuple):
    """Range of keys in a layer that divides positions into chunks: a query sees those of its own chunk (Llama 4)."""

    size: int


@dataclass(frozen=True, slots=True)
class WholeRow:
    """Range of keys in a layer whose queries see each other: a query sees all keys up to its row's end (DFlash)."""


Window: TypeAlias = int | Chunks | WholeRow | None
"""Range of keys that a query at position p sees: (p - window, p], its chunk up to p, [0, end of its row), or None:
[0, p]."""
_NO_BOUND = 1 << 30
Positions = TypeVar("Positions", int, np.ndarray)


def first_seen(positions: Positions, window: int | Chunks | WholeRow) -> Positions:
    """First key that the queries at `positions` see, below 0 if a window begins before the text."""
    if isinstance(window, WholeRow):
        return positions * 0
    if isinstance(window, Chunks):
        return positions // window.size * window.size
    return positions - window + 1


def window_size(window: int | Chunks | WholeRow) -> int:
    """Most keys that a query sees."""
    if isinstance(window, WholeRow):
        return _NO_BOUND
    return window.size if isinstance(window, Chunks) else window


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
